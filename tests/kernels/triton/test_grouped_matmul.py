"""Operands in groups are multiplied as the reference multiplies them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.granularity import Tile
from octavo.kernels.arguments import OperandPair, unpacking
from octavo.kernels.groups import of_equal_groups
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.groups import SIZES, offsets_of, random_sizes
from tests.support.product_cases import BLOCK, MX, ROWS, SQUARE, close
from tests.support.triton_cases import ALL, E4M3, E5M2, count_launches, poisoned_memory, to
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

PRODUCTS = [(ALL, ALL), (ROWS, ROWS), (BLOCK, SQUARE), (BLOCK, BLOCK), (MX, MX), (ROWS, (128, 64)), (ALL, (64, 96))]
QUICK = [SIZES[3], *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in SIZES if sizes is not SIZES[3])]
SOME = [*PRODUCTS[:3], *(pytest.param(tiles, marks=pytest.mark.full) for tiles in PRODUCTS[3:])]


def cast(x: Tensor, sizes: list[int], tile: Tile, fmt: torch.dtype, pad: int = 16) -> tuple[Tensor, ...]:
    """(codes, transposed, scale_inv), of MX's tiles in E8M0."""
    x = x * torch.logspace(-1, 1, len(x))[:, None]
    return REFERENCE["cast"](x, None, 0, fmt, tile, set(tile) == {*MX}, 0, True, pad, offsets=offsets_of(sizes))[:3]


def rows_in_groups(sizes: list[int], rest: int, tiles: tuple[Tile, Tile], n: int, k: int) -> tuple[Any, ...]:
    """Operands, up to the offsets."""
    a, _, a_scale_inv = cast(torch.randn(sum(sizes) + rest, k), sizes, tiles[0], E5M2)
    shape = len(sizes), n, k
    weight = cast(torch.randn(len(sizes) * n, k), [n] * len(sizes), tiles[1], E4M3)
    return a, a_scale_inv, tiles[0], *of_equal_groups(*weight[::2], tiles[1], shape), tiles[1], offsets_of(sizes)


def terms_in_groups(
    sizes: list[int], rest: int, tiles: tuple[Tile, Tile], n: int, k: int, pad: int = 16
) -> tuple[Any, ...]:
    """The same, of transposed codes."""
    laid = [
        (t, scale_inv.t(), tile)
        for cols, tile in zip((n, k), tiles, strict=True)
        for _, t, scale_inv in [cast(torch.randn(sum(sizes) + rest, cols), sizes, tile[::-1], E4M3, pad)]
    ]
    return *laid[0], *laid[1], offsets_of(sizes)


def product(kernels: TritonKernels) -> Callable[..., Tensor]:
    """Triton's, with the op's arguments."""
    return unpacking({"grouped_matmul": kernels.module("grouped_matmul").triton_grouped_matmul})["grouped_matmul"]


def check(kernels: TritonKernels, *args: Any, fast: bool = False) -> Tensor:
    with poisoned_memory():
        found = product(kernels)(*to(kernels.device, args)).cpu()
    expected = REFERENCE["grouped_matmul"](*args)
    close(found, expected, kernels, fast)
    assert not found[(expected == 0).all(-1)].any()  # of rows in no group, and of groups without rows
    return found


@pytest.mark.parametrize("tiles", SOME, ids=str)
@pytest.mark.parametrize(("sizes", "rest"), QUICK, ids=lambda v: str(v)[:20])
def test_rows_in_groups(sizes: list[int], rest: int, tiles: tuple[Tile, Tile], kernels: TritonKernels) -> None:
    bias = torch.randn(len(sizes), 24)
    check(kernels, *rows_in_groups(sizes, rest, tiles, 24, 144), bias, torch.float32, False)
    args = rows_in_groups(sizes, rest, tiles, 140, 96)
    check(kernels, *args, None, torch.bfloat16, True, fast=True)


@pytest.mark.parametrize("tiles", [PRODUCTS[0], PRODUCTS[3], *SOME[4:5]], ids=str)
@pytest.mark.parametrize(("sizes", "rest"), QUICK, ids=lambda v: str(v)[:20])
def test_terms_in_groups(sizes: list[int], rest: int, tiles: tuple[Tile, Tile], kernels: TritonKernels) -> None:
    found = check(kernels, *terms_in_groups(sizes, rest, tiles, 24, 40), None, torch.float32, False, 16)
    assert not found[[size == 0 for size in sizes]].any()
    check(kernels, *terms_in_groups(sizes, rest, tiles, 3, 5, pad=1), None, torch.bfloat16, False)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 5))])
@pytest.mark.parametrize("form", [rows_in_groups, terms_in_groups])
def test_any_sequence_of_sizes(form: Callable[..., Any], seed: int, kernels: TritonKernels) -> None:
    args = form(*random_sizes(seed), PRODUCTS[seed], 8, 16)
    check(kernels, *args, None, torch.float32, False, 16)


@pytest.mark.parametrize("form", [rows_in_groups, terms_in_groups])
def test_parts_of_two_products(form, kernels, monkeypatch):
    """As of large groups on Hopper, or of faults and scales whose product float32 does not hold."""
    config = kernels.module("launch").Config(256, 128, 4, 16)
    monkeypatch.setattr(kernels.module("grouped_matmul"), "grouped_config", lambda *_: config)
    args = list(form([0, 17, 140], 3, (BLOCK, SQUARE), 140, 144))
    for exponent in (0, 120):
        args[1], args[4] = args[1] * 2.0**exponent, args[4] * 2.0**-exponent
        check(kernels, *args, None, torch.float32, False, 16)


def test_only_large_groups_have_high_parts(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    module, high = kernels.module("grouped_matmul"), kernels.module("launch").Config(256, 128, 4, 16)
    monkeypatch.setattr(module, "product_config", lambda *_: high)
    a, b = (OperandPair(torch.empty(0), torch.empty(0), tile) for tile in (BLOCK, SQUARE))
    found = [module.grouped_config(a, b, (rows, 4096), 8).block_r for rows in (8 * 1024 - 1, 8 * 1024)]
    assert found == [128, 256]


def test_operands_of_any_strides(kernels: TritonKernels) -> None:
    sizes = [3, 0, 20]
    a, a_scale, a_tile, b, b_scale, b_tile, offsets = rows_in_groups(sizes, 2, (BLOCK, SQUARE), 24, 144)
    strided = (a.t().contiguous().t(), a_scale.contiguous(), a_tile, b.mT.contiguous().mT, b_scale.mT.contiguous().mT)
    expected = REFERENCE["grouped_matmul"](a, a_scale, a_tile, b, b_scale, b_tile, offsets, None, torch.float32, False)
    close(check(kernels, *strided, b_tile, offsets, None, torch.float32, False), expected, kernels)


@pytest.mark.parametrize("ends", [[3, 2, 40], [-1, 40, 40], [3, 41, 41], [0, 1 << 30, 40]], ids=str)
def test_wrong_offsets_make_products_nan(ends: list[int], kernels: TritonKernels) -> None:
    args = rows_in_groups([10, 20, 10], 0, (BLOCK, SQUARE), 24, 144)
    offsets = torch.tensor(ends, dtype=torch.int32)
    found = product(kernels)(*to(kernels.device, (*args[:6], offsets)), None, torch.bfloat16, False)
    assert found.isnan().all()
    args = terms_in_groups([10, 20, 10], 0, (BLOCK, BLOCK), 24, 144)
    no_room = torch.tensor([40, 60, 80], dtype=torch.int32)  # for the padding, where rows beyond the end may be read
    for wrong in (offsets + 60 * (offsets == 41).int(), no_room):
        found = product(kernels)(*to(kernels.device, (*args[:6], wrong)), None, torch.bfloat16, False, 16)
        assert found.isnan().all()


def test_one_launch(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(kernels, monkeypatch)
    check(kernels, *rows_in_groups([3, 4], 0, (ALL, ALL), 8, 16), None, torch.float32, False)
    check(kernels, *terms_in_groups([3, 4], 0, (ALL, ALL), 8, 16), None, torch.float32, False, 16)
    assert launches == ["rows_in_groups_kernel", "terms_in_groups_kernel"]
