"""torch.compile of sharded models: as many graphs as of the plain model, equal to eager bit for bit."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import octavo
from tests.distributed.test_fsdp import SITUATIONS, batch, built
from tests.support.helpers import stepped

EVEN = SITUATIONS["even shards"]
STEPS = 3


def in_blocks(net, mesh, backend):
    """Hooks run around a graph for each block."""
    for block in net.blocks:
        if backend:
            block.compile(backend=backend, fullgraph=True)
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def in_one_graph(net, mesh, backend):
    """Hooks run around the root's only graph."""
    fully_shard(net, mesh=mesh)
    if backend:
        net.forward = torch.compile(net.forward, backend=backend, fullgraph=True)
    return net


def around_nested_hooks(net, mesh, backend):
    """Torch breaks graphs where hooks of blocks run."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return torch.compile(net, backend=backend) if backend else net


HOW = {how.__name__: how for how in (in_blocks, in_one_graph, around_nested_hooks)}
OTHERS = "dynamic", "rowwise", "blockwise", "mx"


def trained(mesh, recipe, how, backend, depth=1):
    """Return (losses, graphs after each step, breaks) of a sharded model's training."""
    torch.compiler.reset()
    counters.clear()
    net = built(replace(EVEN, depth=depth), recipe)
    call = HOW[how](net, mesh, backend)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, graphs = [], []
    for step in range(STEPS):
        losses.append(stepped(optimizer, call(batch(EVEN, step, 0, dist.get_rank())).square().mean()))
        graphs.append(counters["stats"]["unique_graphs"])
    state = [value.tolist() for value in octavo.nn.delayed_state_dict(net).values()]
    return losses, state, graphs, sum(counters["graph_break"].values())


def beside_eager(mesh, recipe, how, backend, depth=1):
    return [trained(mesh, recipe, how, backend, depth) for backend in (None, backend)]


@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
@pytest.mark.parametrize("how", [n if n == "in_blocks" else pytest.param(n, marks=pytest.mark.full) for n in HOW])
def test_graphs_and_bits(pool, how, recipe):
    plain = pool.run(trained, (2,), "high_precision", how, "aot_eager")
    for in_bf16, (eager, compiled) in zip(plain, pool.run(beside_eager, (2,), recipe, how, "aot_eager"), strict=True):
        assert compiled[:2] == eager[:2]
        graphs, breaks = compiled[2:]
        assert graphs[-1] == graphs[1]
        assert (graphs[-1], breaks) == (in_bf16[2][-1], in_bf16[3])
