"""Experts on several ranks compute, bit for bit, what one rank computes with the tokens of all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo import recipes
from octavo.distributed import checkpoint, expert_parallel
from octavo.distributed.ranks import Ranks
from octavo.nn.agreement import ask
from octavo.nn.experts import feed_forward
from tests.support.byte_counter import GATHER, OTHER, REDUCE, SCATTER, ByteCounter
from tests.support.expert_models import RECIPES, batch, built, train, whole
from tests.support.parallel_experts import compare, off

KINDS = ["octavo", "octavo bias", "stored", "stored transposed"]
ALL = ["dynamic", "short history", "blockwise", "rowwise", "mx", "gw_hp", "high_precision"]


def check(recipe, answers):
    """Rows that grad_weight reads in another scaling were rounded before: to powers of two what underflows there."""
    for differences, from_itself in answers:
        assert not from_itself
        first = {name: by for name, by in differences.items() if name.endswith(" 0")}
        assert {name.partition(" ")[0].rpartition(".")[2] for name in first} <= {"weight", "gate_up_proj", "down_proj"}
        off_by = {"rowwise": 0.05, "blockwise": 1e-6, "mx": 1e-6}.get(recipe, 0)  # the first is what a cast is off by
        assert max(first.values(), default=0) <= off_by
        assert recipe == "rowwise" or max(differences.values(), default=0) <= off_by


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ALL)
def test_equal_to_one_rank(pool, kind, recipe):
    """The second rank has no tokens."""
    check(recipe, pool.run(compare, (2,), kind, recipe))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ALL)
def test_four_ranks(pool, kind, recipe):
    check(recipe, pool.run(compare, (4,), kind, recipe))


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("blockwise", marks=pytest.mark.full)])
def test_exact(pool, recipe):
    assert pool.run(compare, (2,), "octavo", recipe, "eager", None, True) == [({}, {})] * 2


def test_gradients_of_a_loss_that_ranks_share_are_summed(pool):
    assert pool.run(compare, (2,), "octavo bias", "dynamic", "eager", None, False, False) == [({}, {})] * 2


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["dynamic", "short history", "mx"])
def test_experts_and_ranks_without_rows(pool, recipe):
    """Two of eight experts have all tokens: three of four ranks compute nothing."""
    check(recipe, pool.run(compare, (4,), "octavo", recipe, "eager", 2))


@pytest.mark.parametrize(
    "recipe", ["short history", *[pytest.param(name, marks=pytest.mark.full) for name in ("dynamic", "mx")]]
)
@pytest.mark.parametrize(
    "how", ["not reentrant", *[pytest.param(how, marks=pytest.mark.full) for how in ("reentrant", "compiled")]]
)
def test_checkpointed_and_compiled(pool, recipe, how):
    check(recipe, pool.run(compare, (2,), "octavo", recipe, how))


def counted(mesh, recipe):
    """Calls and bytes of a forward's and a backward's collectives, in bf16; and the rows that this rank gets."""
    torch.manual_seed(0)
    experts = octavo.nn.Experts(8, 256, 128, dtype=torch.bfloat16, recipe=RECIPES[recipe]())
    expert_parallel(experts, mesh)
    ask([experts.gate_up, experts.down], mesh)  # once, whether ranks were told the same of them
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    weights, index = torch.randn(64, 8).softmax(-1).topk(2)
    found = []
    with ByteCounter() as counter:
        y = experts(x, index, weights.bfloat16())
        found.append((dict(counter.calls), dict(counter.bytes)))
    with ByteCounter() as counter:
        y.sum().backward()
    return *found, (dict(counter.calls), dict(counter.bytes))


@pytest.mark.parametrize(
    "recipe",
    [
        "dynamic",
        "blockwise",
        *[pytest.param(name, marks=pytest.mark.full) for name in ("short history", "rowwise", "mx")],
    ],
)
def test_bytes(pool, recipe):
    """Of rows' bytes: those of bf16 dispatched and combined are as many."""
    per_tensor = recipe in ("dynamic", "short history")
    for plain, found in zip(pool.run(counted, (2,), "high_precision"), pool.run(counted, (2,), recipe), strict=True):
        for (_, plain_bytes), (calls, bytes) in zip(plain, found, strict=True):
            one_way = plain_bytes[OTHER] / 2
            assert calls[OTHER] == 2 and 0.5 <= bytes[OTHER] / one_way - 1 <= 0.53
        (forward, of_forward), (backward, of_backward) = found
        assert forward[GATHER] == 1 and of_forward[GATHER] == 2 * 4 * (8 + 1 + (8 if per_tensor else 0))
        assert REDUCE not in forward and GATHER not in backward and SCATTER not in backward
        assert backward.get(REDUCE, 0) == {"dynamic": 1, "short history": 3}.get(recipe, 0)
        assert of_backward.get(REDUCE, 0) == {"dynamic": 8 * 4, "short history": 8 * 4 + 2 * 12}.get(recipe, 0)


def under_fsdp2(mesh, recipe):
    """What differs between experts that are sharded over the other dimension too, and gradients averaged over it."""
    expert, data, rank = mesh["shard"], mesh["replicate"], dist.get_rank()
    found = []
    for sharded in (True, False):
        net = built("octavo", recipe, 8)
        expert_parallel(net, expert)
        if sharded:
            fully_shard(net.experts, mesh=data)

        def average(net=net, sharded=sharded):
            dist.all_reduce(net.router.weight.grad)
            for p in () if sharded else net.experts.parameters():
                dist.all_reduce(p.grad._local_tensor, group=data.get_group())
                p.grad._local_tensor.div_(2)

        # an optimizer of torch takes parameters of one mesh at a time
        found.append(train(net, lambda net, step: net(batch(step, rank)).square().mean(), average, foreach=False))
    return off(*found), [p.placements for p in net.experts.parameters()]


@pytest.mark.full
@pytest.mark.parametrize("recipe", ALL)
def test_under_fsdp2_over_another_dimension(pool, recipe):
    for differences, _ in pool.run(under_fsdp2, (2, 2), recipe):
        assert not differences


def saved_and_loaded(mesh, recipe, folder):
    """A step of octavo's AdamW after a checkpoint: on the ranks that wrote it, anew, and on one rank alone."""

    def made(parallel):
        net = built("octavo", recipe, 8)
        if parallel:
            expert_parallel(net, mesh)
        return net, octavo.optim.AdamW(net.parameters(), lr=1e-2)

    def step(net, optimizer, index, ranks):
        x = torch.cat([batch(index, rank) for rank in ranks])
        net(x).square().sum().backward()
        if len(ranks) == 1:
            dist.all_reduce(net.router.weight.grad, group=mesh.get_group())
        for p in net.parameters() if len(ranks) > 1 else net.router.parameters():
            p.grad /= mesh.size()
        optimizer.step()
        optimizer.zero_grad()

    here, every = [mesh.get_rank()], range(mesh.size())
    net, optimizer = made(True)
    for index in range(2):
        step(net, optimizer, index, here)
    ranks = Ranks(mesh.get_group())
    checkpoint.save_checkpoint(folder, net, optimizer, ranks=ranks)
    again, other = made(True)
    checkpoint.load_checkpoint(folder, again, other, ranks=ranks)
    lone, its = made(False)
    checkpoint.load_checkpoint(folder, lone, its, ranks=Ranks())
    step(net, optimizer, 2, here)
    step(again, other, 2, here)
    step(lone, its, 2, every)
    found = [{name: whole(p) for name, p in each.named_parameters()} for each in (net, again, lone)]
    return off(found[1], found[0]), off(found[2], found[0])


@pytest.mark.parametrize("recipe", ["dynamic", pytest.param("short history", marks=pytest.mark.full)])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_checkpoints_of_octavos_optimizer_for_any_number_of_ranks(pool, tmp_path, recipe, ranks):
    for again, alone in pool.run(saved_and_loaded, (ranks,), recipe, str(tmp_path / "checkpoint")):
        assert not again
        assert max(alone.values(), default=0) < 1e-6  # the router's gradients are added in another order


@pytest.fixture(scope="module")
def mesh():
    """Of this process alone."""
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


def test_recipes_change_and_restored_experts_stay_where_they_are(mesh):
    net = expert_parallel(built("stored", "dynamic", 4), mesh)
    expected = built("stored", "mx", 4)(batch(0, 0))
    assert torch.equal(octavo.set_recipe(net, recipes.mx())(batch(0, 0)), expected)
    high = built("stored", "high_precision", 4)(batch(0, 0))
    assert torch.equal(octavo.restore(net)(batch(0, 0)), high)


def test_shared_parameters_stay_shared_and_what_they_were_cast_from_stays_known(mesh):
    nets = nn.ModuleList(built("octavo", "dynamic", 4, storage="fp8") for _ in range(2))
    first, second = (net.experts.down for net in nets)
    second.weight = first.weight
    expert_parallel(nets, mesh)
    assert second.weight is first.weight
    nets[1](nets[0](batch(0, 0))).sum().backward()
    assert first.weight.to_local().rest is not None


def test_what_is_refused(mesh):
    net = built("octavo", "dynamic", 4)
    with pytest.raises(TypeError, match="a DeviceMesh, not Mixture and int"):
        expert_parallel(net, 2)
    with pytest.raises(ValueError, match=r"holds no octavo\.nn\.Experts"):
        expert_parallel(nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="experts: its experts are on several ranks already"):
        expert_parallel(expert_parallel(net, mesh), mesh)
    with pytest.raises(ValueError, match="experts: its weight is a DTensor: call expert_parallel before"):
        expert_parallel(fully_shard(built("octavo", "dynamic", 4), mesh=mesh), mesh)
    net = built("stored", "dynamic", 4)
    net.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="transformers' own expert parallelism is on"):
        expert_parallel(net, mesh)


def test_a_mesh_that_does_not_fit(pool):
    assert (
        pool.run(refusals, (2,))
        == [["3 experts on 2 ranks", "rank 1 has 48 rows, of which 47 are of the 8 experts"]] * 2
    )


def refusals(mesh):
    """What is said of experts that can't be divided, and of rows without an expert, which a GPU does not look for."""
    said = []
    with pytest.raises(ValueError) as error:
        expert_parallel(built("octavo", "dynamic", 3), mesh)
    said.append(str(error.value).partition(": ")[2].partition(":")[0])
    net = expert_parallel(built("octavo", "dynamic", 8), mesh)
    rows, offsets = (
        torch.randn(48, 32),
        torch.tensor([6, 12, 18, 24, 30, 36, 42, 48 - mesh.get_rank()], dtype=torch.int32),
    )
    with pytest.raises(ValueError) as error:
        feed_forward(rows, offsets, net.experts.gate_up, net.experts.down, "swiglu", lambda h: h)
    return [*said, str(error.value)]
