import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import recipes
from octavo.nn import gather_group
from tests.support.fsdp_situations import EVEN, batch, built, compare, sharded_blocks
from tests.support.helpers import to_fp8


def test_copies_find_their_scales_in_a_group_of_their_own():
    model = to_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), recipes.dynamic())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        groups = {id(m.gather.group) for m in copied}
        assert len(groups) == 1 and groups != {id(model[0].gather.group)}


WRITES = {  # of which torch moves a version of the DTensor, of its part, or none
    "mul_": lambda p: p.mul_(-3),
    "foreach": lambda p: torch._foreach_mul_([p], -3.0),
    "data": lambda p: p.data.mul_(-3),
    "local data": lambda p: p.to_local().data.mul_(-3),
    "inference mode": lambda p: torch.inference_mode()(p.mul_)(-3),
}


def written(mesh, name, accumulating):
    net = sharded_blocks(built(EVEN, "dynamic"), mesh)
    x, layer = batch(EVEN, 0, 0, 0), net.blocks[0].fc1
    net(x).sum().backward()
    if not accumulating:
        net.zero_grad()
    before = layer.gather.codes.clone(), layer.gather.scale_inv.clone()
    with torch.no_grad():
        WRITES[name](layer.weight)
    net(x).sum().backward()
    return torch.equal(layer.gather.codes, before[0] ^ 0x80), float(layer.gather.scale_inv / before[1])


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("accumulating", [False, True])
def test_every_write_is_seen(pool, name, accumulating):
    for negated, ratio in pool.run(written, (2,), name, accumulating):
        assert negated and ratio == pytest.approx(3, rel=1e-6)


def two_in_flight(mesh):
    """The error of an input's gradient, of a forward whose weight was cast by another scale since."""
    torch.manual_seed(0)
    layer = octavo.convert(nn.Sequential(nn.Linear(256, 64)), recipes.delayed(), select=lambda module, name: True)
    fully_shard(layer, mesh=mesh)
    layer(torch.randn(8, 256)).sum().backward()
    layer.zero_grad()
    layer[0].delayed_scale[1] /= 4  # codes are smaller than the weight's own amax would make them
    x = torch.randn(8, 256, requires_grad=True)
    first = layer(x)
    layer[0].reset_delayed_state()
    layer(x)
    (grad,) = torch.autograd.grad(first.sum(), x)
    wanted = torch.ones(8, 64) @ layer[0].weight.full_tensor()
    return float((grad - wanted).norm() / wanted.norm())


def test_backward_reads_a_scale_with_its_codes(pool):
    assert max(pool.run(two_in_flight, (2,))) < 0.1


def one_rank_alone(mesh):
    """An optimizer that steps on one rank only neither hangs the ranks nor parts their scales."""
    net = sharded_blocks(built(EVEN, "delayed"), mesh)
    for index in range(3):
        net(batch(EVEN, index, 0, 0)).sum().backward()
        if dist.get_rank() == 0:
            probe = nn.Parameter(torch.ones(1))
            probe.grad = torch.ones(1)
            torch.optim.SGD([probe], lr=0.1).step()
    return [float(block.fc1.gather.scale_inv) for block in net.blocks]


def test_an_optimizer_on_one_rank(pool):
    one, other = pool.run(one_rank_alone, (2,))
    assert one == other


# --- what could go wrong must show as a difference --------------------------------------------------------------------


def with_fault(mesh, fault, recipe):
    refresh = gather_group.GatherGroup.refresh
    groups_of = gather_group.groups_of
    try:
        if fault == "weights are cast once and for all":
            gather_group.GatherGroup.refresh = lambda *a: a[1].codes is None and refresh(*a)
        elif fault == "each rank has its own scale":
            gather_group.groups_of = lambda parameter: ()
        return compare(mesh, recipe, "uneven shards", True)[0]
    finally:
        gather_group.GatherGroup.refresh, gather_group.groups_of = refresh, groups_of


@pytest.mark.parametrize("recipe", ["dynamic", "delayed"])
@pytest.mark.parametrize("fault", ["weights are cast once and for all", "each rank has its own scale"])
def test_a_fault_is_seen(pool, fault, recipe):
    assert max(pool.run(with_fault, (2,), fault, recipe)) > 0  # without it 0: tests/distributed/test_fsdp.py
