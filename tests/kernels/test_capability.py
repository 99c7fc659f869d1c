import logging

import pytest
import torch

from octavo.kernels import capability
from octavo.kernels.capability import fast_dtype, runs_natively, warn_once_if_emulated


def test_what_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    natives = {(7, 5): False, (8, 6): False, (8, 9): True, (9, 0): True, (10, 0): True, (12, 0): True}
    for version, native in natives.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, version=version: version)
        assert runs_natively(torch.device("cuda")) is native
    assert not runs_natively(torch.device("cpu"))


@pytest.mark.parametrize("fast", [False, True])
def test_the_fastest_dtype_of_a_cpu(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of its instructions, or as an older torch says; any GPU multiplies bfloat16."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16 if fast else torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast, "avx512": True}, raising=False)
    capability._cpu_multiplies_bfloat16.cache_clear()
    assert fast_dtype(cpu) == dtype and fast_dtype(torch.device("cuda")) == torch.bfloat16
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    monkeypatch.setattr(capability, "is_avx512_bf16_supported", lambda: fast)
    capability._cpu_multiplies_bfloat16.cache_clear()
    assert fast_dtype(cpu) == dtype
    capability._cpu_multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize(("version", "warned"), [((8, 0), ["cpu", "cuda"]), ((9, 0), ["cpu"])])
def test_one_warning_a_device_type_where_fp8_is_emulated(version, warned, caplog, monkeypatch):
    monkeypatch.setattr(capability, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        for device in ("cpu", "cpu", "cuda", "cuda", "meta", "cpu"):
            warn_once_if_emulated(torch.device(device))
    assert [record.name for record in caplog.records] == ["octavo"] * len(warned)
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == [f"no FP8 hardware on {device}" for device in warned]
