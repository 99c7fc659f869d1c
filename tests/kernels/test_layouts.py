import pytest
import torch

from octavo.kernels.layouts import needs_transposed_codes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_reference_reads_any_strides(device: str) -> None:
    assert not needs_transposed_codes(torch.device(device))


@pytest.mark.parametrize(("capability", "needs"), [((8, 9), True), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_only_hopper_and_older_need_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], needs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert needs_transposed_codes(torch.device("cuda:0")) is needs
