"""What a cast is given, as the host sees it before any launch."""

from typing import Any

import pytest
import torch

from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.arguments import CastSource, NormSource
from tests.support.triton_cases import ALL, E4M3, laid
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


def test_a_norm(kernels: TritonKernels, given: Any) -> None:
    x, row, col = (torch.randn(size, device=kernels.device) for size in ((4, 6), 4, 6))
    for kind in ("layer_norm", "rms_norm"):
        one = given.norm_input(NormSource(x, col, None, kind, 1e-5, True), row, row)
        assert (one.function.name, one.function.zero_centered, one.kind) == ("norm", True, "norm")
        assert (one.h.mean is None) == (kind == "rms_norm")


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


@pytest.mark.parametrize("forward", [False, True], ids=["gradient", "forward"])
def test_a_tile_of_scales_that_gate_and_up_share_fits_no_kernel(kernels, given, forward):
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
