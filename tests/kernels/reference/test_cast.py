"""Every cast against tests/support/definitions.py, whose codes and scales are others', bit for bit."""

import math
from typing import Any

import pytest
import torch

from octavo import kernels
from octavo.scaling.delayed import State
from tests.support import definitions
from tests.support.casts import ALL, E4M3, E5M2, FORMATS, check_codes, every_cast, second, shares_memory
from tests.support.combinations import every_case
from tests.support.definitions import GRANULARITIES, same_bits
from tests.support.passes import same_state
from tests.support.triton_cases import DTYPES, LAYOUTS, VALUES, laid, update_args, values_of

TILES = [g.tile for g in GRANULARITIES]
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 17), (17, 1), (2, 300), (130, 140)]
INPUT: dict[str, Any] = {"shape": SHAPES, "dtype": DTYPES, "values": VALUES, "layout": LAYOUTS, "tile": TILES}
SCALINGS = [(False, 0), (True, 0), (False, 1), (True, 5)]  # (power of two, margin)
SCALES = [0.0, -0.0, 2.0**-126, 1e-3, 0.3, 1.0, 1e5, 2.0**126]

each_tile = pytest.mark.parametrize("tile", TILES, ids=map(str, GRANULARITIES))


def check(pair: Any, expected: Any, fmt: torch.dtype, tile: tuple[int, int], pad: int) -> None:
    """A pair's codes and scale_inv; those of blocks along rows lie as torch's product reads them."""
    check_codes(pair[0], expected[0], fmt, pad)
    assert same_bits(pair[1], expected[1])
    assert (pair[1].t() if tile[0] == 1 < tile[1] else pair[1]).is_contiguous()


@every_case(**INPUT)
def test_amax(case: dict[str, Any]) -> None:
    x = laid(values_of(case["values"], case["shape"], case["dtype"]), case["layout"], torch.device("cpu"))
    before, amax = x.clone(), kernels.amax(x, case["tile"])
    assert (amax.t() if case["tile"][0] == 1 < case["tile"][1] else amax).is_contiguous()
    assert same_bits(amax, definitions.cast(x, E4M3, case["tile"])[2])
    amax.fill_(3.0)
    assert same_bits(x, before), "the result has memory of its own"


@every_case(**INPUT, fmt=FORMATS, second=TILES, pad=[1, 2, 16], scaling=SCALINGS)
def test_casts(case: dict[str, Any]) -> None:
    """By one scaling and by two, as it lies and transposed."""
    x = laid(values_of(case["values"], case["shape"], case["dtype"]), case["layout"], torch.device("cpu"))
    before, fmt, tile, other_tile, pad = x.clone(), *(case[name] for name in ("fmt", "tile", "second", "pad"))
    other_fmt = FORMATS[fmt == E4M3]
    scaling, other = (fmt, tile, *case["scaling"]), (other_fmt, other_tile, not case["scaling"][0], 2)
    codes, scales, amaxes = definitions.cast(x, *scaling)
    other_codes, other_scales, _ = definitions.cast(x, *other)
    for transpose in (False, True):
        q, t, scale_inv, amax, sums = kernels.cast(x, None, 0, *scaling, transpose, pad)
        check((q, scale_inv), (codes, scales), fmt, tile, pad)
        assert same_bits(amax, amaxes) and (sums.shape, sums.dtype) == ((0,), x.dtype)
        if transpose:
            check_codes(t, codes.t(), fmt, pad)
        else:
            assert t.shape == (0, 0) and t.dtype == fmt
        q, t, scale_inv, other_inv, _ = kernels.cast(x, None, 0, *scaling, transpose, pad, **second(*other))
        check((q, scale_inv), (codes, scales), fmt, tile, pad)
        if transpose:
            check((t, other_inv), (other_codes.t(), other_scales.t()), other_fmt, other_tile[::-1], pad)
        else:
            check((t, other_inv), (other_codes, other_scales), other_fmt, other_tile, pad)
    assert same_bits(x, before)


@every_case(**INPUT | {"tile": [ALL]}, fmt=FORMATS, scale=SCALES, role=range(3))
def test_a_delayed_scale(case: dict[str, Any]) -> None:
    """Is used as it is, whatever the next one's margin; where there is none the tensor's own is."""
    x = laid(values_of(case["values"], case["shape"], case["dtype"]), case["layout"], torch.device("cpu"))
    state = torch.full((3,), 7.0)
    state[case["role"]] = case["scale"]
    before = state.clone()
    for power_of_two, margin in ((True, 5), (False, 0)):
        q, _, scale_inv, amax, _ = kernels.cast(x, state, case["role"], case["fmt"], ALL, power_of_two, margin)
        expected = definitions.cast(x, case["fmt"], ALL, power_of_two, margin, case["scale"])
        assert all(map(same_bits, (q.view(torch.uint8), scale_inv, amax), expected))
        assert same_bits(state, before), "a cast has no side effect"


@each_tile
def test_outputs_share_no_memory(tile: tuple[int, int]) -> None:
    # of any size: a copy that is left out where it seems needless shows in vectors
    for shape in ((1, 1), (1, 6), (6, 1), (4, 6)):
        x, state = torch.randn(shape), State.empty(1)
        delayed = state.scale if tile == ALL else None
        how = None, 0, E4M3, tile, False, 0
        results = [
            kernels.cast(x, delayed, *how[1:], False, 1, True),
            kernels.cast(x, delayed, *how[1:], True, 1, True),
            kernels.cast(x, *how, True, 1, True, **second(E4M3, tile, False, 0)),
            kernels.cast(x, *how, False, 2, True, **second(E4M3, tile, False, 0)),
            kernels.cast_and_commit(
                x, *state, torch.ones(1, 1), None, E4M3, False, 0, *update_args("max"), True, 1, True
            ),
        ]
        for result in results:
            tensors = [x, *state, *result]
            assert not any(shares_memory(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("reduce", ["max", "most_recent"])
def test_cast_and_commit_is_a_cast_and_then_an_update(reduce: str, transpose: bool, rows: int) -> None:
    x = torch.randn(rows, 8).bfloat16()
    x[2:3, 2] = math.nan
    amax_input, amax_weight = torch.full((1, 1), 3.0), torch.full((1, 1), 0.0)
    update = update_args(reduce)
    for scale in (0.0, 5.0):
        state = State(torch.tensor([1.0, 2.0, scale]), torch.rand(3, 4), State.empty(4).before)
        other = state.clone()
        found = kernels.cast_and_commit(x, *state, amax_input, amax_weight, E5M2, True, 3, *update, transpose)
        q, t, scale_inv, amax, sums = kernels.cast(x, other.scale, 2, E5M2, ALL, True, 3, transpose)
        kernels.delayed_update(*other, amax_input, amax_weight, amax, *update)
        assert all(map(same_bits, found, (q, t, scale_inv, sums))) and same_state(state, other)
        assert state.amax_history[2, 0] == amax.item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_column_sum_is_rounded_once(dtype: torch.dtype) -> None:
    # float32 holds the sums of whole numbers exactly, bf16 and fp16 neither them nor the partial ones
    whole = torch.randint(-120, 128, (601, 33)).to(dtype)
    for x in (whole, whole.t().contiguous().t(), whole[1::2, ::3], whole[:1], whole[:0], whole[:, :0]):
        for tile in (ALL, (1, -1), (3, 5)):
            for name, (*_, sums) in every_cast(x, tile, 1, True):
                assert same_bits(sums, x.double().sum(0).float().to(dtype)), name
                assert sums.is_contiguous()
    x = (torch.randn(1000, 7) * torch.logspace(-3, 3, 7)).to(dtype)
    exact = x.double().sum(0)
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 2.0**-20 * x.double().abs().sum(0)
    for name, (*_, sums) in every_cast(x, ALL, 16, True):
        assert bool(((sums.double() - exact).abs() <= allowed).all()), name


def test_a_fault_shows_in_its_column_sum_only() -> None:
    x = torch.ones(9, 4)
    x[3, 1], x[4, 2], x[5, 3] = math.nan, -math.inf, math.inf
    for name, (*_, sums) in every_cast(x, ALL, 1, True):
        assert sums[0] == 9 and sums[1].isnan() and sums[2:].tolist() == [-math.inf, math.inf], name
