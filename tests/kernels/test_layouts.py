import pytest
import torch

from octavo.kernels import layouts
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes, padded


@pytest.fixture(autouse=True)
def _forget_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_native", {})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_reference_reads_any_strides(device: str) -> None:
    assert not needs_transposed_codes(torch.device(device))
    assert contraction_multiple(torch.device(device)) == 1


@pytest.mark.parametrize(
    ("capability", "needs"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True), ((12, 0), True)]
)
def test_products_of_native_fp8_need_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], needs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert needs_transposed_codes(torch.device("cuda:0")) is needs
    assert contraction_multiple(torch.device("cuda:0")) == (16 if needs else 1)


def test_the_driver_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0))
    for _ in range(3):
        assert needs_transposed_codes(torch.device("cuda:0"))
    assert len(asked) == 1


def test_padded() -> None:
    assert [padded(size, 16) for size in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert padded(17, 1) == 17


@pytest.mark.parametrize("multiple", [0, -1, 3, 24, 32])
def test_other_multiples_are_refused(multiple: int) -> None:
    with pytest.raises(ValueError, match=f"pad={multiple}: .* 1, 2, 4, 8 or 16"):
        padded(10, multiple)
