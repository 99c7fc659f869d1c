"""What a cast is given, as the host sees it before any launch."""

from typing import Any

import pytest
import torch

from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.arguments import CastSource, NormSource, Scaling
from tests.support.triton_cases import ALL, E4M3, E5M2, laid, poisoned_memory
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
TILES = [ALL, (1, -1), (1, 32), (32, 32), (3, 8)]


@pytest.fixture
def given(kernels: TritonKernels) -> Any:
    """The module."""
    return kernels.module("cast_input")


def of(
    module: Any,
    device: torch.device,
    activation: str = "swiglu",
    *,
    shape: tuple[int, int] = (64, 32),
    dtype: torch.dtype = BF16,
    h_dtype: torch.dtype = BF16,
    h_tile: tuple[int, int] | None = None,
    forward: bool = False,
    layouts: tuple[str, str, str] = ("rows", "rows", "rows"),
) -> Any:
    """What is given by fresh tensors: an activation's gradient, or forward itself; shape is that of its output."""
    rows, cols = shape
    wide = 2 * cols if activation and ACTIVATIONS[activation].gated else cols
    h = laid(torch.randn(rows, wide).to(h_dtype).view(torch.uint8 if h_tile else h_dtype), layouts[1], device).view(
        h_dtype
    )
    scaling: tuple[Any, ...] = ()
    if h_tile:
        scales = [-(-size // tile) if tile > 0 else 1 for size, tile in zip(h.shape, h_tile, strict=True)]
        scaling = laid(torch.rand(*scales), layouts[2], device), h_tile
    if not activation or forward:
        return module.cast_input(CastSource(h, activation, *((None, *scaling) if activation else ())))
    x = laid(torch.randn(shape).to(dtype), layouts[0], device)
    return module.cast_input(CastSource(x, activation, h, *scaling))


def test_what_is_cast_and_how_large_it_is(kernels: TritonKernels, given: Any) -> None:
    for activation, (function, gated) in ACTIVATIONS.items():
        forward = of(given, kernels.device, activation, forward=True)
        assert forward.shape == (64, 32) and forward.halves == 1 and forward.kind == "activation"
        assert forward.function[:3] == (function, gated, False) and forward.h.ptr is forward.x
        gradient = of(given, kernels.device, activation)
        assert gradient.shape == (64, 64 if gated else 32) and (gradient.rows, gradient.cols) == (64, 32)
        assert gradient.halves == (2 if gated else 1) and gradient.kind == ("gated_gradient" if gated else "gradient")
        assert gradient.function[:3] == (function, gated, True)
        assert gradient.h.shift == (32 if gated else 0)
    plain = of(given, kernels.device, "")
    assert plain.shape == (64, 32) and plain.function.name == "" and plain.kind == "" and plain.h is None


def test_a_norm(kernels: TritonKernels, given: Any) -> None:
    x, row, col = (torch.randn(size, device=kernels.device) for size in ((4, 6), 4, 6))
    for kind in ("layer_norm", "rms_norm"):
        one = given.norm_input(NormSource(x, col, None, kind, 1e-5, True), row, row)
        assert (one.function.name, one.function.zero_centered, one.kind) == ("norm", True, "norm")
        assert (one.h.mean is None) == (kind == "rms_norm")


def test_up_and_its_scales_lie_behind_the_gate(kernels: TritonKernels, given: Any) -> None:
    for layout, (shift, scale_shift) in {
        "rows": (32, 4),
        "columns": (32 * 64, 4 * 22),
        "strided": (32 * 3, 4 * 3),
    }.items():
        one = of(given, kernels.device, h_dtype=E4M3, h_tile=(3, 8), layouts=("rows", layout, layout))
        assert (one.h.shift, one.h.scale_shift) == (shift, scale_shift)
        assert one.h.ptr[0, 32].data_ptr() - one.h.ptr.data_ptr() == shift
        assert one.h.scale_inv[0, 4].data_ptr() - one.h.scale_inv.data_ptr() == 4 * scale_shift
        for tile in (ALL, (1, -1)):
            assert of(given, kernels.device, h_dtype=E4M3, h_tile=tile).h.scale_shift == 0


def test_fits(kernels: TritonKernels, given: Any) -> None:
    def fits(tile: tuple[int, int], cols: int = 48, activation: str = "swiglu", rows: int = 64, **how: Any) -> bool:
        return of(given, kernels.device, activation, shape=(rows, cols), **how).fits(tile)

    whole, small, others = (
        [ALL, (1, -1), (-1, 1)],
        [(1, 16), (64, 1), (8, 16)],
        [(3, 16), (-1, 16), (16, -1), (256, 16)],
    )
    for tile in whole:
        assert all(fits(tile, cols, activation) for cols in (0, 48, 7) for activation in ("", "silu", "swiglu"))
    for tile in small:
        assert fits(tile) and not fits(tile, rows=0) and not fits(tile, cols=0)
        assert fits(tile, cols=40, forward=True) and fits(tile, cols=40, activation="silu")
    assert not any(map(fits, others))
    assert not fits((1, 32)) and fits((1, 32), cols=64) and fits((32, 1), cols=7) and not fits((1, 2), cols=7)


@pytest.mark.parametrize("pad", [1, 2, 16])
@pytest.mark.parametrize("shape", [(0, 17), (17, 0), (9, 16), (3, 9), (5, 121), (5, 48)], ids=str)
def test_where_codes_go(kernels: TritonKernels, given: Any, shape: tuple[int, int], pad: int) -> None:
    one = of(given, kernels.device, shape=shape)
    rows, cols = shape[0], 2 * shape[1]
    with poisoned_memory():
        codes, laid_transposed = one.codes(E5M2, pad), one.codes(E5M2, pad, transpose=True)
    assert codes.shape == (rows, -(-cols // pad) * pad) and laid_transposed.shape == (cols, -(-rows // pad) * pad)
    assert codes.dtype == laid_transposed.dtype == E5M2 and codes.is_contiguous()
    # tiles reach the next multiple of 16 of a half; what padding lies beyond must be 0 before
    reached = shape[1] + -(-shape[1] // 16) * 16
    assert not codes.view(torch.uint8)[:, reached:].any()


def test_the_dtype_of_sums(kernels: TritonKernels, given: Any) -> None:
    for dtype in (BF16, torch.float16, FP32):
        for h_dtype, h_tile in ((FP32, None), (E4M3, ALL)):
            assert of(given, kernels.device, dtype=dtype, h_dtype=h_dtype, h_tile=h_tile).sums(True).dtype == dtype
        one = of(given, kernels.device, h_dtype=dtype, forward=True)
        assert one.sums(True).dtype == dtype and one.sums(True).shape == (32,)
        assert one.sums(False).shape == (0,)
    assert of(given, kernels.device, h_dtype=E5M2, h_tile=ALL, forward=True).sums(True).dtype == FP32
    assert of(given, kernels.device).sums(True).shape == (64,)


@pytest.mark.parametrize("forward", [False, True], ids=["gradient", "forward"])
def test_a_tile_of_scales_that_gate_and_up_share_fits_no_kernel(
    kernels: TritonKernels, given: Any, forward: bool
) -> None:
    for activation, h_tile, fits in (
        ("swiglu", (1, 5), False),
        ("swiglu", (7, 64), False),
        ("swiglu", (7, 16), True),
        ("swiglu", (7, -1), True),
        ("silu", (1, 5), True),
    ):
        one = of(given, kernels.device, activation, h_dtype=E4M3, h_tile=h_tile, forward=forward)
        assert one.fits(ALL) == one.fits((1, -1), (1, 32)) == fits


def test_no_scales_of_no_codes(kernels: TritonKernels, given: Any) -> None:
    # of which a kernel would read the first
    for shape in ((0, 32), (32, 0)):
        for h_tile in ((1, 32), (32, 32), (1, 5)):
            one = of(given, kernels.device, shape=shape, h_dtype=E4M3, h_tile=h_tile)
            assert one.h is None or one.h.scale_inv is None
    assert of(given, kernels.device, shape=(0, 32), h_dtype=E4M3, h_tile=ALL).h.scale_inv is not None


def test_a_configuration_of_its_own(kernels: TritonKernels, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, table = kernels.module("launch"), {"some": [[64, 16, 16, 1, 1]], "some_gradient": [[64, 32, 16, 1, 1]]}
    for name, rows in table.items():
        monkeypatch.setitem(launch.TABLE, name, rows)
    for expected, one in (
        (16, of(given, kernels.device, "")),
        (16, of(given, kernels.device, forward=True)),
        (32, of(given, kernels.device, "silu")),
        (16, of(given, kernels.device)),  # gated_gradient
    ):
        assert one.config("some").block_r == expected


def test_rounding_of(given: Any) -> None:
    assert given.rounding_of(Scaling(E4M3, ALL, False, 0)) == (False, 448.0, False)
    assert given.rounding_of(Scaling(E5M2, (1, 32), True, 3)) == (True, 57344.0 / 8, True)


def test_codes_to(given: Any) -> None:
    q, t = torch.empty(3, 16), torch.empty(5, 4)
    assert given.codes_to(q) == (q, 16, None, 0) and given.codes_to(None, t) == (None, 0, t, 4)
    assert given.codes_to(torch.empty(3, 0), torch.empty(0, 0)) == (None, 0, None, 0)


def test_wrong_arguments_are_refused(kernels: TritonKernels, given: Any) -> None:
    x = torch.zeros(4, 7, device=kernels.device)
    for activation, preactivation, said in (
        ("swish", None, "activation='swish': use one of relu, "),
        ("swiglu", None, "an even number of columns, not 7"),
        ("swiglu", x, r"of shape \[4, 14\], not \[4, 7\]"),
    ):
        with pytest.raises(ValueError, match=said):
            given.cast_input(CastSource(x, activation, preactivation))
