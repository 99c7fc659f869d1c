"""Each group is cast as if it were alone, and nothing else is written but zeros and ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.groups import grouped_scale_shape, padded_columns
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.groups import SIZES, offsets_of, parts, random_sizes, scale_slices, slices_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TILES = [(-1, -1), (1, -1), (-1, 1), (1, 128), (1, 32), (128, 128), (128, 1), (3, 5)]


def raw(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def check(sizes: list[int], rest: int, cols: int, case: dict[str, Any], extras: tuple[Any, ...], x: Tensor) -> None:
    """A grouped cast of x against a cast of each group; extras: from ``activation`` on."""
    tile, pad, scale = case["tile"], case["pad"], case["delayed"] if case["tile"] == (-1, -1) else None
    delayed = None if scale is None else torch.tensor([1.0, scale, 1.0])
    cast = (delayed, 1, case["dtype"], tile, case["power_of_two"], case["margin"])
    as_is, transpose = case["written"]
    groups = {"offsets": offsets_of(sizes), "as_is": as_is}
    q, t, scale_inv, amax = kernels.cast(x, *cast, transpose, pad, False, *extras, **groups)
    rows, grid = sum(sizes) + rest, grouped_scale_shape((sum(sizes) + rest, cols), len(sizes), tile)
    assert scale_inv.shape == amax.shape == grid
    assert q.shape == ((rows, -(-cols // pad) * pad) if as_is else (0, 0))
    assert t.shape == ((cols, padded_columns(rows, len(sizes), pad)) if transpose else (0, 0))
    h_tile = extras[3] if len(extras) > 3 else (-1, -1)
    of_h = [scale_slices(sizes, h_tile[0])]
    by_row = slices_of(sizes)
    each = [parts(extra, of_h[0] if i == 2 else by_row) for i, extra in enumerate(extras)]
    extras_of = zip(*each, strict=True) if extras else [()] * len(sizes)
    columns, of_scales = slices_of(sizes, pad), scale_slices(sizes, tile[0])
    for place, laid, scales, own in zip(by_row, columns, of_scales, extras_of, strict=True):
        expected = kernels.cast(x[place], *cast, True, pad, False, *own)
        assert same_bits(scale_inv[scales], expected[2]) and same_bits(amax[scales], expected[3])
        if as_is:
            assert same_bits(q[place], expected[0])
        if transpose:
            width = expected[1].shape[1]
            assert same_bits(t[:, laid.start : laid.start + width], expected[1])
    if as_is:
        assert not raw(q[sum(sizes) :]).any()
    if transpose:
        assert not raw(t[:, -(-columns[-1].stop // pad) * pad :]).any()
    assert not amax[of_scales[-1].stop :].any() and (scale_inv[of_scales[-1].stop :] == 1).all()


OPTIONS: dict[str, list[Any]] = {
    "tile": TILES,
    "pad": [1, 16],
    "dtype": [E4M3, E5M2],
    "power_of_two": [False, True],
    "margin": [0, 2],
    "delayed": [None, 0.0, 3.0],
    "written": [(True, False), (False, True), (True, True), (False, False)],
}


@each_pair(sizes=SIZES, x_dtype=[torch.bfloat16, torch.float16, torch.float32], **OPTIONS)
def test_each_group_is_cast_alone(case: dict[str, Any]) -> None:
    sizes, rest = case["sizes"]
    x = torch.randn(sum(sizes) + rest, 40).to(case["x_dtype"])
    x.view(-1)[3::97] = float("inf")
    check(sizes, rest, 40, case, (), x)
    check(sizes, rest, 40, case, (), x.t().contiguous().t())


@each_pair(sizes=SIZES, activation=["swiglu", "gelu"], kind=["value", "gradient", "of codes"], **OPTIONS)
def test_activations_by_group(case: dict[str, Any]) -> None:
    sizes, rest = case["sizes"]
    width, gated = 24, case["activation"] == "swiglu"
    h = torch.randn(sum(sizes) + rest, 2 * width if gated else width)
    extras: tuple[Any, ...] = (case["activation"],)
    x, cols = h, width
    if case["kind"] != "value":
        x, cols = torch.randn(len(h), width).bfloat16(), h.shape[1]
        extras = (case["activation"], h)
    if case["kind"] == "of codes":
        tile = (128, 8)
        codes, _, scale_inv, _ = kernels.cast(h, None, 0, E4M3, tile, False, 0, offsets=offsets_of(sizes))
        extras = (case["activation"], codes, scale_inv, tile)
    check(sizes, rest, cols, case, extras, x)


@pytest.mark.parametrize("tile", [(-1, 1), (128, 128)], ids=str)
def test_any_sequence_of_sizes(tile: tuple[int, int]) -> None:
    case = {"tile": tile, "pad": 16, "dtype": E4M3, "power_of_two": False, "margin": 0, "delayed": None}
    for seed in range(25):
        sizes, rest = random_sizes(seed)
        check(sizes, rest, 9, {**case, "written": (True, True)}, (), torch.randn(sum(sizes) + rest, 9))


def test_what_is_no_number_to_cast_is_refused() -> None:
    offsets = offsets_of([2, 2])
    with pytest.raises(TypeError, match=r"torch.float64 is not cast: give bfloat16, float16 or float32"):
        kernels.cast(torch.ones(4, 4).double(), None, 0, E4M3, (1, -1), False, 0, offsets=offsets)
    with pytest.raises(ValueError, match=r"a delayed scale is one for all.*\(1, -1\)"):
        kernels.cast(torch.ones(4, 4), torch.ones(3), 0, E4M3, (1, -1), False, 0, offsets=offsets)
