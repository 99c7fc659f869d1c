"""Experts on several ranks whose weights live in FP8: each rank owns the codes of its own, and trains as one would."""

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import octavo
from octavo import recipes
from octavo.distributed import checkpoint, expert_parallel
from octavo.distributed.ranks import Ranks
from octavo.optim import AdamW, Muon, update_in_backward
from octavo.schedule import Phase, PrecisionSchedule
from octavo.weights.stored import local_stored
from tests.distributed.test_experts import KINDS, SIZES, parts
from tests.support.expert_models import RECIPES, Mixture, batch, built, off_by_maximum, whole
from tests.support.helpers import stepped

E = 8
OPTIONS: dict[str, Any] = {
    "few bytes": {"moments": "fp8", "master": "split16"},
    "no master": {"moments": "bf16", "master": None},
    "gradients": {"moments": "fp8", "master": "split24", "gradient_storage": "fp8"},
    "in backward": {"moments": "fp8", "master": "fp32"},
    "Muon": {"moments": "fp8", "master": "split24", "directions": "fp8"},
}


def mixture_of(mesh: Any, kind: str, recipe: str, when: str = "before") -> Mixture:
    """Experts in FP8 on the ranks of a mesh, stored ``before`` they were shared or ``after``; on one: no mesh."""
    net = built(kind, recipe, E, storage="fp8" if when == "before" or mesh is None else None)
    if mesh is not None:
        expert_parallel(net, mesh, exact=True)
        if when == "after":
            octavo.convert(net, RECIPES[recipe](), lambda module, name: name != "router", "fp8")
        assert all(p._local_tensor.shape[0] == E // mesh.size() for p in net.experts.parameters())
    return net


def optimizer_of(net: Mixture, options: str) -> Any:
    if options == "Muon":
        stacked, others = ([p for p in net.experts.parameters() if (p.ndim == 3) == is_3d] for is_3d in (True, False))
        groups = [{"params": stacked, "algorithm": "muon"}, {"params": others, "algorithm": "adamw"}]
        return Muon(groups, lr=0.05, adamw={"eps": 1e-30}, **OPTIONS[options])
    optimizer = AdamW(net.experts.parameters(), lr=0.05, eps=1e-30, **OPTIONS[options])
    if options == "in backward":
        update_in_backward(optimizer, 0)
    return optimizer


def step(net: Mixture, optimizer: Any, index: int, ranks: range) -> dict[str, torch.Tensor]:
    """Results of a step with these ranks' tokens, of which each is a copy of the model's loss."""
    x = torch.cat([batch(index, rank, SIZES[rank]) for rank in ranks]).requires_grad_()
    y = net(x)
    stepped(optimizer, y.square().sum())
    return {f"y {index}": y.detach(), f"x {index}": x.grad}


def held(net: Mixture, optimizer: Any) -> dict[str, torch.Tensor]:
    """All that training depends on, of all ranks."""
    tensors = {name: whole(value) for name, value in net.experts.state_dict().items()}
    for name, p in net.experts.named_parameters():
        tensors |= {f"{name} {key}": whole(value) for key, value in optimizer.state[p].items()}
    return tensors | octavo.nn.delayed_state_dict(net)


def compare(mesh: Any, kind: str, recipe: str, when: str, options: str) -> dict[str, float]:
    """Return what differs from one rank without expert parallelism, whose gradients are not averages.

    By powers of two: what a first moment has of them, a second has squared.
    """
    size, rank = mesh.size(), mesh.get_rank()
    net, lone = mixture_of(mesh, kind, recipe, when), mixture_of(None, kind, recipe)
    both = [(net, range(rank, rank + 1)), (lone, range(size))]
    optimizers = [optimizer_of(each, options) for each, _ in both]
    traces: list[dict[str, torch.Tensor]] = [{}, {}]
    for index in range(3):
        for tensors, (each, ranks), optimizer in zip(traces, both, optimizers, strict=True):
            tensors |= step(each, optimizer, index, ranks)
    for tensors, (each, _), optimizer in zip(traces, both, optimizers, strict=True):
        tensors |= held(each, optimizer)
    for name, value in traces[0].items():
        if ("exp_avg" in name or "momentum" in name) and not name.endswith("_codes"):
            value *= size**2 if "sq" in name and "scale" not in name else size
    tensors = parts(mesh)[rank]
    expected = {name: value[tensors] if name[:2] in ("x ", "y ") else value for name, value in traces[1].items()}
    return off_by_maximum(traces[0], expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["dynamic", "short history", "blockwise"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", OPTIONS)
def test_equal_to_one_rank(pool, kind, recipe, when, options):
    """Steps equal one rank's bit for bit, random bits too: they go by an element's place. One rank has no tokens."""
    assert pool.run(compare, (2,), kind, recipe, when, options) == [{}] * 2


def saved_and_loaded(mesh: Any, kind: str, recipe: str, folder: str) -> list[dict[str, float]]:
    """Return what differs after a step that follows a checkpoint: on ranks that load it anew, and on one rank alone."""
    rank, ranks = mesh.get_rank(), Ranks(mesh.get_group())
    ranks_here, every = range(rank, rank + 1), range(mesh.size())

    def pair(on: Any) -> tuple[Mixture, Any]:
        net = mixture_of(on, kind, recipe)
        return net, optimizer_of(net, "few bytes")

    net, optimizer = pair(mesh)
    for index in range(2):
        step(net, optimizer, index, ranks_here)
    checkpoint.save_checkpoint(folder, net, optimizer, ranks=ranks)
    again, other = pair(mesh)
    checkpoint.load_checkpoint(folder, again, other, ranks=ranks)
    lone, its = pair(None)
    checkpoint.load_checkpoint(folder, lone, its, ranks=Ranks())
    for p in lone.experts.parameters():  # which are averages on ranks
        p.register_hook(lambda grad: grad / mesh.size())
    states = []
    for each, by, of in ((net, optimizer, ranks_here), (again, other, ranks_here), (lone, its, every)):
        step(each, by, 2, of)
        states.append(held(each, by))
    return [off_by_maximum(one, states[0]) for one in states[1:]]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["octavo", pytest.param("stored transposed", marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", ["blockwise", pytest.param("short history", marks=pytest.mark.full)])
def test_checkpoints_for_any_number_of_ranks(pool, tmp_path, kind, recipe, ranks):
    assert pool.run(saved_and_loaded, (ranks,), kind, recipe, str(tmp_path / "checkpoint")) == [[{}, {}]] * ranks


def through_state_dicts(mesh: Any, kind: str) -> list[dict[str, float]]:
    """Return what differs from a model's weights where others load ranks' own, all, one rank's, or plain ones."""
    net, full = mixture_of(mesh, kind, "dynamic"), StateDictOptions(full_state_dict=True)
    step(net, optimizer_of(net, "few bytes"), 0, range(1))

    def values(net: Mixture) -> dict[str, torch.Tensor]:
        return {name: whole(value) for name, value in net.state_dict().items()}

    wanted = values(net)
    lone = mixture_of(None, kind, "dynamic")
    own_state, first, second, last = (mixture_of(mesh, kind, "dynamic") for _ in range(4))
    own_state.load_state_dict(net.state_dict())
    set_model_state_dict(first, get_model_state_dict(net, options=full), options=full)
    lone.load_state_dict(wanted)
    set_model_state_dict(second, lone.state_dict(), options=full)
    assert all(local_stored(p) is not None for p in own_state.experts.parameters() if p.ndim == 3)
    differing = [off_by_maximum(values(each), wanted) for each in (own_state, first, second)]
    plain = octavo.restore(net).state_dict()
    assert all(local_stored(p) is None for p in net.parameters())
    assert plain.keys() == dict(net.named_parameters()).keys()
    last.load_state_dict(plain)  # cast anew, as scales were of a bound
    return [*differing, off_by_maximum(values(octavo.restore(last)), values(net))]


@pytest.mark.parametrize("kind", ["octavo bias", "stored transposed"])
def test_state_dicts(pool, kind):
    assert pool.run(through_state_dicts, (2,), kind) == [[{}] * 4] * 2


def through_phases(mesh: Any, kind: str) -> dict[str, float]:
    """Return what differs from one rank where weights go into FP8 in training, and back."""
    size, rank = mesh.size(), mesh.get_rank()
    in_fp8 = Phase(recipes.dynamic(), weight_storage="fp8", from_step=1)
    phases = [Phase(recipes.dynamic()), in_fp8, Phase(recipes.dynamic(), weight_storage=None, from_step=3)]
    traces = []
    for on, ranks in ((mesh, range(rank, rank + 1)), (None, range(size))):
        net = built(kind, "dynamic", E)
        if on is not None:
            expert_parallel(net, on)
        optimizer = AdamW(net.experts.parameters(), lr=0.05, eps=1e-30, moments="bf16", master="fp32")
        schedule = PrecisionSchedule(net.experts, optimizer, phases)
        trace = {}
        for index in range(4):
            trace |= {name: value for name, value in step(net, optimizer, index, ranks).items() if on is not None}
            trace |= {f"{name} {index}": whole(value) for name, value in net.state_dict().items()}
            schedule.step()
        traces.append(trace)
    return off_by_maximum({name: traces[0][name] for name in traces[1]}, traces[1])


@pytest.mark.parametrize("kind", ["octavo", pytest.param("stored transposed", marks=pytest.mark.full)])
def test_a_schedule_stores_and_restores_them(pool, kind):
    assert pool.run(through_phases, (2,), kind) == [{}] * 2
