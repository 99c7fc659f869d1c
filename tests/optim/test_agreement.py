"""Sharded weights that live in FP8 take the steps of whole ones bit for bit; ranks exchange one number a weight."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import octavo
from octavo.optim import AdamW, Moment
from octavo.optim.agreement import Agreement, needs_agreement
from octavo.tensor.stored_weight import local_stored
from tests.support import sharded_weights as cases
from tests.support.byte_counter import REDUCE, ByteCounter
from tests.support.sharded_weights import adamw, differences, held, model, sharded, steps

# Trainings of a model that ``make(seed)`` makes: each returns what is compared.


def three_steps(make: Any, master: str | None = "auto", moments: Any = "fp8") -> tuple[Any, Any]:
    net = make()
    optimizer = adamw(net, master, moments)
    steps(net, optimizer, 0, 3)
    return net, optimizer


def gradients_of_some(make: Any) -> tuple[Any, Any]:
    """Steps in which one weight has no gradient, each time another."""
    net = make()
    optimizer, params = adamw(net), list(net.parameters())
    for step in range(6):
        cases.gradients(net, step)
        params[step % 3].grad = None
        optimizer.step()
    return net, optimizer


def skipped(make: Any) -> tuple[Any, Any]:
    """A step with a NaN on one rank only."""
    net = make()
    params = list(net.parameters())[:2]  # torch finds no largest value of a gradient without elements
    optimizer = AdamW(params, lr=0.05, skip_nonfinite=True)
    for step in range(3):
        cases.gradients(net, step)
        if step == 1:
            cases.on_this_rank(params[0].grad)[0].fill_(torch.nan)
        optimizer.step()
    return net[:-1], optimizer


def loaded_between(make: Any, plain: bool) -> tuple[Any, Any]:
    """A state dict of another model is loaded between steps: masters begin anew, on all ranks."""
    net, other = make(0), make(1)
    optimizer = adamw(net)
    steps(net, optimizer, 0, 2)
    state = other.state_dict()
    if plain:
        values = octavo.restore(model("dynamic", 1)).state_dict()
        state = {name: cases.like(value, other.get_parameter(name)) for name, value in values.items()}
    net.load_state_dict(state)
    steps(net, optimizer, 2, 4)
    return net, optimizer


def loaded_by_another_master(make: Any) -> tuple[Any, Any]:
    """A state of split24 is loaded into split16: the master begins as the weight, and ranks agree on its amax."""
    net = make()
    before, optimizer = adamw(net, "split24"), adamw(net, "split16")
    steps(net, before, 0, 2)
    with warnings.catch_warnings(action="ignore"):
        optimizer.load_state_dict(before.state_dict())
    steps(net, optimizer, 2, 4)
    return net, optimizer


def beside_whole(mesh: Any, training: str, recipe: str, *options: Any) -> list[str]:
    """What differs between a training of a sharded model and of the whole one."""
    makes = (lambda seed=0: sharded(recipe, mesh, seed)), (lambda seed=0: model(recipe, seed))
    runs = [held(*globals()[training](make, *options)) for make in makes]
    return differences(*runs, mesh["shard"])


MASTERS = ["split16", "split24", "fp16_scaled", "fp32", None]
CELLS: list[Any] = [((2,), three_steps, recipe, master) for recipe in ("dynamic", "blockwise") for master in MASTERS]
CELLS += [
    ((2,), three_steps, "delayed", "auto", "fp32"),
    ((2, 2), three_steps, "dynamic"),  # a replica's ranks agree among themselves
    ((2,), gradients_of_some, "dynamic"),
    ((2,), skipped, "dynamic"),
    *(((2,), loaded_between, "dynamic", plain) for plain in (False, True)),
    ((2,), loaded_by_another_master, "dynamic"),
]
# of 5 rows the third rank of 4 has one and the fourth none; of 1 row three ranks have none (of 2 one)
WITHOUT_ROWS: list[Any] = [((4,), three_steps, "dynamic", master) for master in MASTERS]
WITHOUT_ROWS += [((4,), loaded_between, "dynamic", plain) for plain in (False, True)]


@pytest.mark.parametrize("cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.full) for cell in WITHOUT_ROWS)])
def test_equal_to_whole_weights(pool, cell):
    shape, training, *options = cell
    assert pool.run(beside_whole, shape, training.__name__, *options, seconds=60) == [[]] * math.prod(shape)


# --- what is exchanged, and when --------------------------------------------------------------------------------------


def exchanged(mesh: Any, recipe: str) -> list[tuple[int, int]]:
    """(all-reduces, their bytes) of some steps."""
    net = sharded(recipe, mesh)
    optimizer, found = adamw(net), []
    for step in range(3):
        with ByteCounter() as counter:
            steps(net, optimizer, step, step + 1)
        found.append((counter.calls[REDUCE], counter.bytes[REDUCE]))
    return found


def test_one_number_a_weight_in_one_collective(pool):
    """The first step has others before it: ranks have the same options (16 bytes), and masters have begun."""
    assert pool.run(exchanged, (2,), "dynamic", seconds=60) == [[(3, 16 + 24), (1, 12), (1, 12)]] * 2
    assert pool.run(exchanged, (2,), "blockwise", seconds=60) == [[(1, 16), (0, 0), (0, 0)]] * 2
    assert pool.run(exchanged, (1,), "dynamic", seconds=60) == [[(0, 0)] * 3]


def waits(mesh: Any) -> list[Any]:
    """Who waits for the exchange of the last step."""
    net = sharded("dynamic", mesh)
    optimizer, found = adamw(net), []
    steps(net, optimizer, 0, 1)
    agreement = optimizer._agreement

    def under_way() -> int:
        return len(agreement._under_way)

    found.append(under_way())
    net(cases.batch(0, 0)).sum().backward()
    found.append(under_way())
    optimizer.state_dict()
    found.append(under_way())
    steps(net, optimizer, 1, 2)
    found.append(under_way())
    optimizer.load_state_dict(optimizer.state_dict())
    found.append(under_way())
    steps(net, optimizer, 2, 3)
    amax = optimizer.state[net[0].weight]["master_amax"]
    del optimizer
    found.append(under_way())
    agreement.__del__()
    found.append(under_way())
    each = [torch.empty(1, 1) for _ in range(mesh.size())]
    dist.all_gather(each, amax, group=mesh.get_group())
    return [*found, all(torch.equal(other, amax) for other in each)]


def test_who_waits(pool):
    assert pool.run(waits, (2,), seconds=60) == [[1, 1, 0, 1, 0, 1, 0, True]] * 2


# --- which weights ----------------------------------------------------------------------------------------------------


def who_needs_it(mesh: Any) -> list[bool]:
    nets = sharded("dynamic", mesh), sharded("blockwise", mesh), model("dynamic")
    return [needs_agreement(net[0].weight) for net in nets] + [needs_agreement(nn.Parameter(torch.ones(2, 2)))]


def test_which_weights_need_it(pool):
    assert pool.run(who_needs_it, (2,), seconds=60) == [[True, False, False, False]] * 2
    assert pool.run(who_needs_it, (1,), seconds=60) == [[False] * 4]


def test_nothing_under_way_is_nothing_to_wait_for():
    Agreement().finish()


def refused(mesh: Any) -> list[str]:
    said = []
    one = (Moment("fp32"), Moment("fp32"))
    net = sharded("dynamic", mesh)
    for options in ({"master": "split32"}, {"clip_update": False}, {"betas": (0.99, 0.9)}):
        with pytest.raises(ValueError) as caught:
            AdamW(net.parameters(), **options)
        said.append(str(caught.value))
    assert adamw(net, moments=one) is not None and local_stored(net[0].weight) is not None
    return said


def test_what_whole_weights_are_refused_sharded_ones_are(pool):
    for said in pool.run(refused, (2,), seconds=60):
        assert "weights stored in FP8 take" in said[0] and "clip_update on" in said[1] and "beta1^2 > beta2" in said[2]
