"""Every cast against one that walks the tiles one by one (tests/support/definitions.py), bit for bit."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.scaling.delayed import State
from tests.support import definitions
from tests.support.casts import ALL, E4M3, E5M2, FORMATS, every_cast, second, shares_memory
from tests.support.definitions import FLOAT32_MAX, GRANULARITIES, MAX, read, same_bits
from tests.support.passes import same_state

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TILES = [g.tile for g in GRANULARITIES]

each_format = pytest.mark.parametrize("fmt", FORMATS, ids=["E4M3", "E5M2"])
each_tile = pytest.mark.parametrize("tile", TILES, ids=map(str, GRANULARITIES))


def check(x: Tensor, fmt: torch.dtype, tile: Sequence[int], power_of_two: bool = False, margin: int = 0) -> Tensor:
    before = x.clone()
    qdata, _, scale_inv, amax, sums = kernels.cast(x, None, 0, fmt, tile, power_of_two, margin)
    assert sums.shape == (0,)
    codes, expected_scale_inv, expected_amax = definitions.cast(x, fmt, tile, power_of_two, margin)
    assert qdata.dtype == fmt
    assert same_bits(scale_inv, expected_scale_inv)
    assert same_bits(amax, expected_amax)
    assert same_bits(qdata.view(torch.uint8), codes)
    scales = (scale_inv.t(), amax.t()) if tile == (1, 128) else (scale_inv, amax)
    assert all(t.is_contiguous() for t in (qdata, *scales))
    assert same_bits(x, before)
    return qdata


@each_tile
@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True], ids=["", "power of two"])
def test_cast(power_of_two: bool, dtype: torch.dtype, fmt: torch.dtype, tile: tuple[int, int]) -> None:
    # rows and columns of very different size, so that a scale from the wrong tile is seen
    rows, cols = (130, 261) if {-1, 128} & {*tile} else (20, 71)
    x = torch.randn(rows, cols) * torch.logspace(-2, 2, cols) * torch.logspace(-1, 1, rows)[:, None]
    check(x.to(dtype), fmt, tile, power_of_two)


@each_tile
@pytest.mark.parametrize(
    "shape", [(0, 0), (0, 5), (5, 0), (1, 1), (1, 17), (17, 1), (127, 3), (128, 128), (2, 1000), (1000, 2)], ids=str
)
def test_sizes(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    for fmt, power_of_two in ((E4M3, True), (E5M2, False)):
        qdata = check(torch.randn(shape), fmt, tile, power_of_two)
        assert qdata.shape == shape


@each_tile
def test_margin(tile: tuple[int, int]) -> None:
    x = torch.randn(20, 40)
    for margin in (1, 5):
        for power_of_two in (False, True):
            qdata = check(x, E4M3, tile, power_of_two, margin)
            assert float(read(qdata).abs().max()) <= 448 / 2**margin


@each_tile
@each_format
def test_strided_input(fmt: torch.dtype, tile: tuple[int, int]) -> None:
    base = torch.randn(40, 66)
    base[7, 9] = math.nan
    for x in (base.t(), base[::3, 1::2], base.t()[5:, ::3], base[:, :1].expand(-1, 9), base[7:8].expand(6, -1)):
        check(x, fmt, tile)


@each_tile
@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_amax(dtype: torch.dtype, fmt: torch.dtype, tile: tuple[int, int]) -> None:
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    for amax in (0.0, -0.0, subnormal, 3 * subnormal, info.smallest_normal, 1.0, info.max, -info.max):
        x = torch.tensor([[amax, 0.0, amax / 2, -amax], [amax, -amax / 3, 0.0, amax]]).to(dtype)
        for power_of_two in (False, True):
            check(x, fmt, tile, power_of_two)


def test_amax_zero_reads_back_as_zero() -> None:
    qdata, _, scale_inv, amax, _ = kernels.cast(torch.tensor([[0.0, -0.0]]), None, 0, E4M3, ALL, False, 7)
    assert (qdata.view(torch.uint8).tolist(), scale_inv.item(), amax.item()) == ([[0, 0x80]], 1.0, 0.0)


def test_an_empty_tensor_has_scale_one() -> None:
    for shape in ((0, 5), (5, 0), (0, 0)):
        qdata, _, scale_inv, amax, _ = kernels.cast(torch.empty(shape), None, 0, E4M3, ALL, True, 7)
        assert (qdata.shape, scale_inv.tolist(), amax.tolist()) == (shape, [[1.0]], [[0.0]])


@each_tile
@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan, -math.nan])
def test_one_fault_stays_local(fault: float, dtype: torch.dtype, fmt: torch.dtype, tile: tuple[int, int]) -> None:
    x = torch.randn(9, 133).to(dtype)
    x[4, 7] = 0.0
    intact, _, scale_inv, amax, _ = kernels.cast(x, None, 0, fmt, tile, False, 0)
    x[4, 7] = fault
    qdata = check(x, fmt, tile)
    _, _, faulty_scale_inv, faulty_amax, _ = kernels.cast(x, None, 0, fmt, tile, False, 0)
    assert same_bits(scale_inv, faulty_scale_inv) and same_bits(amax, faulty_amax)
    differs = qdata.view(torch.uint8) != intact.view(torch.uint8)
    assert differs.nonzero().tolist() == [[4, 7]]
    if math.isinf(fault) and fmt == E5M2:
        assert read(qdata)[4, 7] == fault
    else:
        assert qdata.view(torch.uint8)[4, 7] == 0x7F


@each_tile
@each_format
def test_nothing_but_faults(fmt: torch.dtype, tile: tuple[int, int]) -> None:
    check(torch.tensor([[math.inf, math.nan], [-math.inf, -math.nan]]), fmt, tile)


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [2.0**-126, 1e-3, 0.3, 1.0, 100.0, 3e4, 2.0**126])
def test_a_delayed_scale_is_used_as_it_is(scale: float, dtype: torch.dtype, fmt: torch.dtype) -> None:
    x = torch.randn(17, 33).to(dtype)
    x[3, 3], x[4, 4] = math.inf, math.nan
    for role in range(3):
        state = torch.full((3,), 7.0)
        state[role] = scale
        before = state.clone()
        # power_of_two and margin are the next scale's affair
        qdata, _, scale_inv, amax, _ = kernels.cast(x, state, role, fmt, ALL, True, 5)
        codes, expected_scale_inv, expected_amax = definitions.cast(x, fmt, ALL, scale=float(before[role]))
        assert same_bits(qdata.view(torch.uint8), codes)
        assert same_bits(scale_inv, expected_scale_inv) and same_bits(amax, expected_amax)
        assert torch.equal(state, before), "a cast has no side effect"


def test_a_delayed_scale_that_is_too_large_saturates() -> None:
    x = torch.tensor([[1.0, -2.0, 3e38, -0.001]])
    for fmt in FORMATS:
        qdata, _, scale_inv, amax, _ = kernels.cast(x, torch.full((3,), 1e5), 0, fmt, ALL, False, 0)
        assert read(qdata)[0, :3].tolist() == [MAX[fmt], -MAX[fmt], MAX[fmt]]
        assert amax.item() == x[0, 2] and scale_inv.item() == float(torch.tensor(1e-5))


@each_format
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_no_history_means_this_tensors_own_amax(zero: float, fmt: torch.dtype) -> None:
    x = torch.randn(17, 33) * 1e-6
    state = torch.tensor([3.0, zero, 5.0])
    for power_of_two, margin in ((False, 0), (True, 2)):
        delayed = kernels.cast(x, state, 1, fmt, ALL, power_of_two, margin)
        dynamic = kernels.cast(x, None, 0, fmt, ALL, power_of_two, margin)
        assert all(same_bits(a, b) for a, b in zip(delayed, dynamic, strict=True))
    empty, _, scale_inv, amax, _ = kernels.cast(x[:0], state, 1, fmt, ALL, False, 0)
    assert (empty.numel(), scale_inv.item(), amax.item()) == (0, 1.0, 0.0)


def test_an_empty_tensor_under_a_delayed_scale() -> None:
    for shape in ((0, 4), (4, 0)):
        _, _, scale_inv, amax, _ = kernels.cast(torch.empty(shape), torch.full((3,), 4.0), 2, E5M2, ALL, False, 0)
        assert (scale_inv.tolist(), amax.tolist()) == ([[0.25]], [[0.0]])


@each_tile
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (8, 1), (4, 6), (0, 3)], ids=str)
def test_both_layouts(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    for dtype in DTYPES:
        x = torch.randn(shape).to(dtype)
        state = torch.tensor([0.0, 0.0, 9.0]) if tile == ALL else None
        for role in (0, 2):
            once, none, *found = kernels.cast(x, state, role, E5M2, tile, True, 1)
            assert none.shape == (0, 0) and none.dtype == E5M2
            qdata, transposed, *others = kernels.cast(x, state, role, E5M2, tile, True, 1, True)
            for a, b in zip((qdata, *others), (once, *found), strict=True):
                assert same_bits(a, b)
            assert transposed.dtype == E5M2 and transposed.is_contiguous()
            assert same_bits(transposed.view(torch.uint8), qdata.view(torch.uint8).t())
            assert not shares_memory(qdata, transposed)


@each_tile
def test_outputs_share_no_memory(tile: tuple[int, int]) -> None:
    # of any size: a copy that is left out where it seems needless shows in vectors
    for shape in ((1, 1), (1, 6), (6, 1), (4, 6)):
        x, state = torch.randn(shape), State.empty(1)
        delayed = state.scale if tile == ALL else None
        update = ([448.0] * 3, [False] * 3, [0] * 3, "max")
        results = [
            kernels.cast(x, delayed, 0, E4M3, tile, False, 0, False, 1, True),
            kernels.cast(x, delayed, 0, E4M3, tile, False, 0, True, 1, True),
            kernels.cast(x, None, 0, E4M3, tile, False, 0, True, 1, True, **second(E4M3, tile, False, 0)),
            kernels.cast(x, None, 0, E4M3, tile, False, 0, False, 2, True, **second(E4M3, tile, False, 0)),
            kernels.cast_and_commit(x, *state, torch.ones(1, 1), None, E4M3, False, 0, *update, True, 1, True),
        ]
        for result in results:
            tensors = [x, *state, *result]
            pairs = [(a, b) for i, a in enumerate(tensors) for b in tensors[:i]]
            assert not any(shares_memory(a, b) for a, b in pairs)


@pytest.mark.parametrize("transpose_second", [False, True])
@pytest.mark.parametrize("shape", [(130, 70), (1, 1), (1, 9), (9, 1), (0, 5), (5, 0)], ids=str)
def test_cast_two_scalings(shape: tuple[int, int], transpose_second: bool) -> None:
    x = torch.randn(shape).bfloat16()
    if x.numel() > 1:
        x.view(-1)[1] = math.inf
    for tile, second_tile in [((1, -1), (-1, 1)), ((1, 128), (128, 1)), ((1, 32), (32, 1)), ((3, 5), (128, 128))]:
        qdata, other, scale_inv, other_scale_inv, _ = kernels.cast(
            x, None, 0, E4M3, tile, False, 1, transpose_second, **second(E5M2, second_tile, True, 2)
        )
        codes, expected, _ = definitions.cast(x, E4M3, tile, False, 1)
        assert same_bits(qdata.view(torch.uint8), codes) and same_bits(scale_inv, expected)
        codes, expected, _ = definitions.cast(x, E5M2, second_tile, True, 2)
        if transpose_second:
            codes, expected = codes.t(), expected.t()
        assert (qdata.dtype, other.dtype) == (E4M3, E5M2)
        assert same_bits(other.view(torch.uint8), codes) and same_bits(other_scale_inv, expected)
        if tile == (1, 128):
            scale_inv = scale_inv.t()
            other_scale_inv = other_scale_inv.t() if transpose_second else other_scale_inv
        assert all(t.is_contiguous() for t in (qdata, scale_inv, other, other_scale_inv))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("reduce", ["max", "most_recent"])
def test_cast_and_commit_is_a_cast_and_then_an_update(reduce: str, transpose: bool) -> None:
    x = torch.randn(5, 8).bfloat16()
    x[2, 2] = math.nan
    amax_input, amax_weight = torch.full((1, 1), 3.0), torch.full((1, 1), 0.0)
    update = ([448.0, 448.0, 57344.0], [False, True, False], [0, 1, 2], reduce)
    for scale in (0.0, 5.0):
        state = State(torch.tensor([1.0, 2.0, scale]), torch.rand(3, 4), State.empty(4).before)
        other = state.clone()
        qdata, transposed, scale_inv, _ = kernels.cast_and_commit(
            x, *state, amax_input, amax_weight, E5M2, True, 3, *update, transpose
        )
        expected, _, expected_scale_inv, amax, _ = kernels.cast(x, other.scale, 2, E5M2, ALL, True, 3)
        kernels.delayed_update(*other, amax_input, amax_weight, amax, *update)
        assert same_bits(qdata, expected) and same_bits(scale_inv, expected_scale_inv)
        assert same_state(state, other)
        assert state.amax_history[2, 0] == amax.item() == float(x[torch.isfinite(x)].abs().max())
        if transpose:
            assert same_bits(transposed, expected.t()) and transposed.is_contiguous()
        else:
            assert transposed.shape == (0, 0) and transposed.dtype == E5M2


def test_cast_and_commit_of_an_empty_gradient_keeps_the_scale() -> None:
    state = State.empty(2)
    state.scale.copy_(torch.tensor([1.0, 2.0, 8.0]))
    update = ([448.0, 448.0, 57344.0], [False] * 3, [0] * 3, "max")
    _, _, scale_inv, _ = kernels.cast_and_commit(torch.empty(0, 8), *state, None, None, E5M2, False, 0, *update, True)
    assert scale_inv.item() == 0.125 and state.scale.tolist() == [1.0, 2.0, 8.0] and not state.amax_history.any()


def test_values_of_float32_at_the_edge_do_not_overflow() -> None:
    x = torch.tensor([[FLOAT32_MAX, -FLOAT32_MAX, 1.0]])
    for fmt in FORMATS:
        assert read(check(x, fmt, ALL))[0, :2].tolist() == [MAX[fmt], -MAX[fmt]]


@each_tile
@pytest.mark.parametrize("pad", [1, 2, 16])
def test_padding_is_codes_of_zero(pad: int, tile: tuple[int, int]) -> None:
    for shape in ((7, 20), (16, 32), (1, 1), (17, 1), (0, 5), (5, 0), (0, 0)):
        x = torch.randn(shape)
        plain, padded = every_cast(x, tile), every_cast(x, tile, pad)
        for (name, results), (_, wider) in zip(plain, padded, strict=True):
            for a, b in zip(results, wider, strict=True):
                if a.dtype not in FORMATS or a.shape == (0, 0):
                    assert same_bits(a, b), name
                    continue
                rows, cols = a.shape
                assert b.dtype == a.dtype and b.is_contiguous()
                assert b.shape == (rows, math.ceil(cols / pad) * pad)
                assert same_bits(b.view(torch.uint8)[:, :cols], a.view(torch.uint8))
                assert not b.view(torch.uint8)[:, cols:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_column_sum_is_rounded_once(dtype: torch.dtype) -> None:
    # float32 holds the sums of whole numbers exactly, bf16 and fp16 neither them nor the partial ones
    whole = torch.randint(-120, 128, (601, 33)).to(dtype)
    for x in (whole, whole.t().contiguous().t(), whole[1::2, ::3], whole[:1], whole[:0], whole[:, :0]):
        for tile in (ALL, (1, -1), (3, 5)):
            for name, (*_, sums) in every_cast(x, tile, 1, True):
                assert same_bits(sums, x.double().sum(0).float().to(dtype)), name
                assert sums.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_column_sum_against_float64(dtype: torch.dtype) -> None:
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


def test_no_column_sum_unless_asked_for() -> None:
    for dtype in DTYPES:
        for name, (*_, sums) in every_cast(torch.ones(3, 4, dtype=dtype), ALL):
            assert (sums.shape, sums.dtype) == ((0,), dtype), name
