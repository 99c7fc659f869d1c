"""The gather inside the compiled forward: one graph holds the cast, the uint8 all-gather and the product."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import octavo
from octavo import recipes
from octavo.distributed.sharded_linear import ShardedLinear
from tests.support.fsdp_situations import RECIPES, off

K, N, T = 48, 49, 16  # N does not divide by the ranks


def linear(recipe):
    torch.manual_seed(0)
    return octavo.nn.Linear(K, N, recipe=RECIPES[recipe]())


def x(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, T // 2, K, generator=generator)


def trained(mesh, recipe, backend):
    """The largest difference from a replicated layer over three steps, and the all-gathers of the graphs."""
    torch.compiler.reset()
    plain, sharded = linear(recipe), ShardedLinear(linear(recipe), mesh)
    held = []

    def capture(graph, inputs):
        held.extend(
            (str(n.target), [a.meta["val"].dtype for a in n.args[:1]]) for n in graph.graph.nodes if is_gather(n)
        )
        return graph.forward

    call = sharded
    if backend == "capture":
        from torch._dynamo.backends.common import aot_autograd

        call = torch.compile(sharded, backend=aot_autograd(fw_compiler=capture, bw_compiler=capture), fullgraph=True)
    elif backend:
        call = torch.compile(sharded, backend=backend, fullgraph=True)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (plain, sharded)]
    for step in range(3):
        inputs = [x(step).requires_grad_() for _ in range(2)]
        for module, value in zip((plain, call), inputs, strict=True):
            module(value).square().mean().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for p in plain.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group())
            p.grad /= mesh.size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    rows = -(-N // mesh.size())
    mine = plain.weight.detach()[mesh.get_local_rank() * rows :][:rows]
    differences = [off(sharded.weight.detach()[: len(mine)], mine), off(sharded.bias.detach(), plain.bias.detach())]
    pairs = zip(octavo.delayed_state_dict(sharded).values(), octavo.delayed_state_dict(plain).values(), strict=True)
    differences += [off(a, b) for a, b in pairs]
    assert sharded.weight[len(mine) :].abs().sum() == 0
    return max(differences), held


def is_gather(node):
    return "all_gather" in str(node.target)


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", [None, "capture", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", ["dynamic", "delayed"])
def test_equal_to_the_replicated_layer(pool, recipe, backend):
    for difference, held in pool.run(trained, (2,), recipe, backend):
        assert difference == 0 if backend != "inductor" else difference < 2.0**-20
        if backend == "capture":
            assert len(held) == 2  # in forward and in backward
            assert all(dtypes == [torch.uint8] for _, dtypes in held)


@pytest.mark.full
def test_four_ranks(pool):
    for difference, _ in pool.run(trained, (4,), "delayed", None):
        assert difference < 2.0**-20


def refused(mesh):
    messages = []
    for make in (
        lambda: ShardedLinear(nn.Linear(8, 8), mesh),
        lambda: ShardedLinear(octavo.nn.Linear(8, 8, recipe=recipes.rowwise()), mesh),
        lambda: octavo.set_recipe(ShardedLinear(linear("dynamic"), mesh), recipes.mx()),
        lambda: octavo.restore(ShardedLinear(linear("dynamic"), mesh)),
        lambda: ShardedLinear(linear("dynamic"), mesh)(torch.ones(2, K + 1)),
        lambda: ShardedLinear(linear("dynamic"), mesh).reset_parameters(),
    ):
        try:
            make()
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages, repr(ShardedLinear(linear("dynamic"), mesh))


def test_what_is_refused(pool):
    messages, shown = pool.run(refused, (2,))[0]
    expected = [
        "is no octavo.nn.Linear",
        "needs one scale",
        "needs one scale",
        "can't be restored",
        "in_features",
        "made from",
    ]
    assert len(messages) == 6 and all(part in message for part, message in zip(expected, messages, strict=True))
    assert shown == "ShardedLinear(in_features=48, out_features=49, ranks=2, bias=True, recipe=dynamic)"
