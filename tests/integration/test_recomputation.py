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
from tests.support.helpers import FP8_RECIPES, assert_equal, gradients, to_fp8

REENTRANT = {"none": None, "reentrant": True, "not reentrant": False}


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


class Sequences(octavo.nn.TransformerBlock):
    """A block of [2, 4, W] from and to [8, W]; Net adds its input once more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(0, (2, 4))).flatten(0, 1)


FUSED = {
    "LayerNormMLP": lambda recipe: octavo.nn.LayerNormMLP(24, 32, "gelu", zero_centered_gamma=True, recipe=recipe),
    "RMSNormMLP": lambda recipe: octavo.nn.RMSNormMLP(24, 32, bias=False, recipe=recipe),
    "TransformerBlock": lambda recipe: Sequences(24, 32, heads=2, kv_heads=1, recipe=recipe),
}


def fused(kind: str, recipe: octavo.Recipe) -> Net:
    net = Net()
    net.blocks = nn.ModuleList(FUSED[kind](recipe) for _ in range(2))
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


# Without recomputation, and with the kind that is not reentrant, tests/compile has every recipe.
@pytest.mark.parametrize("name", ["delayed", pytest.param("dynamic", marks=pytest.mark.full)])
def test_compiled_in_one_graph(name):
    check_compiled(to_fp8(Net(), FP8_RECIPES[name]()), "reentrant")


def check_compiled(net: Net, kind: str) -> None:
    torch.compiler.reset()
    net.blocks = net.blocks[:1]  # each is traced anew
    compiled = torch.compile(lambda model, x: model(x, kind), backend="aot_eager", fullgraph=True)
    expected = train(net, "none", micro_batches=1)  # in a graph the weight is cast each time
    assert_equal(train(net, kind, compiled, micro_batches=1), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("name", [*FP8_RECIPES, "saved"])
def test_fused_modules(name, kind, way):
    recipe = dataclasses.replace(recipes.delayed(3), saved=SAVED) if name == "saved" else FP8_RECIPES[name]()
    net = fused(kind, recipe)
    assert_equal(train(net, way), train(net, "none"))


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("frozen", ["norm", "fc1", "fc2", "fc1.bias"])
def test_frozen_parts_inside_a_recomputed_region(frozen, way):
    net = fused("LayerNormMLP", recipes.delayed(3))
    for block in net.blocks:
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    assert_equal(train(net, way), train(net, "none"))


@pytest.mark.full
@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_modules_compiled_in_one_graph(kind, way):
    check_compiled(fused(kind, recipes.delayed()), way)


def test_what_is_saved_in_fp8_compiled_in_one_graph():
    check_compiled(fused("RMSNormMLP", dataclasses.replace(recipes.rowwise(), grad_input=None, saved=SAVED)), "none")
