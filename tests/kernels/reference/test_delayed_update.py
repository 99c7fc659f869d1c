"""The delayed state's update against a list of numbers a role."""

from functools import partial

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.backward_pass import LONGEST
from octavo.scaling.delayed import State, empty_state
from tests.support.definitions import same_bits, scale_of
from tests.support.passes import end_step, one_pass

LIMITS = [448.0, 448.0, 57344.0]


def expected_update(
    scale: list[float], history: list[list[float]], amaxes: list[float | None], powers: list[bool], margins: list[int]
) -> tuple[dict[str, list[float]], list[list[float]]]:
    """The next scales under each ``reduce``, and the rolled histories."""
    rolled = [h if a is None else [a, *h][: len(h)] for a, h in zip(amaxes, history, strict=True)]
    scales: dict[str, list[float]] = {"max": [], "most_recent": []}
    for role, amax in enumerate(amaxes):
        for reduce, reduced in (("max", max(rolled[role])), ("most_recent", rolled[role][0])):
            previous = scale[role]
            next_scale = scale_of(reduced, LIMITS[role], powers[role], margins[role], previous=previous)
            scales[reduce].append(previous if amax is None else next_scale)
    return scales, rolled


UPDATE = (LIMITS, [False, True, False], [0, 1, 2])


@pytest.mark.parametrize("reduce", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5, 16])
@pytest.mark.parametrize("powers", [[False] * 3, [True] * 3, [True, False, True], [False, False, True]], ids=str)
def test_a_step_rolls_each_role_once_by_its_largest_amax(powers: list[bool], length: int, reduce: str) -> None:
    """A step rolls each history once, by all its passes and calls; casts read the scales from before their pass."""
    state = State.empty(length)

    def call(amaxes: list[float | None], margins: list[int]) -> list[Tensor]:
        seen = [kernels.scales_of_pass(state.scale, state.before)]
        of_roles = (None if amax is None else torch.full((1, 1), amax) for amax in amaxes)
        kernels.delayed_update(*state, *of_roles, LIMITS, powers, margins, reduce)
        return [*seen, kernels.scales_of_pass(state.scale, state.before)]

    for step in range(2 * length + 6):
        margins = [0, 3, step % 2]
        calls: list[list[float | None]] = (torch.rand(1 + step % 4, 3) * 10.0 ** (step % 3)).tolist()
        calls[0][step % 3] = None  # the first call of a pass may leave a role out that a later one has
        calls[-1][(step + 1) % 3] = 0.0
        if step % 5 == 4:
            calls[len(calls) // 2] = [None] * 3
        amaxes_of_roles = [[amax for amax in role if amax is not None] for role in zip(*calls, strict=True)]
        largest = [max(role, default=None) for role in amaxes_of_roles]
        scales, rolled = expected_update(state.scale.tolist(), state.amax_history.tolist(), largest, powers, margins)
        addresses = [tensor.data_ptr() for tensor in state]
        for of_pass in (calls[:2], calls[2:3], calls[3:]):
            old = state.scale.clone()
            for seen in one_pass(*(partial(call, amaxes, margins) for amaxes in of_pass)):
                assert all(same_bits(scales_of_pass, old) for scales_of_pass in seen)
        end_step()
        assert addresses == [tensor.data_ptr() for tensor in state], "the state is written in place"
        assert same_bits(state.amax_history, torch.tensor(rolled))
        assert same_bits(state.scale, torch.tensor(scales[reduce]))
        assert same_bits(kernels.scales_of_pass(state.scale, state.before), state.scale), "the pass is over"


def test_a_role_that_is_emptied_in_a_pass_begins_anew() -> None:
    state, one = State.empty(3), torch.ones(1, 1)
    for _ in range(2):
        kernels.delayed_update(*state, one, one, one, *UPDATE, "max")
        end_step()

    def call() -> Tensor:
        kernels.delayed_update(*state, 2 * one, 2 * one, 2 * one, *UPDATE, "max")
        return kernels.scales_of_pass(state.scale, state.before)

    first, _, second = one_pass(call, lambda: empty_state(state, 1), call)
    assert state.amax_history.tolist() == [[2.0, 1.0, 1.0], [2.0, 0.0, 0.0], [2.0, 1.0, 1.0]]
    assert second.tolist() == [first[0], 0.0, first[2]]


def test_without_an_optimizer_so_many_passes_are_a_step() -> None:
    """An amax is not remembered for ever where no torch.optim.Optimizer ends a step: so many passes are one."""
    state = State.empty(2)
    for amax in (1.0, 2.0, 3.0):
        kernels.delayed_update(*state, None, None, torch.full((1, 1), amax), *UPDATE, "max")
        state.before[2] -= LONGEST // 2
    assert state.amax_history[2].tolist() == [3.0, 2.0]


def test_a_state_of_another_process_rolls_in_its_first_pass() -> None:
    """A loaded state's numbers of passes are another process's, perhaps larger: it rolls in its first pass here."""
    for difference in (1 << 30, -(1 << 30)):
        state, one = State.empty(2), torch.ones(1, 1)
        kernels.delayed_update(*state, one, one, one, *UPDATE, "max")
        state.before.add_(difference)
        kernels.delayed_update(*state, 2 * one, 2 * one, 2 * one, *UPDATE, "max")
        assert state.amax_history.tolist() == [[2.0, 1.0]] * 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_compiled_graph_that_commits_twice_in_a_pass(backend: str) -> None:
    def step(state: State, *gradients: Tensor) -> list[Tensor]:
        tensors = []
        for g in gradients:
            in_force = kernels.scales_of_pass(state.scale, state.before)
            cast = torch.float8_e5m2, False, 0, *UPDATE, "max", False
            q, _, scale_inv, *_ = kernels.cast_and_commit(g, *state, g.abs().amax().view(1, 1), None, *cast)
            tensors += [in_force, q.view(torch.uint8), scale_inv]
        return tensors

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    ours, theirs = State.empty(2), State.empty(2)
    for size in (1.0, 8.0, 0.25):
        gradients = [torch.randn(4, 6) * size, torch.randn(4, 6) * 2 * size]
        twice = partial(compiled, ours, *gradients), partial(step, theirs, *gradients)
        for a, b in zip(*one_pass(*twice), strict=True):
            assert same_bits(a, b)
        assert all(map(same_bits, ours, theirs))
        end_step()
    assert ours.amax_history[0].tolist() == [gradients[1].abs().max(), ours.amax_history[0, 1]]
