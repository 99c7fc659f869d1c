import pytest
import torch

import octavo
from octavo.train import environment


def test_it_names_versions_devices_and_extras(monkeypatch):
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "matplotlib" else object())
    text = environment.describe()
    assert octavo.__version__ in text and torch.__version__ in text and "python" in text and "triton" in text
    assert "cpu" in text and environment.EMULATED in text
    assert "pip install octavo[cli] (matplotlib absent)" in text and "onnx         installed" in text
    assert environment.version("no such package") is None


@pytest.mark.parametrize(
    ("hip", "capability", "fp8"), [(None, (9, 0), environment.NATIVE), ("6", (9, 4), environment.EMULATED)]
)
def test_gpus_of_two_makers(monkeypatch, hip, capability, fp8):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert ("cuda:0", "a GPU" if hip else "a GPU, sm_90", fp8) in environment.devices()


def test_which_products_are_torchs(monkeypatch):
    library = pytest.importorskip("octavo.kernels.triton.library_matmul")
    cpu = torch.device("cpu")
    assert environment.products_of(cpu) == []
    monkeypatch.setattr(environment, "runs_natively", lambda device: True)
    monkeypatch.setattr(library, "_agrees", lambda device, a_tile, *rest: a_tile == (-1, -1))
    lines = environment.products_of(cpu)
    assert lines[1] == "products on cpu" and len(lines) == 2 + len(library.LIBRARY)
    assert [line for line in lines if "PerTensor()" in line] == [
        line for line in lines if line.endswith("torch's product")
    ]
