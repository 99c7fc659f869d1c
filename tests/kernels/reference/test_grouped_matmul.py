"""Each group's product is its own matmul, bit for bit; test_matmul.py holds that against float64."""

import itertools
import re

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.groups import of_equal_groups
from tests.support.definitions import same_bits
from tests.support.groups import SIZES, offsets_of, random_sizes, scale_slices, slices_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL, ROWS, COLUMNS, BLOCK, SQUARE, MX = (-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (1, 32)
Tile = tuple[int, int]
N, K = 24, 144


def cast(x: Tensor, sizes: list[int], tile: Tile, pad: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    """(codes, transposed, scale_inv)."""
    return kernels.cast(x, None, 0, dtype, tile, False, 0, True, pad, offsets=offsets_of(sizes))[:3]


def rows_of(sizes: list[int], rest: int, cols: int) -> Tensor:
    return torch.randn(sum(sizes) + rest, cols) * torch.logspace(-1, 1, cols)


def output(sizes: list[int], rest: int, tiles: tuple[Tile, Tile], dtype: torch.dtype, pad: int) -> None:
    """The product whose rows are in groups; its terms are K."""
    x, weight, bias = rows_of(sizes, rest, K), torch.randn(len(sizes), N, K), torch.randn(len(sizes), N)
    a, _, a_scale_inv = cast(x, sizes, tiles[0], pad)
    b, b_scale_inv = of_equal_groups(
        *cast(weight.flatten(0, 1), [N] * len(sizes), tiles[1], pad, E5M2)[::2], tiles[1], weight.shape
    )
    operands = (a, a_scale_inv, tiles[0], b, b_scale_inv, tiles[1], offsets_of(sizes))
    for row in (None, bias.to(dtype)):
        y = kernels.grouped_matmul(*operands, row, dtype, False)
        assert y.shape == (len(x), N) and y.dtype == dtype and y.is_contiguous()
        assert not y[sum(sizes) :].any()
        for group, (rows, scales) in enumerate(zip(slices_of(sizes), scale_slices(sizes, tiles[0][0]), strict=True)):
            mine, theirs = (a[rows], a_scale_inv[scales], tiles[0]), (b[group], b_scale_inv[group], tiles[1])
            added = None if row is None else row[group]
            assert same_bits(y[rows], kernels.matmul(*mine, *theirs, added, dtype, False))


def grad_weight(sizes: list[int], rest: int, tiles: tuple[Tile, Tile], dtype: torch.dtype, pad: int) -> None:
    """The product whose terms are in groups: of transposed codes, and where nothing is padded of codes as they lie."""
    found = [
        (cast(rows_of(sizes, rest, cols), sizes, tile[::-1], pad, fmt), tile)
        for cols, tile, fmt in ((N, tiles[0], E5M2), (K, tiles[1], E4M3))
    ]
    laid = [(codes_t, scale_inv.t(), tile) for (_, codes_t, scale_inv), tile in found]
    offsets = offsets_of(sizes)
    dw = kernels.grouped_matmul(*laid[0], *laid[1], offsets, None, dtype, False, pad)
    assert dw.shape == (len(sizes), N, K) and dw.dtype == dtype and dw.is_contiguous()
    if pad == 1:
        views = [(codes.t(), scale_inv.t(), tile) for (codes, _, scale_inv), tile in found]
        again = kernels.grouped_matmul(*views[0], *views[1], offsets, None, dtype, False)
        assert torch.allclose(dw, again, rtol=1e-2)  # sums in another order
    of_scales = [scale_slices(sizes, tile[1]) for tile in tiles]
    for group, columns in enumerate(slices_of(sizes, pad)):
        a, b = (
            (codes[:, columns], scale_inv[:, scales[group]], tile)
            for (codes, scale_inv, tile), scales in zip(laid, of_scales, strict=True)
        )
        if sizes[group] == 0:
            assert not dw[group].any()
        else:
            assert same_bits(dw[group], kernels.matmul(*a, *b, None, dtype, False))


PRODUCTS = [(ALL, ALL), (ROWS, ROWS), (BLOCK, SQUARE), (BLOCK, BLOCK), (MX, MX), (ROWS, ALL)]


@pytest.mark.parametrize("tiles", PRODUCTS, ids=str)
@pytest.mark.parametrize(("sizes", "rest"), SIZES, ids=lambda v: str(v)[:20])
def test_each_group_is_multiplied_alone(sizes: list[int], rest: int, tiles: tuple[Tile, Tile]) -> None:
    for product, pad in itertools.product((output, grad_weight), (1, 16)):
        product(sizes, rest, tiles, torch.float32 if pad == 1 else torch.bfloat16, pad)


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 15), marks=pytest.mark.full)], ids=str)
def test_any_sequence_of_sizes(seeds: range) -> None:
    for seed in seeds:
        sizes, rest = random_sizes(seed)
        output(sizes, rest, PRODUCTS[seed % len(PRODUCTS)], torch.float32, 16)
        grad_weight(sizes, rest, PRODUCTS[seed % len(PRODUCTS)], torch.float32, 16)


def test_operands_that_do_not_fit_are_refused() -> None:
    sizes, w = [3, 5], torch.randn(2, N, K)
    a, a_t, scale_inv = cast(torch.randn(8, K), sizes, BLOCK, 16)
    b, b_scale_inv = of_equal_groups(*cast(w.flatten(0, 1), [N, N], SQUARE, 16)[::2], SQUARE, w.shape)
    how = (torch.float32, False)

    def product(a: Tensor, scale: Tensor, b: Tensor, sizes: list[int], bias: Tensor | None = None) -> Tensor:
        return kernels.grouped_matmul(a, scale, BLOCK, b, b_scale_inv, SQUARE, offsets_of(sizes), bias, *how)

    for said, args in {
        "shapes [8, 128] and [2, 24, 144] contract": (a[:, :128], scale_inv, b, sizes),
        "b holds 2 matrices for 3 groups": (a, scale_inv, b, [3, 0, 5]),
        "bias of shape [24] needs [2, 24]": (a, scale_inv, b, sizes, torch.ones(N)),
        "a's scale_inv of shape [7, 2] needs [8, 2]: codes [8, 144] in tiles of (1, 128)": (a, scale_inv[1:], b, sizes),
        "offsets[1] = 9: there are 8 rows": (a, scale_inv, b, [3, 6]),
    }.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            product(*args)
    per_group = (scale_inv.t()[:, :2], (1, -1))
    with pytest.raises(ValueError, match=r"a's scale_inv of shape \[2, 2\] needs \[144, 3\]"):
        kernels.grouped_matmul(a_t, *per_group, a_t, *per_group, offsets_of([1, 2, 5]), None, *how, 16)
    with pytest.raises(ValueError, match=r"a group's columns end at 35, an operand's at 32: give pad as to the cast"):
        scales = torch.ones(K, 2)
        kernels.grouped_matmul(
            a_t[:, :32], scales, ROWS, a_t[:, :32], scales, ROWS, offsets_of([17, 3]), None, *how, 16
        )
    with pytest.raises(ValueError, match=r"b is then \[groups, N, K\]"):
        kernels.grouped_matmul(a_t, *per_group, a_t, *per_group, offsets_of(sizes), torch.ones(2, N), *how, 16)
