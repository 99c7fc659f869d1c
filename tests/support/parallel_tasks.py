"""Tasks of ranks: layers under tensor parallelism beside the same layers on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import distributed as ours
from octavo import recipes
from octavo.compat.torchao import float8_tensor_parallel as ao
from octavo.distributed import Fp8Reduction
from tests.support.byte_counter import GATHER, ByteCounter

RECIPES = {
    "dynamic": recipes.dynamic(),
    "power of two": recipes.dynamic(power_of_two=True),
    "delayed": recipes.delayed(history_length=2),
    "rowwise": recipes.rowwise(power_of_two=True),
    "gw_hp": recipes.rowwise_with_gw_hp(),
    "blockwise": recipes.blockwise(),
    "mx": recipes.mx(),
    "nvfp4": recipes.nvfp4(),
    "high_precision": recipes.high_precision(),
}
TWICE = recipes.rowwise()  # rows whose values are rounded a second time, where they are not exact


def small(*shape: int) -> Tensor:
    """Return eighths up to 1: sums of their products are exact in float32, in any order."""
    return torch.randint(-8, 9, shape) / 8


class Pair(nn.Module):
    """A module of two layers, as of an MLP."""

    def __init__(self, k: int, n: int, bias: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(k, n, bias, dtype=dtype), nn.Linear(n, k, bias, dtype=dtype)
        for parameter in self.parameters():
            parameter.data.copy_(small(*parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


def convert(model: nn.Module, recipe: str) -> nn.Module:
    return octavo.convert(model, TWICE if recipe == "twice" else RECIPES[recipe], select=lambda module, name: True)


def parallel(model: nn.Module, mesh: Any, recipe: str, before: bool, plan: Any = PLAN) -> nn.Module:
    """Return the model converted before it is parallelized, or after."""
    if before:
        convert(model, recipe)
    parallelize_module(model, mesh, {name: style() for name, style in plan.items()})
    return model if before else convert(model, recipe)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_tokens(tensor: Tensor, mesh: Any) -> Tensor:
    """Return this rank's tokens, of [B, T, C]."""
    return tensor.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters, whole."""
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def step(model: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Run forward and backward; return the output, the gradients of the input and of all parameters, whole."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = whole(model(x))
    y.backward(g)
    return gradients(model) | {"y": y.detach(), "x": whole(x.grad)}


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return ((one - other).abs().max() / one.abs().max()).item()


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    assert one.keys() == other.keys()
    return {name: difference(one[name], other[name]) for name in one}


def compare(mesh: Any, recipe: str, before: bool, bias: bool, compiles: bool = False) -> tuple[Any, Any, Any]:
    """Return (differences of three steps from one rank, of evaluation, whether delayed state is equal on all ranks).

    Half of the features are three times larger. In eager a weight is written by hand before the second step;
    compiled nothing is evaluated, which would be another graph.
    """
    alone = Pair(256, 512, bias)
    alone.up.weight.data[:256] *= 3
    alone.down.weight.data[:, :256] *= 3
    model = parallel(copy.deepcopy(alone), mesh, recipe, before)
    convert(alone, recipe)
    if compiles:
        torch.compiler.reset()
        model.compile(backend="aot_eager", fullgraph=True)
    x, g = small(3, 8, 256), small(3, 8, 256)
    steps = []
    for number in range(3):
        if number == 1 and not compiles:
            with torch.no_grad():
                alone.up.weight.mul_(3), model.up.weight.mul_(3)
        steps.append(differences(step(alone, x, g), step(model, x, g)))
    states, of_alone = octavo.nn.delayed_state_dict(model), octavo.nn.delayed_state_dict(alone)
    same = all(torch.allclose(states[name], state, 1e-6, 0.0) for name, state in of_alone.items())
    if compiles:
        return steps, None, same
    alone.eval(), model.eval()
    with torch.no_grad():
        return steps, difference(alone(x), whole(model(x))), same


LAYOUTS = {  # of the input, of the weight
    "tokens, rows": (Shard(1), Shard(0)),
    "features, rows": (Shard(2), Shard(0)),
    "whole, columns": (Replicate(), Shard(1)),
    "tokens, columns": (Shard(0), Shard(1)),
    "tokens, whole": (Shard(1), Replicate()),
    "features, whole": (Shard(2), Replicate()),
    "whole, whole": (Replicate(), Replicate()),
}


def lies_otherwise(mesh: Any, recipe: str, layouts: str) -> dict[str, float]:
    """Return the differences from one rank of a layer whose weight and input are DTensors made by hand."""
    of_input, of_weight = LAYOUTS[layouts]
    alone = Pair(256, 256, True).up
    layer = copy.deepcopy(alone)
    of_bias = of_weight if of_weight == Shard(0) else Replicate()
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [of_weight]))
    layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [of_bias]))
    convert(alone, recipe), convert(layer, recipe)
    x, g = small(4, 256, 256), small(4, 256, 256)
    wanted = step(alone, x, g)
    placed = distribute_tensor(x, mesh, [of_input]).requires_grad_()
    y = layer(placed)
    y.full_tensor().backward(g)
    return differences(wanted, gradients(layer) | {"y": whole(y).detach(), "x": whole(placed.grad)})


def refused(mesh: Any) -> list[str]:
    """Return a layer's errors for a plain input, a weight on a mesh of two dimensions, strided shards."""
    messages, x, line = [], torch.randn(2, 16), mesh["shard"]
    strided = _StridedShard(0, split_factor=2)
    for its_mesh, placed in ((line, [Shard(0)]), (mesh, [Replicate(), Shard(0)]), (line, [strided])):
        layer = convert(nn.Linear(16, 16, False), "dynamic")
        spread = [Shard(0) if isinstance(one, _StridedShard) else one for one in placed]
        local = distribute_tensor(layer.weight.detach(), its_mesh, spread).to_local()
        layer.weight = nn.Parameter(DTensor.from_local(local, its_mesh, placed, run_check=False))
        with pytest.raises(ValueError) as caught:
            layer(x if not messages else DTensor.from_local(x, its_mesh, [Replicate()] * its_mesh.ndim))
        messages.append(str(caught.value))
    return messages


class Attention(nn.Module):
    """A module of three layers on one input and one on their outputs, by tokens, in place of attention."""

    def __init__(self, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(k, k, bias, dtype=dtype) for bias in (True, False, True, True))
        for parameter in self.parameters():
            parameter.data.copy_(small(*parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.k(x) + self.v(x))


def sequence_plan(shared: bool, styles: Any, **sending: Any) -> dict[str, Any]:
    """Return a plan: inputs and outputs sharded by tokens; gathered once for q, k and v, or by each."""
    layout, alone = (Replicate(), {}) if shared else (Shard(1), sending)
    plan: dict[str, Any] = {name: styles.ColwiseParallel(input_layouts=layout, **alone) for name in "qkv"}
    plan["o"] = styles.RowwiseParallel(output_layouts=Shard(1), **sending)
    if shared:
        plan[""] = styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), **sending)
    return plan


TORCHAOS = SimpleNamespace(
    ColwiseParallel=ao.Float8ColwiseParallel,
    RowwiseParallel=ao.Float8RowwiseParallel,
    PrepareModuleInput=ao.PrepareFloat8ModuleInput,
)
STYLES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "": lambda shared: sequence_plan(shared, ours),
    "exact": lambda shared: sequence_plan(shared, ours, exact=True),
    "reduced": lambda shared: sequence_plan(shared, ours, reduction=Fp8Reduction()),
    "theirs": lambda shared: sequence_plan(shared, torch_parallel),
    "ao": lambda shared: sequence_plan(shared, TORCHAOS),
}


def sequence_parallel(mesh: Any, recipe: str, shared: bool, dtype: torch.dtype, styles: str = "") -> tuple[Any, ...]:
    """Return (differences of two steps from one rank, bytes of forward's collectives, and of backward's)."""
    alone = Attention(256, dtype)
    model = convert(copy.deepcopy(alone), recipe)
    parallelize_module(model, mesh, STYLES[styles](shared))
    convert(alone, recipe)
    x, g = (small(2, 256, 256).to(dtype) for _ in range(2))
    steps = []
    for _ in range(2):
        wanted = step(alone, x, g)
        wanted |= {name: own_tokens(wanted[name], mesh) for name in "yx"}
        tokens = own_tokens(x, mesh).requires_grad_()
        model.zero_grad()
        with ByteCounter() as forward:
            y = model(tokens)
        with ByteCounter() as backward:
            y.backward(own_tokens(g, mesh))
        steps.append(differences(wanted, gradients(model) | {"y": y.detach(), "x": tokens.grad}))
    return steps, forward.bytes, backward.bytes


def errors(mesh: Any, recipe: str, sending: dict[str, Any]) -> list[float]:
    """Return errors of an MLP's output and gradients (of input and two weights), of their norms, against float64.

    On random bf16, whose tokens differ in size by factors of 2 to 4 in the mean.
    """
    k, tokens, bf16 = 512, (2, 512), torch.bfloat16
    alone = nn.Sequential(nn.Linear(k, 2 * k, False, dtype=bf16), nn.GELU(), nn.Linear(2 * k, k, dtype=bf16))
    model, truth = convert(copy.deepcopy(alone), recipe), alone.double()
    first = ours.ColwiseParallel(input_layouts=Shard(1), **sending)
    parallelize_module(model, mesh, {"0": first, "2": ours.RowwiseParallel(output_layouts=Shard(1), **sending)})
    x, g = ((torch.randn(*tokens, k) * torch.exp2(torch.randn(*tokens, 1) * size)).to(bf16) for size in (1, 2))
    tokens_here, all_of_it = own_tokens(x, mesh).requires_grad_(), x.double().requires_grad_()
    (y := model(tokens_here)).backward(own_tokens(g, mesh))
    (wanted := truth(all_of_it)).backward(g.double())
    pairs = [(y, own_tokens(wanted, mesh)), (tokens_here.grad, own_tokens(all_of_it.grad, mesh))]
    pairs += [(whole(model[at].weight.grad), truth[at].weight.grad) for at in (0, 2)]
    return [((actual.double() - exact).norm() / exact.norm()).item() for actual, exact in pairs]


def checkpointed_and_frozen(mesh: Any, recipe: str) -> tuple[dict[str, float], float, int]:
    """Return (differences of a checkpointed step, of dx where weights are frozen, bytes gathered there)."""
    alone, results = Attention(256, torch.float32), []
    x, g = small(2, 128, 256), small(2, 128, 256)
    for called in (lambda model, x: model(x), partial(checkpoint, use_reentrant=False)):
        model = parallelize_module(convert(copy.deepcopy(alone), recipe), mesh, sequence_plan(True, ours))
        y = called(model, leaf := x.clone().requires_grad_())
        y.backward(g)
        results.append(gradients(model) | {"y": y.detach(), "x": leaf.grad})
    frozen = parallelize_module(convert(alone.requires_grad_(False), recipe), mesh, sequence_plan(True, ours))
    leaf = x.clone().requires_grad_()
    with ByteCounter() as counter:
        frozen(leaf).backward(g)
    return differences(*results), difference(results[0]["x"], leaf.grad), counter.bytes[GATHER]


def block_plan(sequence: bool, **sending: Any) -> dict[str, Any]:
    """Return the plan of a transformer block, replicated or sharded by tokens between its products."""
    layout: Any = Shard(1) if sequence else Replicate()
    first = ours.ColwiseParallel(input_layouts=layout, **sending)
    second = ours.RowwiseParallel(output_layouts=layout, **sending)
    plan: dict[str, Any] = {"attention.qkv.linear": first, "mlp.fc1": first, "attention.out": second, "mlp.fc2": second}
    return plan | dict.fromkeys(("attention.qkv.norm", "mlp.norm") if sequence else (), ours.SequenceParallel())


def block(mesh: Any, recipe: str, norm: str, sequence: bool) -> dict[str, float]:
    """Return the distances of a transformer block, whose layers have named splits, from the same on one rank, by norms.

    There too each split is a Linear of its own, with a scale of its own.
    """
    torch.manual_seed(0)
    bias = norm == "layer_norm"
    options = {"heads": 4, "kv_heads": 2, "norm": norm, "bias": bias, "recipe": RECIPES[recipe]}
    alone = octavo.nn.TransformerBlock(256, 512, **options)
    model = copy.deepcopy(alone)
    octavo.nn.separate_splits(alone)
    parallelize_module(model, mesh, block_plan(sequence))
    x, g = torch.randn(2, 256, 256), torch.randn(2, 256, 256)
    wanted = step(alone, x, g)
    if sequence:
        x, g = own_tokens(x, mesh), own_tokens(g, mesh)
        wanted |= {name: own_tokens(wanted[name], mesh) for name in "yx"}
    parts = step(model, x, g)
    return {name: float((parts[name] - value).norm() / value.norm()) for name, value in wanted.items()}


def uneven_splits(mesh: Any) -> str:
    layer = octavo.nn.Linear(16, {"a": 6, "b": 5})
    with pytest.raises(ValueError) as caught:
        parallelize_module(layer, mesh, ours.ColwiseParallel())
    return str(caught.value)


def uneven(mesh: Any, recipe: str) -> dict[str, float]:
    """Return differences of 50 features in 16, 17, ...: DTensors between layers, as torch takes plain ones for even."""
    alone = Pair(30, 49, True)
    model = copy.deepcopy(alone)
    convert(alone, recipe), convert(model, recipe)
    style = ours.ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, {"up": style, "down": ours.RowwiseParallel()})
    x, g = small(2, 8, 30), small(2, 8, 30)
    return differences(step(alone, x, g), step(model, x, g))


class Tied(nn.Module):
    """An embedding whose weight is the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(51, 32), nn.Linear(32, 51, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def tied(mesh: Any, recipe: str) -> tuple[bool, float, str]:
    """Return (still tied, the difference of the gradient under loss_parallel, errors of two ways to shard it)."""
    alone = Tied()
    model, other = copy.deepcopy(alone), copy.deepcopy(alone)
    convert(alone, recipe), convert(model, recipe)
    by_rows = {"embedding": ours.RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh, by_rows | {"head": ours.ColwiseParallel(use_local_output=False)})
    tokens, wanted = torch.randint(51, (2, 8, 2)).unbind(-1)
    nn.functional.cross_entropy(alone(tokens).flatten(0, 1), wanted.flatten()).backward()
    with torch_parallel.loss_parallel():
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten()).backward()
    with pytest.raises(ValueError) as caught:
        parallelize_module(other, mesh, by_rows | {"head": ours.RowwiseParallel()})
    off = difference(alone.head.weight.grad, whole(model.head.weight.grad))
    return model.head.weight is model.embedding.weight, off, str(caught.value)


def from_meta(mesh: Any) -> tuple[bool, bool]:
    """Convert and parallelize on the meta device; return (whether all is initialised, delayed state is plain)."""
    with torch.device("meta"):
        model = convert(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), "delayed")
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    model(torch.randn(4, 32)).sum().backward()
    states = octavo.nn.delayed_state_dict(model).values()
    finite = all(bool(whole(parameter.grad).isfinite().all()) for parameter in model.parameters())
    return finite, all(type(state) is Tensor and bool(state.isfinite().all()) for state in states)
