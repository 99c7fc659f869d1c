"""A cast's input, as the host sees it before any launch."""

from typing import Any

import pytest
import torch

from octavo.granularity import PADDING, scale_shape
from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.arguments import CastSource
from tests.support.casts import ALL, E4M3, poisoned_memory
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.fixture
def module(kernels: TritonKernels) -> Any:
    """The module."""
    return kernels.module("cast_input")


def of(
    module: Any,
    activation: str = "swiglu",
    shape: tuple[int, int] = (64, 32),
    h_tile: tuple[int, int] | None = None,
    forward: bool = False,
) -> Any:
    """Return the input of a cast of fresh tensors: an activation's gradient, or forward; shape is its output's."""
    rows, cols = shape
    wide = 2 * cols if activation and ACTIVATIONS[activation].gated else cols
    h, scaling = torch.randn(rows, wide).bfloat16(), ()
    if h_tile:
        h, scaling = h.to(E4M3), (torch.rand(scale_shape(h.shape, h_tile)), h_tile)
    if not activation or forward:
        return module.cast_input(CastSource(h, activation, *((None, *scaling) if activation else ())))
    return module.cast_input(CastSource(torch.randn(shape), activation, h, *scaling))


def test_fits(kernels: TritonKernels, module: Any) -> None:
    def fits(tile: tuple[int, int], cols: int = 48, activation: str = "swiglu", rows: int = 64, **how: Any) -> bool:
        return of(module, activation, shape=(rows, cols), **how).fits(tile)

    whole, small = [ALL, (1, -1), (-1, 1)], [(1, 16), (64, 1), (8, 16)]
    others = [(3, 16), (-1, 16), (16, -1), (256, 16)]
    for tile in whole:
        assert all(fits(tile, cols, activation) for cols in (0, 48, 7) for activation in ("", "silu", "swiglu"))
    for tile in small:
        assert fits(tile) and not fits(tile, rows=0) and not fits(tile, cols=0)
        assert fits(tile, cols=40, forward=True) and fits(tile, cols=40, activation="silu")
    assert not any(map(fits, others))
    assert not fits((1, 32)) and fits((1, 32), cols=64) and fits((32, 1), cols=7) and not fits((1, 2), cols=7)
    for activation, h_tile, expected in (  # a tile of scales that gate and up share fits none
        ("swiglu", (1, 5), False),
        ("swiglu", (7, 64), False),
        ("swiglu", (7, 16), True),
        ("swiglu", (7, -1), True),
        ("silu", (1, 5), True),
    ):
        for forward in (False, True):
            assert fits(ALL, 32, activation, h_tile=h_tile, forward=forward) == expected


def test_no_scales_of_no_codes(kernels: TritonKernels, module: Any) -> None:
    # of which a kernel would read the first
    for shape in ((0, 32), (32, 0)):
        for h_tile in ((1, 32), (32, 32), (1, 5)):
            one = of(module, shape=shape, h_tile=h_tile)
            assert one.extra is None or one.extra.scale_inv is None
    assert of(module, shape=(0, 32), h_tile=ALL).extra.scale_inv is not None


def test_a_configuration_of_its_own(kernels: TritonKernels, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, table = kernels.module("launch"), {"some": [[64, 16, 16, 1, 1]], "some_gradient": [[64, 32, 16, 1, 1]]}
    for name, rows in table.items():
        monkeypatch.setitem(launch.TABLE, name, rows)
    for expected, one in (
        (16, of(module, "")),
        (16, of(module, forward=True)),
        (32, of(module, "silu")),
        (16, of(module)),  # gated_gradient
    ):
        assert one.config("some").tile_r == expected


def test_the_padding_of_a_gated_gradient(kernels: TritonKernels) -> None:
    """Of PADDING / 2 + 1 columns the second half's tile ends before the padding does."""
    for cols in (PADDING // 2, PADDING // 2 + 1):
        dy, h = torch.randn(2, cols), torch.randn(2, 2 * cols)
        with poisoned_memory():
            unpadded, padded = (
                kernels.cast(dy, None, 0, E4M3, (1, -1), False, 0, False, pad, False, "swiglu", h)[0].view(torch.uint8)
                for pad in (1, PADDING)
            )
        assert padded.shape[1] % PADDING == 0 and torch.equal(padded[:, : 2 * cols], unpadded)
        assert not padded[:, 2 * cols :].any()
