"""Experts on several ranks equal one rank's with the tokens of all, bit for bit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import recipes
from octavo.distributed import expert_parallel
from octavo.nn.experts import feed_forward
from octavo.weights.gathered import check_layers_agree
from tests.support.byte_counter import GATHER, OTHER, REDUCE, SCATTER, ByteCounter
from tests.support.combinations import in_full
from tests.support.expert_models import RECIPES, GroupedExperts, Mixture, batch, built, whole
from tests.support.helpers import every_layer

SIZES = [24, 0, 7, 13]  # tokens of each rank


@functools.cache
def alone() -> Any:
    """Return a mesh of this rank, made without the others: not all of the pool's may run the task."""
    return dist.DeviceMesh.from_group(dist.new_group([dist.get_rank()], use_local_synchronization=True), "cpu")


def parts(mesh: Any) -> list[slice]:
    """Return the places of each rank's tokens among all."""
    ends = torch.tensor([0, *SIZES[: mesh.size()]]).cumsum(0).tolist()
    return [slice(*both) for both in itertools.pairwise(ends)]


def steps(net: Mixture, ranks: range, on: int = 1, how: str = "eager", count: int = 3) -> dict[str, Tensor]:
    """Results and gradients of steps with these ranks' tokens; gradients are averages over ``on`` ranks."""
    tensors: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(net.experts.parameters(), lr=0.1 * on)
    for step in range(count):
        x = torch.cat([batch(step, rank, SIZES[rank]) for rank in ranks]).requires_grad_()
        if how == "eager":
            y = net(x)
        elif how == "compiled":
            y = torch.compile(net, backend="aot_eager")(x)
        else:
            y = checkpoint(net, x, use_reentrant=how == "reentrant")
        y.square().sum().backward()
        tensors |= {f"y {step}": y.detach(), f"x {step}": whole(x.grad)}
        tensors |= {f"{name} {step}": whole(p.grad) * on for name, p in net.experts.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        net.router.weight.grad = None
    tensors |= {name: whole(p) for name, p in net.experts.named_parameters()}
    return tensors | octavo.nn.delayed_state_dict(net)


def compare(
    mesh: Any, kind: str, recipe: str, how: str = "eager", exact: bool = False, average: bool = True
) -> tuple[dict[str, float], ...]:
    """Return what differs from one rank without expert parallelism; and from one rank that exchanges with itself."""
    size, rank = mesh.size(), mesh.get_rank()
    net, lone, plain = (built(kind, recipe, 8) for _ in range(3))
    expert_parallel(net, mesh, exact, average)
    expert_parallel(lone, alone(), exact)
    actual, of_rank_only = steps(net, range(rank, rank + 1), size if average else 1, how), parts(mesh)[rank]
    differences = []
    for other in (plain, lone):
        expected = steps(other, range(size))
        of_rank = {name: value[of_rank_only] if name[:2] in ("x ", "y ") else value for name, value in expected.items()}
        differences.append(off_by_norm(actual, of_rank))
    return tuple(differences)


def off_by_norm(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The tensors that differ, each with the norm of the difference by the norm of the value."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return {
        name: float((actual[name] - value).norm() / value.norm().clamp(min=1e-30))
        for name, value in expected.items()
        if not torch.equal(actual[name], value)
    }


KINDS = ["octavo", "octavo bias", "stored", "stored transposed"]
ALL = ["dynamic", "short history", "blockwise", "rowwise", "mx"]
ALL += [pytest.param(name, marks=pytest.mark.full) for name in ("gw_hp", "high_precision")]


def check(recipe, answers):
    """Check that weights alone differ from one rank's: grad_weight casts rows that were rounded once before."""
    for differences, from_itself in answers:
        assert not from_itself
        first = {name: by for name, by in differences.items() if name.endswith(" 0")}
        assert {name.partition(" ")[0].rpartition(".")[2] for name in first} <= {"weight", "gate_up_proj", "down_proj"}
        off_by = {"rowwise": 0.05, "blockwise": 1e-6, "mx": 1e-6}.get(recipe, 0)  # the first is a cast's error
        assert max(first.values(), default=0) <= off_by
        assert recipe == "rowwise" or max(differences.values(), default=0) <= off_by


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ALL)
def test_equal_to_one_rank(pool, kind, recipe):
    """The second rank has no tokens."""
    check(recipe, pool.run(compare, (2,), kind, recipe))


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("blockwise", marks=pytest.mark.full)])
def test_exact(pool, recipe):
    assert pool.run(compare, (2,), "octavo", recipe, "eager", True) == [({}, {})] * 2


def test_gradients_of_a_loss_that_ranks_share_are_summed(pool):
    assert pool.run(compare, (2,), "octavo bias", "dynamic", "eager", False, False) == [({}, {})] * 2


@pytest.mark.parametrize("recipe", ["short history", *in_full(("dynamic",), ("mx",))])
@pytest.mark.parametrize("how", ["not reentrant", *in_full(("reentrant",), ("compiled",))])
def test_checkpointed_and_compiled(pool, recipe, how):
    check(recipe, pool.run(compare, (2,), "octavo", recipe, how))


def counted(mesh, recipe):
    """Calls and bytes of a forward's and a backward's collectives, in bf16; and the rows that this rank gets."""
    torch.manual_seed(0)
    experts = octavo.nn.Experts(8, 256, 128, dtype=torch.bfloat16, recipe=RECIPES[recipe]())
    expert_parallel(experts, mesh)
    check_layers_agree([experts.gate_up, experts.down], mesh)  # once, whether ranks were told the same of them
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    weights, index = torch.randn(64, 8).softmax(-1).topk(2)
    counts = []
    with ByteCounter() as counter:
        y = experts(x, index, weights.bfloat16())
        counts.append((dict(counter.calls), dict(counter.bytes)))
    with ByteCounter() as counter:
        y.sum().backward()
    return *counts, (dict(counter.calls), dict(counter.bytes))


@pytest.mark.parametrize("recipe", ["dynamic", "blockwise", *in_full(("short history",), ("rowwise",), ("mx",))])
def test_bytes(pool, recipe):
    """Rows that are dispatched and combined take the recipe's share of bf16's bytes."""
    per_tensor = recipe in ("dynamic", "short history")
    for plain, counts in zip(pool.run(counted, (2,), "high_precision"), pool.run(counted, (2,), recipe), strict=True):
        for (_, plain_bytes), (calls, bytes) in zip(plain, counts, strict=True):
            assert calls[OTHER] == 2 and 0.5 <= bytes[OTHER] / (plain_bytes[OTHER] / 2) - 1 <= 0.53  # of one way
        (forward, of_forward), (backward, of_backward) = counts
        assert forward[GATHER] == 1 and of_forward[GATHER] == 2 * 4 * (8 + 1 + (8 if per_tensor else 0))
        assert REDUCE not in forward and GATHER not in backward and SCATTER not in backward
        assert backward.get(REDUCE, 0) == {"dynamic": 1, "short history": 3}.get(recipe, 0)
        assert of_backward.get(REDUCE, 0) == {"dynamic": 8 * 4, "short history": 8 * 4 + 2 * 12}.get(recipe, 0)


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


def test_no_gradients_and_evaluation(mesh):
    net, plain = (built("octavo", "short history", 4) for _ in range(2))
    assert expert_parallel(net, mesh) is net
    for each in (net, plain):
        each(batch(0, 0)).sum().backward()
        each.eval()
    with torch.no_grad():
        assert torch.equal(net(batch(1, 0)), plain(batch(1, 0)))
    for part in (net.experts.gate_up, net.experts.down):
        part.requires_grad_(False)
    net(batch(1, 0)).sum().backward()
    assert type(net.experts.gate_up.weight) is DTensor and "experts=4" in repr(net)


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_made_on_meta_they_train_as_those_made_on_the_device(mesh, how):
    with torch.device("meta"):
        net = built("stored", "short history", 4)
    plain = built("stored", "short history", 4)
    if how == "moved":
        net.to_empty(device="cpu")
        with torch.no_grad():
            torch._foreach_copy_([*net.parameters()], [*plain.parameters()])
    for name, parameter in plain.named_parameters() if how == "replaced" else ():
        owner, _, key = name.rpartition(".")
        setattr(net.get_submodule(owner), key, nn.Parameter(parameter.detach().clone()))
    expert_parallel(net, mesh)
    assert not off_by_norm(steps(net, range(1)), steps(plain, range(1)))


def test_recipes_change_and_restored_experts_stay_where_they_are(mesh):
    net = expert_parallel(built("stored", "dynamic", 4), mesh)
    in_mx, high = (built("stored", recipe, 4)(batch(0, 0)) for recipe in ("mx", "high_precision"))
    assert torch.equal(octavo.set_recipe(net, recipes.mx())(batch(0, 0)), in_mx)
    assert torch.equal(octavo.restore(net)(batch(0, 0)), high)


def test_shared_parameters_stay_shared_and_what_they_were_cast_from_stays_known(mesh):
    nets = nn.ModuleList(built("octavo", "dynamic", 4, storage="fp8") for _ in range(2))
    first, second = (net.experts.down for net in nets)
    second.weight = first.weight
    expert_parallel(nets, mesh)
    assert second.weight is first.weight
    nets[1](nets[0](batch(0, 0))).sum().backward()
    assert first.weight.to_local().extra_bits is not None


def test_what_is_refused(mesh):
    net = built("octavo", "dynamic", 4)
    with pytest.raises(TypeError, match="a DeviceMesh, not Mixture and int"):
        expert_parallel(net, 2)
    with pytest.raises(ValueError, match=r"holds no octavo\.nn\.Experts"):
        expert_parallel(nn.Linear(2, 2), mesh)
    two = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "ep"))
    with pytest.raises(ValueError, match=r"has 2 dimensions: give the one of experts, such as mesh\['ep'\]"):
        expert_parallel(net, two)
    titan = octavo.convert(nn.ModuleDict({"experts": GroupedExperts()}), recipes.dynamic(), every_layer)
    with pytest.raises(ValueError, match="experts: torchtitan exchanges the rows of its experts itself"):
        expert_parallel(titan, mesh)
    with pytest.raises(ValueError, match="experts: its experts are on several ranks already"):
        expert_parallel(expert_parallel(net, mesh), mesh)
    with pytest.raises(ValueError, match="experts: its weight is a DTensor: call expert_parallel before"):
        expert_parallel(fully_shard(built("octavo", "dynamic", 4), mesh=mesh), mesh)
    both = expert_parallel(built("octavo", "dynamic", 4), two["ep"])
    fully_shard(both.experts, mesh=two["fsdp"])
    with pytest.raises(ValueError, match="are stored in FP8, or not so, before fully_shard shards them"):
        octavo.convert(both, recipes.dynamic(), lambda module, name: name != "router", "fp8")
    net = built("stored", "dynamic", 4)
    net.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="transformers' own expert parallelism is on"):
        expert_parallel(net, mesh)


def test_a_mesh_that_does_not_fit(pool):
    says = ["3 experts on 2 ranks", "rank 1 has 48 rows, of which 47 are of the 8 experts"]
    assert pool.run(refusals, (2,)) == [says] * 2


def refusals(mesh):
    """Return the errors about experts that can't be divided, and about rows without an expert, unseen on a GPU."""
    said = []
    with pytest.raises(ValueError) as error:
        expert_parallel(built("octavo", "dynamic", 3), mesh)
    said.append(str(error.value).partition(": ")[2].partition(":")[0])
    net = expert_parallel(built("octavo", "dynamic", 8), mesh)
    offsets = torch.tensor([6, 12, 18, 24, 30, 36, 42, 48 - mesh.get_rank()], dtype=torch.int32)
    with pytest.raises(ValueError) as error:
        feed_forward(torch.randn(48, 32), offsets, net.experts.gate_up, net.experts.down, "swiglu", lambda h: h)
    return [*said, str(error.value)]
