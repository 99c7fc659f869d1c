import re

import pytest
import torch

from octavo.kernels import layouts
from octavo.kernels.layouts import check_norm, contraction_multiple, needs_transposed_codes, padded, sums_dtype


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


def test_sums_of_codes_are_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert sums_dtype(dtype) == dtype
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert sums_dtype(dtype) == torch.float32


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (5, 0), (5, 1)], ids=str)
def test_a_norm_of_fitting_vectors(shape: tuple[int, int], kind: str) -> None:
    x, gamma = torch.empty(shape), torch.empty(shape[1])
    check_norm(x, gamma, None, kind)
    check_norm(x, gamma.bfloat16(), gamma, kind)


@pytest.mark.parametrize("kind", ["layernorm", "LayerNorm", ""])
def test_another_kind_of_norm_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"kind='{kind}': use 'layer_norm' or 'rms_norm'"):
        check_norm(torch.empty(3, 5), torch.empty(5), None, kind)


@pytest.mark.parametrize("shape", [(3,), (1,), (), (1, 5), (5, 1)], ids=str)
def test_vectors_that_do_not_fit_are_refused_with_both_sizes(shape: tuple[int, ...]) -> None:
    x, fits, other = torch.empty(3, 5), torch.empty(5), torch.empty(shape)
    said = re.escape(f"of shape {list(shape)}: rows of x have 5 elements")
    with pytest.raises(ValueError, match=f"gamma {said}"):
        check_norm(x, other, None, "rms_norm")
    with pytest.raises(ValueError, match=f"beta {said}"):
        check_norm(x, fits, other, "layer_norm")
