import re
import sys
import tomllib

import pytest
import torch

import octavo
from octavo.cli import info
from octavo.nn import machine
from tests.support.processes import ROOT


def test_it_names_versions_devices_and_extras(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = info.describe_machine()
    assert octavo.__version__ in text and torch.__version__ in text and "python" in text and "triton" in text
    assert "cpu" in text and info.EMULATED in text
    assert re.search(r"\nrecipes on cpu\n(  .*\n)*  mx +the reference; lost: FP8's speed: emulated\n", text)
    assert "\n".join(machine.attention_on([torch.device("cpu")])) in text
    assert re.search(r"\nrecipes on cpu\n  casts +\S.* kept in .*octavo\n", text)
    assert f"matplotlib is not installed: pip install '{ROOT}[cli]'" in text and "onnx         installed" in text
    monkeypatch.chdir(ROOT)
    assert "matplotlib is not installed: pip install '.[cli]'" in info.describe_machine()
    monkeypatch.setattr("octavo.errors.__file__", str(tmp_path / "site/octavo/errors.py"))
    assert "matplotlib is not installed: pip install 'octavo[cli]'" in info.describe_machine()


@pytest.mark.parametrize(("hip", "capability", "fp8"), [(None, (9, 0), info.NATIVE), ("6", (9, 4), info.EMULATED)])
def test_gpus_of_two_makers(monkeypatch, hip, capability, fp8):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert ("cuda:0", "a GPU" if hip else "a GPU, sm_90", fp8) in info.devices()


def test_gpus_of_other_makers_and_no_triton(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda index: f"GPU {index} of Intel")
    rows = info.devices()[-3:]
    of_intel = [(f"xpu:{index}", f"GPU {index} of Intel", info.EMULATED) for index in range(2)]
    assert rows == [("mps", "Apple GPU", info.EMULATED), *of_intel]
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(info, "devices", lambda: rows[:1])
    assert "\ntriton   absent\n" in info.describe_machine()


def test_each_extra_of_the_package_is_listed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert info.EXTRAS.keys() == extras.keys() - {"docs", "dev"}
