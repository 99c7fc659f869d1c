"""Sharded weights that live in FP8 take the steps of whole ones bit for bit; ranks exchange one number a weight."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import octavo
from octavo.optim import Moment
from octavo.optim.agreement import Agreement, needs_agreement
from octavo.tensor.stored_weight import local_stored
from tests.support import sharded_weights as cases
from tests.support.byte_counter import REDUCE, ByteCounter
from tests.support.sharded_weights import adamw, differences, held, model, sharded, steps

each_master = pytest.mark.parametrize("master", ["split16", "split24", "fp16_scaled", "fp32", None])


def beside_whole(mesh: Any, recipe: str, master: str | None, moments: Any = "fp8") -> list[str]:
    """What differs between steps of a sharded model and of the whole one."""
    runs = []
    for net in (sharded(recipe, mesh), model(recipe)):
        optimizer = adamw(net, master, moments)
        steps(net, optimizer, 0, 3)
        runs.append(held(net, optimizer))
    return differences(*runs, mesh)


@each_master
@pytest.mark.parametrize("recipe", ["dynamic", "blockwise"])
def test_steps_equal_those_of_whole_weights(pool, recipe, master):
    assert pool.run(beside_whole, (2,), recipe, master, seconds=60) == [[]] * 2


@pytest.mark.full
@each_master
def test_ranks_without_rows(pool, master):
    """Of 5 rows the third rank of 4 has one and the fourth none; of 1 row three ranks have none (of 2 one)."""
    assert pool.run(beside_whole, (4,), "dynamic", master, seconds=60) == [[]] * 4


def test_moments_in_float32(pool):
    assert pool.run(beside_whole, (2,), "delayed", "auto", "fp32", seconds=60) == [[]] * 2


def test_replicas(pool):
    assert pool.run(replicas, (2, 2), seconds=60) == [[]] * 4


def replicas(mesh: Any) -> list[str]:
    """The same under HSDP: a replica's ranks agree among themselves."""
    runs = []
    for net in (sharded("dynamic", mesh), model("dynamic")):
        optimizer = adamw(net)
        steps(net, optimizer, 0, 3)
        runs.append(held(net, optimizer))
    return differences(*runs, mesh["shard"])


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


def gradients_of_some(mesh: Any) -> list[str]:
    """Steps in which one weight has no gradient, each time another, beside the same of whole weights."""
    runs = []
    for net in (sharded("dynamic", mesh), model("dynamic")):
        optimizer = adamw(net)
        params = list(net.parameters())
        for step in range(6):
            cases.gradients(net, step)
            params[step % 3].grad = None
            optimizer.step()
        runs.append(held(net, optimizer))
    return differences(*runs, mesh)


def test_weights_without_a_gradient_take_part(pool):
    assert pool.run(gradients_of_some, (2,), seconds=60) == [[]] * 2


def skipped(mesh: Any) -> list[str]:
    """A step with a NaN on one rank only."""
    runs = []
    for net in (sharded("dynamic", mesh), model("dynamic")):
        params = list(net.parameters())[:2]  # torch finds no largest value of a gradient without elements
        optimizer = type(adamw(net))(params, lr=0.05, skip_nonfinite=True)
        for step in range(3):
            cases.gradients(net, step)
            if step == 1:
                cases.on_this_rank(params[0].grad)[0].fill_(torch.nan)
            optimizer.step()
        runs.append(held(net[:-1], optimizer))
    return differences(*runs, mesh)


def test_a_step_that_is_skipped(pool):
    assert pool.run(skipped, (2,), seconds=60) == [[]] * 2


# --- weights written otherwise ----------------------------------------------------------------------------------------


def loaded_between(mesh: Any, plain: bool) -> list[str]:
    """A state dict of another model is loaded between steps: masters begin anew, on all ranks."""
    runs = []
    for make in (lambda seed: sharded("dynamic", mesh, seed), lambda seed: model("dynamic", seed)):
        net, other = make(0), make(1)
        optimizer = adamw(net)
        steps(net, optimizer, 0, 2)
        state = other.state_dict()
        if plain:
            values = octavo.restore(model("dynamic", 1)).state_dict()
            state = {name: cases.like(value, other.get_parameter(name)) for name, value in values.items()}
        net.load_state_dict(state)
        steps(net, optimizer, 2, 4)
        runs.append(held(net, optimizer))
    return differences(*runs, mesh)


@pytest.mark.parametrize("plain", [False, True], ids=["stored", "plain"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_what_is_loaded_between_steps(pool, ranks, plain):
    assert pool.run(loaded_between, (ranks,), plain, seconds=60) == [[]] * ranks


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
    for make in (
        lambda: adamw(net, "split32"),
        lambda: type(adamw(net))(net.parameters(), clip_update=False),
        lambda: type(adamw(net))(net.parameters(), betas=(0.99, 0.9)),
    ):
        try:
            make()
        except ValueError as error:
            said.append(str(error))
    assert adamw(net, moments=one) is not None and local_stored(net[0].weight) is not None
    return said


def test_what_whole_weights_are_refused_sharded_ones_are(pool):
    for said in pool.run(refused, (2,), seconds=60):
        assert len(said) == 3
        assert "weights stored in FP8 take" in said[0] and "clip_update on" in said[1] and "beta1^2 > beta2" in said[2]


def loaded_by_another_master(mesh: Any) -> list[str]:
    """A state of split24 is loaded into split16: the master begins as the weight, and ranks agree on its amax."""
    runs = []
    for net in (sharded("dynamic", mesh), model("dynamic")):
        before, optimizer = adamw(net, "split24"), adamw(net, "split16")
        steps(net, before, 0, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.load_state_dict(before.state_dict())
        steps(net, optimizer, 2, 4)
        runs.append(held(net, optimizer))
    return differences(*runs, mesh)


def test_a_state_that_is_converted(pool):
    assert pool.run(loaded_by_another_master, (2,), seconds=60) == [[]] * 2
