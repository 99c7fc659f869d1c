"""The lines of `octavo info` on the kernels of this machine's devices."""

import pytest
import torch

from octavo.nn import machine


def test_which_products_are_torchs(monkeypatch):
    library = pytest.importorskip("octavo.kernels.triton.library_matmul")
    cpu = torch.device("cpu")
    assert machine.products_of(cpu) == []
    monkeypatch.setattr(machine, "runs_natively", lambda device: True)
    monkeypatch.setattr(library, "_agrees", lambda device, a_tile, *others: a_tile == (-1, -1))
    lines = machine.products_of(cpu)
    assert lines[1] == "products on cpu" and len(lines) == 2 + len(library.LIBRARY)
    assert all(("PerTensor()" in line) == line.endswith("torch's product") for line in lines)


def test_whose_tiles_the_kernels_have(monkeypatch, tmp_path):
    launch = pytest.importorskip("octavo.kernels.triton.launch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine, "runs_natively", lambda device: False)
    assert machine.configurations() == []
    monkeypatch.setattr(machine, "runs_natively", lambda device: device.index == 1)
    path = tmp_path / "table.json"
    for tuned in (None, path):
        monkeypatch.setattr(launch.TileTable, "tuned_file", lambda tuned=tuned: tuned)
        assert machine.configurations()[1].startswith("kernels' tiles: octavo's own; `octavo tune` measures")
    path.touch()
    assert machine.configurations() == ["", f"kernels' tiles: tuned on this GPU, {path}"]


def test_which_attention_torch_takes(monkeypatch):
    cpu = torch.device("cpu")

    def without_driver(params):
        raise torch.AcceleratorError("CUDA error: CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", without_driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = "\n".join(machine.attention_on([cpu]))
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        alone = "\n".join(machine.attention_on([cpu]))
    assert "can: flash, efficient, math, cudnn\n" in text and "can: math\n" in alone
    assert "cpu: flash with heads of 64, flash with heads of 128" in text and "cpu: math with heads of 64" in alone
    assert "no CUDA device here" in text and "set_priority" not in text
    # on a GPU where cuDNN's attention waits behind flash, and where it is chosen
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: params.is_causal)
    assert "sdpa_kernel([SDPBackend.CUDNN_ATTENTION" in "\n".join(machine.attention_on([cpu]))
    monkeypatch.setattr(machine, "fused_sdp_choice", lambda *_, is_causal: 3)
    text = "\n".join(machine.attention_on([cpu]))
    assert "cpu: cudnn with heads of 64" in text and "set_priority" not in text
