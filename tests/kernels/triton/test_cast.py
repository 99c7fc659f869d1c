"""Casts by one scaling of any tile and by two, amaxes, and the cast that commits, bit for bit."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.granularity import MX
from octavo.kernels.layouts import swizzled
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.scaling.delayed import State
from tests.support.casts import of_norm, second
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.passes import one_pass
from tests.support.triton_cases import (
    ALL,
    BOTH_LAYOUTS,
    E4M3,
    E5M2,
    FORMATS,
    INPUT,
    assert_counters_are_zero,
    check,
    count_launches,
    input_of,
    poisoned_memory,
    to,
    update_args,
    values_of,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

LINES = [(1, -1), (-1, 1)]
IN_REGISTERS = [(1, 128), (128, 128), (1, 32), (128, 1), (32, 1), (64, 16), (2, 8), (1, 1)]
# of any size, and in any direction the whole tensor
OTHERS = [(3, 5), (100, 7), (256, 48), (-1, 48), (32, -1), (1, 50), (-1, 128)]
FEW_BLOCKS = [(0, 17), (17, 0), (1, 1), (1, 100), (17, 1), (17, 65), (48, 20)]


def check_cast(kernels: TritonKernels, x: Tensor, case: dict[str, Any], state: Tensor | None = None) -> None:
    """The cast of x that a case of BOTH_LAYOUTS says, and the amax of its tiles."""
    cast = case["fmt"], case["tile"], case["power_of_two"], case["margin"]
    how = cast, case["transpose"], case["pad"], case["column_sum"]
    check(kernels, "cast", x, state, case.get("role", 0), *cast, *how[1:], compare_sums=case["values"] != "edge")
    with poisoned_memory():
        amax = kernels.amax(x, case["tile"])
    assert (amax.t() if case["tile"] == (1, 128) else amax).is_contiguous() and amax.device == x.device
    assert same_bits(amax.cpu(), REFERENCE["amax"](x.cpu(), case["tile"]))
    assert_counters_are_zero(kernels)


@each_pair(**BOTH_LAYOUTS, tile=[*LINES, *IN_REGISTERS])
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    check_cast(kernels, input_of(kernels, monkeypatch, case), case)


@each_pair(**BOTH_LAYOUTS | {"shape": FEW_BLOCKS, "small": [False]}, tile=OTHERS)
def test_cast_in_blocks_of_any_size(kernels, monkeypatch, case):
    check_cast(kernels, input_of(kernels, monkeypatch, case), case)


@each_pair(**BOTH_LAYOUTS, tile=[ALL], scale=[None, 0.0, 0.37, 2.0**60], role=[0, 1, 2])
def test_one_scale(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    x, state = input_of(kernels, monkeypatch, case), None
    if case["scale"] is not None:
        state = torch.full((3,), 7.0)
        state[case["role"]] = case["scale"]
        state = state.to(kernels.device)
    check_cast(kernels, x, case, state)


def test_rows_longer_than_the_widest_tile(kernels: TritonKernels) -> None:
    x = values_of("faults", (3, 9000), torch.bfloat16).to(kernels.device)
    check(kernels, "cast", x, None, 0, E4M3, (1, -1), False, 0, False, 16)


def test_one_element_is_the_largest_wherever_it_lies(kernels: TritonKernels) -> None:
    for at in (0, 1, 127, 128, 2047, 4095, 5000, 130 * 77 - 1):
        x = torch.zeros(130, 77, dtype=torch.bfloat16)
        x.view(-1)[at] = -3.0
        assert kernels.amax(x.to(kernels.device), ALL).item() == 3.0


LENGTHS = [(1, "most_recent"), (4, "max"), (5, "most_recent"), (16, "max")]
FEW = [(0, 17), (17, 0), (1, 270), (270, 1), (33, 57), (96, 160)]
# both from one launch; and not both
TILES = [((1, 128), (128, 1)), ((1, 32), (32, 1)), ((1, 128), (128, 128)), ((8, 2), (1, 64))]
TILES += [((1, -1), (-1, 1)), (ALL, (-1, 1)), ((-1, 1), ALL), ((20, 48), (32, 1))]


@each_pair(
    **INPUT | {"shape": FEW},
    tiles=TILES,
    formats=[(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)],
    powers_of_two=[(False, False), (True, True), (False, True)],
    transpose_second=[False, True],
    pad=[1, 16],
    column_sum=[False, True],
)
def test_cast_two_scalings(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    x = input_of(kernels, monkeypatch, case)
    (tile, second_tile), (fmt, second_fmt) = case["tiles"], case["formats"]
    power_of_two, second_power_of_two = case["powers_of_two"]
    cast = None, 0, fmt, tile, power_of_two, 1, case["transpose_second"], case["pad"], case["column_sum"]
    other = second(second_fmt, second_tile, second_power_of_two, 2)
    check(kernels, "cast", x, *cast, **other, compare_sums=case["values"] != "edge")


def test_swizzled_scales(kernels: TritonKernels) -> None:
    """Those of the same cast that does not, with their padding; of halves that lie side by side and of a norm too."""
    x, g, h = torch.randn(130, 70), torch.randn(32, 64), torch.randn(32, 128)
    norm = of_norm(torch.ones(70), None, "rms_norm")
    both, column = second(E4M3, (32, 1), True, 0), (32, 1)
    for source, extras, tiles, named in (
        (x, (True, 16), (MX, MX), both),
        (x, (False, 16), (MX, column), both),
        (x, (True, 16), (MX, MX), both | norm),
        (g, (True, 16, False, "swiglu", h), (MX, MX), both),
        (x.t(), (False, 1), (column,), {}),
    ):
        how = to(kernels.device, (source, None, 0, E4M3, tiles[0] if len(tiles) == 1 else MX, True, 0, *extras))
        named = {name: to(kernels.device, value) for name, value in named.items()}
        with poisoned_memory():
            found, plain = kernels.cast(*how, **named, swizzle=True), kernels.cast(*how, **named)
        for number, tile in enumerate(tiles):
            scales = plain[2 + number] if tile == MX else plain[2 + number].t()
            assert same_bits(found[2 + number].view(torch.uint8), swizzled(scales).view(torch.uint8))
            assert same_bits(found[number], plain[number])


@each_pair(
    **INPUT,
    fmt=FORMATS,
    scale=[0.0, 0.37, 2.0**60],
    length=[1, 4, 5, 16],
    reduce=["max", "most_recent"],
    amaxes=[(None, None), (3.0, None), (None, 0.0), (1e-3, 20.0)],
    powers_of_two=[(False, True, False), (True, False, True)],
    transpose=[False, True],
    pad=[1, 16],
    column_sum=[False, True],
)
def test_cast_and_commit(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    x = input_of(kernels, monkeypatch, case)
    state = torch.tensor([5.0, 0.0, case["scale"]], device=kernels.device)
    own = state, torch.rand(3, case["length"]).to(kernels.device), State.empty(1, kernels.device).before
    amaxes = [None if a is None else torch.full((1, 1), a, device=kernels.device) for a in case["amaxes"]]
    update = update_args(case["reduce"], case["powers_of_two"])
    cast = (case["fmt"], case["powers_of_two"][2], 2)
    extras = (case["transpose"], case["pad"], case["column_sum"])
    sums = case["values"] != "edge"
    check(kernels, "cast_and_commit", x, *own, *amaxes, *cast, *update, *extras, compare_sums=sums)


@pytest.mark.parametrize(
    ("length", "reduce"), [(2, "max"), *(pytest.param(*case, marks=pytest.mark.full) for case in LENGTHS)]
)
def test_a_sequence_of_steps(kernels: TritonKernels, length: int, reduce: str) -> None:
    # from no history on; what one step leaves the next one reads
    state = State.empty(length, kernels.device)
    update = update_args(reduce)
    for step in range(length + 3):
        x, weight, g = (steps_values(step, role).to(kernels.device) for role in range(3))
        *_, amax_x, _ = check(kernels, "cast", x, state.scale, 0, E4M3, ALL, False, 0)
        *_, amax_weight, _ = check(kernels, "cast", weight, state.scale, 1, E4M3, ALL, True, 1, True, 16)
        amaxes = (amax_x.to(kernels.device), None if step % 3 == 1 else amax_weight.to(kernels.device))
        check(kernels, "cast_and_commit", g, *state, *amaxes, E5M2, False, 2, *update, True, 1, True)
    assert (state.scale != 0).all() and bool((state.amax_history != 0).any())


@pytest.mark.parametrize("reduce", ["max", pytest.param("most_recent", marks=pytest.mark.full)])
def test_casts_of_a_pass_read_the_scales_of_before_it(kernels, monkeypatch, reduce):
    state, other = State.empty(3, kernels.device), State.empty(3, kernels.device)
    update, launched = update_args(reduce), count_launches(kernels, monkeypatch)
    exists = kernels.module("delayed_update").scale_exists

    def both(x: Tensor, *amaxes: Tensor | None) -> Tensor:
        arguments = *amaxes, E5M2, False, 2, *update, True, 1, True
        results, expected = (
            op(x, *one, *arguments)
            for op, one in ((kernels.cast_and_commit, state), (REFERENCE["cast_and_commit"], other))
        )
        assert all(same_bits(a, b) for a, b in zip((*results[:3], *state), (*expected[:3], *other), strict=True))
        exists(state.scale, 2)  # as a forward asks
        return results[2]

    for step in range(6):
        old, gradients = state.scale.clone(), [steps_values(step + call, call).to(kernels.device) for call in range(3)]
        amaxes: list[tuple[Tensor | None, ...]] = [
            (x.float().nan_to_num().abs().amax().view(1, 1) if x.numel() else None, None) for x in gradients
        ]
        launched.clear()
        found = one_pass(*(partial(both, x, *amax) for x, amax in zip(gradients, amaxes, strict=True)))
        assert launched.count("amax_kernel") == (3, 1, 0)[min(step, 2)]  # the second pass's first commit tells the host
        own = [kernels.cast(x, old, 2, E5M2, ALL, False, 2)[2] for x in gradients]
        assert all(same_bits(a, b) for a, b in zip(found, own, strict=True))
    assert (state.scale != 0).tolist() == [True, False, True]


def steps_values(step: int, role: int) -> Tensor:
    """What a role casts in a step: nothing but zeros at times, nothing at all, or with a fault."""
    x = torch.randn(17, 40).bfloat16() * 2.0 ** (step * (-1) ** role)
    if (step + role) % 4 == 0:
        x.zero_()
    if (step + role) % 5 == 3:
        x = x[:0]
    if (step + role) % 3 == 0:
        x[2:3, 2:4] = torch.tensor([math.nan, math.inf])
    return x
