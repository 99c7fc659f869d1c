"""The product of two pairs, alone and by groups, against float64: by the reference, a CPU and Triton's kernel."""

import itertools
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.granularity import Tile, scale_shape
from octavo.kernels import capability
from octavo.kernels.cpu import codes
from octavo.numerics import E8M0
from tests.kernels.conftest import Ops
from tests.support import definitions
from tests.support.casts import ALL, DTYPES, E4M3, E5M2, laid, poisoned_memory, to
from tests.support.combinations import dealt
from tests.support.definitions import GRANULARITIES
from tests.support.groups import SIZES, random_sizes
from tests.support.product_cases import (
    BLOCK,
    MX,
    ROWS,
    SQUARE,
    TILES,
    close,
    exact_groups,
    exact_product,
    of_flat,
    operands,
    pair,
    rows_in_groups,
    sums_shortly,
    terms_in_groups,
    uneven,
)

PLAIN = [g.tile for g in GRANULARITIES]
SHAPES = [(37, 133, 139), (64, 80, 96), (260, 140, 300), (0, 7, 5), (5, 7, 0), (7, 0, 5), (1, 1, 1), (1, 1, 300)]


def product_of(ops: Ops) -> Callable[..., Tensor]:
    """An implementation's product; of the kernels Triton's own."""
    if not ops.kernels:
        return ops.of("matmul")
    return of_flat(ops.kernels.module("matmul").triton_matmul)


def groups_of(ops: Ops) -> Callable[..., Tensor]:
    """The same of operands in groups."""
    if not ops.kernels:
        return ops.of("grouped_matmul")
    return of_flat(ops.kernels.module("grouped_matmul").triton_grouped_matmul, "grouped_matmul")


@pytest.mark.parametrize("seed", range(3))
def test_any_product(ops: Ops, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in dealt(
        seed,
        5 if ops.kernels else 40,
        shape=SHAPES,
        tiles=TILES if ops.kernels else [*itertools.product(PLAIN, PLAIN)],
        formats=[*itertools.product([E4M3, E5M2], repeat=2)],
        layouts=[*itertools.product(["rows", "columns", "strided"], repeat=2)],
        out=DTYPES,
        bias=[None, *DTYPES],
        fast=[False, True],
        chunk=[1, 500, 5000, 1 << 18],
        compute=[torch.bfloat16, torch.float32],
    ):
        monkeypatch.setattr(codes, "CHUNK", case["chunk"])
        monkeypatch.setattr(capability, "fast_dtype", lambda device, case=case: case["compute"])
        args, (_, n, _) = operands(case["shape"], case["tiles"], case["formats"]), case["shape"]
        args = tuple(laid(t, case["layouts"][at // 3]) if isinstance(t, Tensor) else t for at, t in enumerate(args))
        bias = None if case["bias"] is None else (torch.randn(n, 2)[:, 1] * 100).to(case["bias"])
        before = to("cpu", (args, bias))
        with poisoned_memory():
            y = product_of(ops)(*args, bias, case["out"], case["fast"])
        rounded = torch.bfloat16 if case["out"] == torch.bfloat16 else torch.float32
        truth = exact_product(*args) + (0.0 if bias is None else bias.to(rounded).double())
        assert y.dtype == case["out"]
        close(y, truth, ops.kernels, case["fast"])
        y.zero_()
        both = zip((*args, bias), (*before[0], before[1]), strict=True)
        assert all(not isinstance(a, Tensor) or definitions.same_bits(a, b) for a, b in both)


@pytest.mark.parametrize("seed", range(2))
def test_any_groups(ops: Ops, seed: int) -> None:
    random.seed(seed)
    for case in dealt(
        seed,
        5 if ops.kernels else 20,
        form=[rows_in_groups, terms_in_groups],
        sizes=[*SIZES, None],
        tiles=TILES,
        shape=[(24, 144), (140, 96), (3, 5), (8, 16)],
        out=DTYPES[::2],
        bias=[None, *DTYPES],
        fast=[False, True],
        pad=[1, 16],
        turned=[False, True],
    ):
        sizes, ungrouped = case["sizes"] or random_sizes(2 * random.randrange(50) + 1)
        by_rows = case["form"] is rows_in_groups
        tiles = case["tiles"] if by_rows else TILES[(0, 3, 4, 1)[random.randrange(4)]]
        args = case["form"](sizes, ungrouped, tiles, *case["shape"], case["pad"])
        if case["turned"]:
            args = tuple(t.mT.contiguous().mT if isinstance(t, Tensor) and t.ndim > 1 else t for t in args)
        bias = None
        if by_rows and case["bias"] is not None:
            bias = torch.randn(len(sizes), case["shape"][0]).to(case["bias"])
        with poisoned_memory():
            y = groups_of(ops)(*args, bias, case["out"], case["fast"], case["pad"])
        truth = exact_groups(sizes, case["pad"], *args)
        if bias is not None:
            rounded = bias.to(torch.bfloat16 if case["out"] == torch.bfloat16 else torch.float32)
            truth[: sum(sizes)] += rounded.double().repeat_interleave(torch.tensor(sizes), 0)
        assert y.dtype == case["out"] and not y[(truth == 0).all(-1)].any()
        close(y, truth, ops.kernels, case["fast"])


def test_integers_are_exact(ops: Ops) -> None:
    # small integers are codes, and their sums are exact in float32
    a_MK, b_NK = torch.randint(-8, 9, (31, 200)).float(), torch.randint(-4, 5, (29, 200)).float()
    for a, b in itertools.product([ALL, MX, SQUARE], repeat=2):
        if not ops.kernels or (a, b) in TILES:
            args = *pair(a_MK, a, E4M3, True), a, *pair(b_NK, b, E4M3, True), b
            assert torch.equal(product_of(ops)(*args, None, torch.float32, False), a_MK @ b_NK.t())
    a_MK, b_NK = torch.ones(1, 2049), torch.ones(1, 2049)
    a_MK[0, 0] = b_NK[0, 0] = 448.0  # in a narrower accumulation the ones would be lost beside 448 x 448
    args = *pair(a_MK, ALL), ALL, *pair(b_NK, ALL), ALL
    lost = 127 if ops.kernels and sums_shortly(ops.kernels) else 0  # those of the first 128 terms, of 14 bits
    assert product_of(ops)(*args, None, torch.float32, False).item() == 448.0 * 448.0 + 2048 - lost


@pytest.mark.parametrize("tile", PLAIN, ids=str)
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_faults_reach_their_row_and_column_and_no_other(fault: float, tile: Tile) -> None:
    a_MK, b_NK = uneven(9, 140), uneven(11, 140)
    a_MK[4, 131], b_NK[7, 3] = fault, fault
    a, b = pair(a_MK, tile, E5M2), pair(b_NK, tile, E5M2)
    for out in DTYPES:
        result = kernels.matmul(*a, tile, *b, tile, None, out, False)
        hit = torch.zeros(9, 11, dtype=torch.bool)
        hit[4], hit[:, 7] = True, True
        assert torch.equal(~torch.isfinite(result), hit)
        if math.isinf(fault):  # the sign of an infinite sum is that of its infinite term
            column = definitions.read(b[0][:, 131]).sign() * fault
            assert torch.equal(result[4, :7].double(), column[:7])
        else:
            assert bool(torch.isnan(result[hit]).all())


TOO_SMALL, TOO_LARGE = (-70, -70, 208.0), (65, 65, 2.0**-9)  # products of scales that float32 does not hold
EXTREMES = [TOO_SMALL, TOO_LARGE, (119, -119, 1.5), (-126, 126, 1.5), (65, 65, 1.0), (-126, -126, 1.0)]
EXTREMES += [(60, 55, 1.0), (99, -99, 1.5)]


def check_extremes(product: Callable[..., Tensor], extreme: tuple[int, int, float], tiles: tuple[Tile, Tile]) -> None:
    """Compare a product of scales near the ends of float32's range, or beyond when they are multiplied."""
    *exponents, code = extreme
    a, b = (torch.full((rows, 256), code).to(E4M3) for rows in (20, 24))
    a[3] = 0.0
    scales = [torch.full(scale_shape(q.shape, tile), 1.3) for q, tile in zip((a, b), tiles, strict=True)]
    scales[0][::2] *= 2.0 ** exponents[0]
    scales[1][:, -1] *= 2.0 ** exponents[1]
    if tiles == (MX, MX):
        scales = [(scale / 1.3).to(E8M0) for scale in scales]
    args = a, scales[0], tiles[0], b, scales[1], tiles[1]
    with numpy.errstate(over="ignore", invalid="ignore", under="ignore"):
        y = product(*args, None, torch.float32, False)
    torch.testing.assert_close(y, exact_product(*args).float(), rtol=1e-3, atol=2.0**-126)


@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_extreme_scales(extreme: tuple[int, int, float], ops: Ops) -> None:
    """Kernels get scales that float32 does not hold with all tiles, the other implementations with two."""
    first = EXTREMES.index(extreme)
    if first in (2, 3) and not ops.kernels:
        return  # a's scale makes the sum infinite before b's makes it small
    for tiles in TILES[:6] if not ops.kernels or first < 2 else TILES[first - 2 : first]:
        check_extremes(product_of(ops), extreme, tiles)


def test_float16_beyond_its_range_is_infinite_and_not_the_accumulation(ops: Ops) -> None:
    # the sum of codes is beyond float16, the product is not
    a = *pair(torch.full((2, 512), 1e-2), ALL), ALL
    close(product_of(ops)(*a, *a, None, torch.float16, False), exact_product(*a, *a), ops.kernels)


@pytest.mark.parametrize("formats", list(itertools.product([E4M3, E5M2], repeat=2)), ids=str)
def test_a_cpu_widens_no_operand_as_a_whole(monkeypatch: pytest.MonkeyPatch, formats: tuple[Any, Any]) -> None:
    monkeypatch.setattr(codes, "CHUNK", 500)
    seen: list[int] = []
    addmm = torch.addmm

    def watched(start: Tensor, a_MK: Tensor, b_KN: Tensor, **options: Any) -> Tensor:
        seen.append(max(a_MK.numel(), b_KN.numel()))
        return addmm(start, a_MK, b_KN, **options)

    monkeypatch.setattr(torch, "addmm", watched)
    for tile in PLAIN:
        # grad_weight: both operands are activations; one of them may be narrow
        args = operands((7, 20, 1000), (tile, tile), formats)
        turned = [t.t().contiguous().t() if isinstance(t, Tensor) else t for t in args]
        close(kernels.matmul(*turned, None, torch.float32, False), exact_product(*args))
        assert max(seen) <= max(4 * 500, 20 * tile[1]), tile
        seen.clear()


def test_groups_that_do_not_fit_are_refused() -> None:
    how, N, K = (torch.float32, False), 24, 144
    a, scale_inv, _, b, b_scale, _, offsets = rows_in_groups([3, 5], 0, (BLOCK, SQUARE), N, K)
    t, t_scale, *_ = terms_in_groups([3, 5], 0, (ROWS, ROWS), K, N)
    other = offsets.new_tensor

    def rows(a: Tensor, scale: Tensor, ends: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
        return a, scale, BLOCK, b, b_scale, SQUARE, ends, bias, *how

    def terms(t: Tensor, scale: Tensor, ends: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
        return t, scale, ROWS, t, scale, ROWS, ends, bias, *how, 16

    for said, args in {
        "shapes [8, 128] and [2, 24, 144] contract": rows(a[:, :128], scale_inv, offsets),
        "b holds 2 matrices for 3 groups": rows(a, scale_inv, other([3, 3, 8])),
        "bias of shape [24] needs [2, 24]": rows(a, scale_inv, offsets, torch.ones(N)),
        "a's scale_inv of shape [7, 2] needs [8, 2]: codes [8, 144] in tiles of (1, 128)": rows(
            a, scale_inv[1:], offsets
        ),
        "offsets[1] = 9: there are 8 rows": rows(a, scale_inv, other([3, 9])),
        "a's scale_inv of shape [144, 2] needs [144, 3]": terms(t, t_scale, other([1, 3, 8])),
        "a group's columns end at 35, an operand's at 32: give pad as to the cast": terms(
            t[:, :32], t_scale, other([17, 20])
        ),
        "b is then [groups, N, K]": terms(t, t_scale, offsets, torch.ones(2, N)),
    }.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            kernels.grouped_matmul(*args)
