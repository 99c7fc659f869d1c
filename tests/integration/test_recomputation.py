"""Activation checkpointing changes nothing: gradients and delayed state are bit-equal, eager and compiled."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import recipes
from tests.support.fused_cases import SAVED
from tests.support.helpers import assert_equal, gradients, to_fp8

REENTRANT = {"none": None, "reentrant": True, "not reentrant": False}
EACH = recipes.delayed(), recipes.dynamic()


class Net(nn.Module):
    """Two blocks that may be recomputed; the layer before them makes their input need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24, bias=False)) for _ in range(2)
        )

    def forward(self, x: Tensor, kind: str) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if REENTRANT[kind] is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=REENTRANT[kind])
        return x


def fused(block: nn.Module, recipe: octavo.Recipe) -> Net:
    net = Net()
    net.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))
    return to_fp8(net, recipe)


def train(net: Net, kind: str, call=None, micro_batches: int = 2) -> dict[str, Tensor]:
    """Everything that three steps leave behind."""
    net = copy.deepcopy(net)
    call = call or (lambda model, x: model(x, kind))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    found = {}
    for step in range(3):
        for n in range(micro_batches):
            x = (step + 1) * torch.randn(8, 16, generator=generator)
            loss = call(net, x).square().mean()
            loss.backward()
            found[f"loss {step} {n}"] = loss.detach()
        found |= {f"grad {step} {name}": grad for name, grad in gradients(net).items()}
        found |= {f"state {step} {name}": b for name, b in octavo.nn.delayed_state_dict(net).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def saved_in_fp8() -> Net:
    recipe = dataclasses.replace(recipes.rowwise(), grad_input=None, saved=SAVED)
    return fused(octavo.nn.RMSNormMLP(24, 32, bias=False), recipe)


# Without recomputation, and with the kind that is not reentrant, tests/compile has every recipe and fused modules;
# in eager tests/support/seams.
@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (saved_in_fp8, "none"),
        *(pytest.param(lambda r=r: to_fp8(Net(), r), "reentrant", marks=pytest.mark.full) for r in EACH),
    ],
)
def test_compiled_in_one_graph(build, kind):
    torch.compiler.reset()
    net = build()
    net.blocks = net.blocks[:1]  # each is traced anew
    net.enter = nn.Linear(16, 24)
    compiled = torch.compile(lambda model, x: model(x, kind), backend="aot_eager", fullgraph=True)
    expected = train(net, "none", micro_batches=1)  # in a graph the weight is cast each time
    assert_equal(train(net, kind, compiled, micro_batches=1), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("frozen", ["nothing", "norm", "fc1", "fc2", "fc1.bias"])
def test_frozen_parts_inside_a_recomputed_region(frozen, way):
    net = fused(octavo.nn.LayerNormMLP(24, 32, "gelu"), dataclasses.replace(recipes.delayed(3), saved=SAVED))
    for block in net.blocks:
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    assert_equal(train(net, way), train(net, "none"))
