"""Any cast, by the reference, a CPU's C++ and the Triton kernels: bit for bit what others' codes and scales are."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.granularity import PADDING
from octavo.kernels import cpu
from octavo.kernels.arguments import CastSource, CastTarget, Output, Scaling, new_cast
from octavo.kernels.cpu import cast, codes
from octavo.kernels.cpu.cast import write_chunks
from octavo.kernels.cpu.library import library
from octavo.kernels.reference.activation import produced
from octavo.scaling.delayed import State
from tests.kernels.conftest import Ops
from tests.support import definitions
from tests.support.casts import ALL, E4M3, TILES, Call, check, drawn, negated, second, update_args, values_of
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.helpers import Written
from tests.support.triton_cases import assert_counters_are_zero, use_small_tiles

LIMITS = [(1, 0), (500, 2000), (5000, 1 << 20), (1 << 18, 1 << 20)]  # (CHUNK, KEPT)


def set_up(ops: Ops, case: dict[str, Any], number: int, patch: pytest.MonkeyPatch) -> None:
    """Small tiles; on a CPU small chunks of rows, and threads."""
    if ops.kernels and case["small"]:
        use_small_tiles(ops.kernels, patch)
    if ops.name == "cpu":
        chunk, smallest = LIMITS[number % len(LIMITS)]
        patch.setattr(codes, "CHUNK", chunk)
        patch.setattr(cast, "KEPT", smallest)
        if number % 5 == 0:
            patch.setattr(codes, "_SHARE", 50)
            patch.setattr(torch, "get_num_threads", lambda: 3)


def has_same_bits(ops: Ops, case: dict[str, Any], call: Call) -> bool:
    """Whether what is cast is computed as the reference does; torch computes the last elements of rows another way."""
    whole_vectors = ops.name == "cpu" and (case["source"] == "norm" or case["shape"][1] % 64 == 0)
    return call.is_exact or ops.name == "reference" or whole_vectors


def check_casts(ops: Ops, count: int, seed: int, device: str = "cpu", **options: Any) -> None:
    torch.manual_seed(seed)
    for number, (case, call) in enumerate(drawn(count, seed, device, **options)):
        with pytest.MonkeyPatch.context() as patch:
            set_up(ops, case, number, patch)
            try:
                sums = "edge" not in (case["values"], case["h_values"])
                check(ops.of(call.op), call, has_same_bits(ops, case, call), sums)
                if ops.name == "cpu" and case["how"] != "groups" and call.is_exact:
                    check_produced(call)
                if case["source"] == "tensor":
                    check_amax(ops, call.args[0], case["tile"])
            except AssertionError as error:
                raise AssertionError(f"{call.op} of {case}") from error
        if ops.kernels:
            assert_counters_are_zero(ops.kernels)


def check_produced(call: Call) -> None:
    """Compare an activation's values on a CPU, uncast, with the reference's."""
    arguments = call.by_name
    source = [arguments[name] for name in ("x", "activation", "preactivation", "h_scale_inv", "h_tile")]
    torch.testing.assert_close(cast.produced(*source), produced(*source), rtol=0, atol=0, equal_nan=True)


def check_amax(ops: Ops, x: Tensor, tile: tuple[int, int]) -> None:
    amax = ops.of("amax")(x, tile)
    assert same_bits(amax.cpu(), definitions.cast(x.cpu(), E4M3, tile)[2])
    assert (amax.t() if tile[0] == 1 < tile[1] else amax).is_contiguous()


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.full) for n in range(8, 56))])
def test_any_cast(ops: Ops, seed: int) -> None:
    """A cast of a tensor, an activation, its gradient, a norm or groups, by one scaling or two, is the definition's."""
    assert library("cast") is not None
    check_casts(ops, 4 if ops.kernels else 30 if seed > 7 else 20, seed)


def test_the_cast_of_an_activations_gradient_casts_the_activation_too(ops: Ops) -> None:
    """The activation is cast as by a cast of its own by that scale, in one layout."""
    options = {"source": ["gradient"], "how": ["commit", "delayed"], "h_tile": [None], "again": [True]}
    check_casts(ops, 3 if ops.kernels else 24, 5, **options)


@pytest.mark.parametrize("source", ["tensor", "norm"])
def test_rows_shorter_than_their_padding(ops: Ops, source: str) -> None:
    """One element is cast by row or block to PADDING codes, of which all others are 0."""
    options = {"source": [source], "tile": [(1, -1), (1, 8)], "layout": ["rows"], "shape": [(1, 1)], "pad": [PADDING]}
    check_casts(ops, 2, 0, how=["cast"], transpose=[False], column_sum=[False], small=[False], **options)


def test_one_element_is_the_largest_wherever_it_lies(ops: Ops) -> None:
    for at in (0, 1, 127, 128, 2047, 4095, 5000, 130 * 77 - 1):
        x = torch.zeros(130, 77, dtype=torch.bfloat16)
        x.view(-1)[at] = -3.0
        assert ops.of("amax")(x, ALL).item() == 3.0


def test_rows_longer_than_the_widest_tile(ops: Ops) -> None:
    x = values_of("faults", (3, 9000), torch.bfloat16)
    check(ops.of("cast"), Call("cast", (x, None, 0, E4M3, (1, -1), False, 0, False, 16)), True)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1), (4, 6)])
def test_outputs_share_no_memory(shape: tuple[int, int], ops: Ops) -> None:
    """A cast's outputs share no memory, of any size: a copy that is left out shows in vectors."""
    for tile in TILES[: 1 if ops.kernels else 8]:
        x, state = torch.randn(shape), State.empty(1)
        how = 0, E4M3, tile, False, 0
        delayed, one = state.scale if tile == ALL else None, torch.ones(1, 1)
        for result in (
            ops.of("cast")(x, delayed, *how, False, 1, True),
            ops.of("cast")(x, delayed, *how, True, 1, True),
            ops.of("cast")(x, None, *how, True, 1, True, **second(E4M3, tile, False, 0)),
            ops.of("cast")(x, None, *how, False, 2, True, **second(E4M3, tile, False, 0)),
            ops.of("cast_and_commit")(x, *state, one, None, E4M3, False, 0, *update_args("max"), True, 1, True),
        ):
            tensors = [x, *state, *result]
            assert not any(shares_memory(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (5, 7)], ids=str)
def test_what_torch_has_not_negated_yet_is_read_with_its_sign(ops: Ops, shape: tuple[int, int]) -> None:
    """A single element is contiguous to torch, whatever its stride."""
    x = torch.randn(shape)
    codes = x.to(E4M3)
    results = []
    for one in (x, negated(x)):
        statistics = torch.zeros(71, dtype=torch.float64), torch.zeros(3)
        ops.of("cast_statistics")(one, codes, torch.ones(1, 1), ALL, *statistics)
        results.append([*ops.of("cast")(one, None, 0, E4M3, ALL, False, 0, True, 1, True), *statistics])
    assert all(map(same_bits, *results))


@each_pair(
    shape=[(0, 7), (5, 0), (1, 1), (17, 130), (150, 40), (300, 9)],
    run=[1, 500, 3000, 1 << 30],
    kept=[0, 2000, 1 << 30],
    tile=TILES[:8],
    second=[None, *TILES[:8]],
    unit=[1, 4, 128],
    delayed=[0.0, 0.25],
)
def test_rows_are_made_once_or_twice_if_they_were_not_kept(monkeypatch, case):
    monkeypatch.setattr(codes, "CHUNK", case["run"])
    monkeypatch.setattr(cast, "KEPT", case["kept"])
    monkeypatch.setattr(cast, "ROWS_OF_A_THREAD", 1)
    y, asked, delayed = torch.randn(case["shape"]), list[slice](), torch.tensor([case["delayed"]])
    tiles = [tile for tile in (case["tile"], case["second"]) if tile is not None]
    scalings = [Scaling(torch.float8_e4m3fn, t, False, 0, delayed if t == (-1, -1) else None) for t in tiles]
    make = lambda rows: (asked.append(rows), y[rows].clone())[1]  # noqa: E731
    targets = [CastTarget(s, *new_cast(CastSource(y), s, None, Output())[:4]) for s in scalings]
    functions = codes.compiled(y)  # library("cast") itself would take addresses as numbers of 32 bits
    assert functions is not None
    write_chunks(functions, make, case["shape"], case["unit"], targets, sums := torch.empty(case["shape"][1]))
    torch.testing.assert_close(sums, y.sum(0), rtol=1e-5, atol=1e-4)
    whole = math.lcm(case["unit"], min(torch.get_num_threads(), 8), *(tile[0] for tile in tiles if tile[0] != -1))
    assert all(rows.start % whole == 0 for rows in asked)
    looks = any(tile[0] == -1 and not (tile == (-1, -1) and case["delayed"]) for tile in tiles)
    sizes = {rows.start: (rows.stop - rows.start) * y.shape[1] for rows in asked}
    assert max(sizes.values()) <= max(case["run"], whole * y.shape[1])
    held = zip(sizes, itertools.accumulate(sizes.values()), strict=True)
    again = [start for start, size in held if size > case["kept"]] if looks and len(sizes) > 1 else []
    assert [rows.start for rows in asked] == [*sizes, *again]


def test_a_cpu_writes_no_more_for_a_fused_activation_than_torch_for_its_parts() -> None:
    """Count swiglu forward and backward, per tensor, whose amax is needed before the first code."""
    h, dy = torch.randn(128, 2048).bfloat16(), torch.randn(128, 1024).bfloat16()
    gate, up = h.chunk(2, dim=1)
    with Written() as parts:
        value = torch.nn.functional.silu(gate) * up
        torch.ops.aten.silu_backward(dy * up, gate), dy * torch.nn.functional.silu(gate)
    with Written() as fused:
        for source in ((h, None), (dy, h)):
            cpu.KERNELS["cast"](source[0], None, 0, E4M3, ALL, False, 0, False, 1, False, "swiglu", source[1])
    assert value.numel() < fused.elements.total() <= parts.elements.total()
