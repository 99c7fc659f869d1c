"""Models and steps that torch.compile must take in one graph, each beside the same in eager.

A cell is a step, its model built twice from the same seed: one is trained in eager, one compiled, with the same data.
Counted is what the compiler did; compared is all that training leaves: losses, weights, and delayed state.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import utils
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import recipes
from octavo.train.config import ModelConfig
from octavo.train.model import GPT

WIDTH, POSITIONS, VOCABULARY = 32, 16, 250  # the last is no multiple of 16
RECIPES: dict[str, Callable[[], octavo.Recipe | octavo.RecipeMap]] = {
    "dynamic": recipes.dynamic,
    "delayed": lambda: recipes.delayed(history_length=4),
    "rowwise": recipes.rowwise,
    "blockwise": recipes.blockwise,
    "mx": recipes.mx,
    "high_precision": recipes.high_precision,
    "recipe map": lambda: octavo.RecipeMap(
        recipes.delayed(), {"*fc2": recipes.rowwise(), "*out": {"grad_weight": None}, "*head": None}
    ),
}
Step = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, input, target) -> loss


class FusedModules(nn.Module):
    """One module of each kind, with an output that depends on all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_linear = octavo.nn.LayerNormLinear(WIDTH, {"a": 16, "b": 24})
        self.rms_norm_linear = octavo.nn.RMSNormLinear(WIDTH, 40, return_norm_output=True)
        self.layer_norm_mlp = octavo.nn.LayerNormMLP(WIDTH, 48, "gelu")
        self.rms_norm_mlp = octavo.nn.RMSNormMLP(WIDTH, 48, "swiglu", bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.rms_norm_mlp(self.layer_norm_mlp(x))
        return *self.layer_norm_linear(x), *self.rms_norm_linear(y), y


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(octavo.nn.TransformerBlock(WIDTH, 48, 2) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def transformer(layers: int) -> nn.Module:
    """Return the demo's model, with its output projection to a vocabulary that 16 does not divide."""
    model = GPT(ModelConfig(width=WIDTH, layers=layers, heads=2, context=POSITIONS))
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return model


def mean_square(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    outputs = torch.utils._pytree.tree_leaves(model(x))
    return sum(((y - target.mean()).square().mean() for y in outputs), target.new_zeros(()))


def next_token(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def in_autocast(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return next_token(model, tokens, targets)


@dataclasses.dataclass(frozen=True)
class What:
    """A kind of model with ``layers`` layers, its step, and whether the loss is compiled with it."""

    build: Callable[[int], nn.Module]
    step: Step = mean_square
    whole_step: bool = False


WHATS = {
    "Linear": What(lambda layers: nn.Linear(WIDTH, 40)),
    "fused modules": What(lambda layers: FusedModules()),
    "TransformerBlock": What(lambda layers: octavo.nn.TransformerBlock(WIDTH, 48, 2, 1)),
    "transformer and output projection": What(transformer, next_token),
    "training step in autocast": What(transformer, in_autocast, whole_step=True),
    "activation checkpointing": What(Checkpointed),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one cell."""

    graphs: int
    breaks: int
    recompiles: int  # graphs compiled after the second step
    difference: float  # the largest from eager in losses, weights and delayed state; 0: bit for bit


def built(what: What, recipe: str, layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    model = what.build(layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not every model has each layer that the recipe map names
        return octavo.convert(model, RECIPES[recipe](), select=lambda module, name: True)


def batch(what: What, step: int, sequences: int = 2, positions: int = POSITIONS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if what.step is mean_square:
        return torch.randn(sequences, positions, WIDTH, generator=generator), torch.randn(3, generator=generator)
    tokens, targets = torch.randint(0, VOCABULARY, (2, sequences, positions), generator=generator)
    return tokens, targets


def trained(what: What, model: nn.Module, step: Step, steps: int) -> dict[str, Tensor]:
    """Train, and return losses, weights and delayed state."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = {}
    for index in range(steps):
        loss = step(model, *(tensor.to(device) for tensor in batch(what, index)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {index}"] = loss.detach()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return losses | state | octavo.nn.delayed_state_dict(model)


def compiled_step(what: What, backend: Any, **options: Any) -> Step:
    """Return the step with its model compiled, or all of it compiled."""
    if what.whole_step:
        return torch.compile(what.step, backend=backend, fullgraph=True, **options)
    call = torch.compile(lambda model, x: model(x), backend=backend, fullgraph=True, **options)
    return lambda model, x, target: what.step(lambda inputs: call(model, inputs), x, target)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest difference of any tensor, relative to its largest value."""
    assert a.keys() == b.keys()
    off = [float((a[k].double() - b[k].double()).abs().max() / b[k].double().abs().max().clamp(1e-30)) for k in a]
    return max(off)


def measure(
    name: str,
    recipe: str,
    backend: str = "aot_eager",
    steps: int = 4,
    device: str = "cpu",
    layers: int = 1,
    **options: Any,
) -> Result:
    """Compile a cell and train it beside eager; options are torch.compile's. Each layer is traced anew.

    A graph break raises torch._dynamo.exc.Unsupported.
    """
    what = WHATS[name]
    torch.compiler.reset()
    utils.counters.clear()
    step = compiled_step(what, backend, **options)
    model = built(what, recipe, layers).to(device)
    graphs: list[int] = []

    def counted(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        loss = step(model, x, target)
        graphs.append(utils.counters["stats"]["unique_graphs"])
        return loss

    actual = trained(what, model, counted, steps)
    expected = trained(what, built(what, recipe, layers).to(device), what.step, steps)
    breaks = sum(utils.counters["graph_break"].values())
    return Result(graphs[-1], breaks, graphs[-1] - graphs[1], difference(actual, expected))
