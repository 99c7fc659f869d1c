"""Phases of a model that FSDP2 has sharded, beside those of the same one whole: bit for bit."""

from typing import Any

import pytest

from octavo import recipes
from octavo.schedule import Phase, PrecisionSchedule
from octavo.weights.fsdp2 import ShardedWeight
from octavo.weights.stored import StoredWeight
from tests.support.sharded_weights import RECIPES, adamw, differences, gradients, held, model, sharded

HIGH = recipes.high_precision()
STEPS = 4


def phases_of(recipe: str, first: str) -> list[Phase]:
    low = {"moments": "fp8", "master": "split16", "weight_storage": "fp8"}
    high = {"moments": "fp32", "master": "split32", "weight_storage": None}
    names = ("low", "high", "low") if first == "low" else ("high", "low", "high")
    phases = []
    for number, name in enumerate(names):
        trigger = {"from_step": number + 1} if number else {}
        recipe_of_phase = RECIPES[recipe]() if name == "low" else HIGH
        phases.append(Phase(recipe_of_phase, **(low if name == "low" else high), **trigger))
    return phases


def steps_beside_whole(mesh: Any, recipe: str, first: str) -> list[str]:
    """Return what differs after each of four steps, with switches after the second and the third."""
    differing = []
    nets = sharded(recipe, mesh), model(recipe)
    optimizers = [adamw(net) for net in nets]
    schedules = [PrecisionSchedule(*pair, phases_of(recipe, first)) for pair in zip(nets, optimizers, strict=True)]
    for step in range(STEPS):
        for net, optimizer, schedule in zip(nets, optimizers, schedules, strict=True):
            gradients(net, step)
            optimizer.step()
            schedule.step()
        runs = [held(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
        differing += [f"step {step}: {name}" for name in differences(*runs, mesh)]
        kind = StoredWeight if schedules[0].phase.weight_storage == "fp8" else ShardedWeight
        differing += [name for name, p in nets[0].named_parameters() if not isinstance(p._local_tensor, kind)]
    return differing


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", ["low", "high"])
@pytest.mark.parametrize("recipe", ["dynamic", "blockwise"])
def test_switches_equal_those_of_whole_weights(pool, recipe, first):
    assert pool.run(steps_beside_whole, (2,), recipe, first, seconds=120) == [[]] * 2


@pytest.mark.full
def test_switches_on_ranks_without_rows(pool):
    assert pool.run(steps_beside_whole, (4,), "dynamic", "low", seconds=120) == [[]] * 4


def measured(mesh: Any) -> list[tuple[int, str]]:
    net = sharded("dynamic", mesh)
    optimizer = adamw(net)
    phases = [Phase(recipes.dynamic()), Phase(HIGH, when_update_below_resolution=0.3)]
    schedule = PrecisionSchedule(net, optimizer, phases)
    for step in range(35):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.8**step
        gradients(net, step)
        optimizer.step()
        schedule.step()
    return [(switch.step, switch.reason) for switch in schedule.switches]


def test_ranks_find_one_resolution(pool):
    one, other = pool.run(measured, (2,), seconds=120)
    assert one == other and len(one) == 2 and "resolution" in one[1][1]


def uneven_blocks(mesh: Any) -> None:
    net = sharded("dynamic", mesh)
    optimizer = adamw(net)
    with pytest.raises(ValueError, match=r"phase 0.*over 2 ranks: 19 rows each are no whole blocks"):
        PrecisionSchedule(net, optimizer, [Phase(recipes.blockwise(), weight_storage="fp8")])


def test_blocks_that_would_reach_over_ranks_are_refused_at_once(pool):
    pool.run(uneven_blocks, (2,), seconds=60)
