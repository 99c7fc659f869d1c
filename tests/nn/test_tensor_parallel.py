"""Linear layers under torch's own parallelize_module equal one rank's, for every recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import distributed as ours
from octavo.inspect.rows import Table
from tests.support import parallel_tasks as tasks
from tests.support.byte_counter import ByteCounter
from tests.support.helpers import CountOps
from tests.support.parallel_tasks import RECIPES, block_plan, differences, small, step, whole

KINDS: dict[str, dict[str, Any]] = {
    "LayerNormLinear": {"out_features": {"query": 256, "key": 128}, "bias": True},
    "RMSNormLinear": {"out_features": {"all": 256}, "bias": False, "return_norm_output": True},
    "LayerNormMLP": {"ffn_hidden_size": 512, "activation": "reglu", "bias": True},
    "RMSNormMLP": {"ffn_hidden_size": 512, "activation": "relu", "bias": False},
}


class Whole(nn.Module):
    """A fused module of exact sums, whose outputs are one tensor: all splits, and the norm's if it is returned."""

    def __init__(self, kind: str, recipe: str) -> None:
        super().__init__()
        self.of = getattr(octavo.nn, kind)(256, **KINDS[kind], eps=0.0, recipe=RECIPES[recipe])
        for parameter in self.parameters():
            parameter.data.copy_(small(*parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.of(x)
        if isinstance(self.of, octavo.nn.RMSNormLinear):
            (y,), normed = outputs
            return torch.cat([y, whole(normed)], -1)
        return torch.cat(outputs, -1) if isinstance(outputs, tuple) else outputs


def plan_of(module: Any, sequence: bool, styles: Any = ours, **sending: Any) -> dict[str, Any]:
    layout: Any = Shard(1) if sequence else Replicate()
    plan = {"of.norm": styles.SequenceParallel()} if sequence else {}
    if module.of.linear_parts == ("linear",):
        return plan | {"of.linear": styles.ColwiseParallel(input_layouts=layout, output_layouts=Replicate(), **sending)}
    second = styles.RowwiseParallel(output_layouts=layout, **sending)
    return plan | {"of.fc1": styles.ColwiseParallel(input_layouts=layout, **sending), "of.fc2": second}


def signs(*shape: int) -> Tensor:
    """Return as many of each sign in a row, which a norm without eps leaves as they are."""
    return torch.rand(shape).argsort(-1).remainder(2).mul(2).sub(1).float()


def fused(mesh: Any, recipe: str, kind: str, sequence: bool) -> tuple[Any, ...]:
    """(whether it ran as one; differences from one rank of two steps; bytes, and those of its parts; same state)."""
    alone = Whole(kind, recipe)
    model = copy.deepcopy(alone)
    octavo.nn.separate_splits(alone)
    parallelize_module(model, mesh, plan_of(model, sequence))
    apart = copy.deepcopy(model)
    assert apart.of._run_fused is not None  # else the name below would replace nothing
    apart.of._run_fused = lambda *arguments: None
    x, rank, differing = signs(2, 128, 256), mesh.get_local_rank(), []
    g = small(*alone(x).shape)

    def own(tensor: Tensor, sharded: bool = sequence) -> Tensor:
        return tensor.chunk(mesh.size(), 1)[rank].contiguous() if sharded else tensor

    scattered = sequence and model.of.linear_parts != ("linear",)
    for _ in range(2):
        wanted = step(alone, x, g)
        wanted |= {"y": own(wanted["y"], scattered), "x": own(wanted["x"])}
        sent = []
        for one in (model, apart):
            with ByteCounter() as counter, CountOps() as ops:
                trace = step(one, own(x), own(g, scattered))
            sent.append(sum(counter.bytes.values()))
            if one is model:
                differing.append(differences(wanted, trace))
                as_one = "norm_cast" in ops.calls or "norm_cast_two_scalings" in ops.calls
    states = octavo.nn.delayed_state_dict(model)
    same = all(torch.equal(states[name], state) for name, state in octavo.nn.delayed_state_dict(alone).items())
    return as_one, differing, sent, same


def not_fused(mesh: Any, why: str) -> bool:
    """Return whether a module whose parts have to run one after the other ran as one."""
    module = Whole("RMSNormMLP", "dynamic")
    plan = plan_of(module, True, torch_parallel if why == "torch's styles" else ours)
    if why == "another layout":
        plan["of.fc1"] = ours.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        plan["of.fc2"] = ours.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(module, mesh, plan)
    if why == "a hook":
        module.of.fc1.register_forward_hook(lambda *_: None)
    with CountOps() as ops:
        module(signs(2, 128, 256)).sum().backward()
    return "norm_cast" in ops.calls


class Normed(nn.Module):
    """A layer behind a norm, and the norm's own output beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.of = octavo.nn.RMSNormLinear(
            256, 256, eps=0.0, bias=False, return_norm_output=True, recipe=RECIPES["power of two"]
        )
        for parameter in self.parameters():
            parameter.data.copy_(small(*parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([whole(output) for output in self.of(x)], -1)


# how the parts of a module are sharded and what it is called with: whether it runs as one
AS_ONE = {
    "a DTensor": True,
    "a DTensor that lies otherwise": False,
    "tokens that do not divide": False,
    "one layer and the norm's output": True,
    "the norm by tokens, and not the first layer's input": False,
    "the second layer alone": False,
    "columns first": False,
    "casts that are counted": False,
    "casts that are not sent": False,
}


def called_so(mesh: Any, how: str) -> tuple[bool, dict[str, float]]:
    """Return whether a module ran as one, and how a step differs from one rank's."""
    if how == "one layer and the norm's output":
        alone: nn.Module = Normed()
    else:
        alone = Whole("RMSNormMLP", "gw_hp" if how == "casts that are not sent" else "power of two")
    model, tokens = copy.deepcopy(alone), 127 if how == "tokens that do not divide" else 128
    plan: dict[str, Any] = {"of.norm": ours.SequenceParallel(), "of.fc1": ours.ColwiseParallel(input_layouts=Shard(1))}
    plan["of.fc2"] = ours.RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    if how == "one layer and the norm's output":
        layouts: Any = {"input_layouts": Shard(1), "output_layouts": Replicate()}
        plan = {"of.norm": ours.SequenceParallel(), "of.linear": ours.ColwiseParallel(**layouts)}
    elif how.startswith("the norm by tokens"):
        plan["of.fc1"] = ours.ColwiseParallel()
    elif how == "the second layer alone":
        plan = {"of.fc2": ours.RowwiseParallel(input_layouts=Replicate())}
    elif how == "columns first":
        plan = {"of.fc1": ours.RowwiseParallel(input_layouts=Replicate())}
        plan["of.fc2"] = ours.ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    if how == "casts that are counted":
        Table(model).attach(True)
    x = signs(2, tokens, 256)
    g = small(*alone(x).shape)
    sharded = distribute_tensor(x, mesh, [Replicate() if how == "a DTensor that lies otherwise" else Shard(1)])
    with CountOps() as ops:
        trace = step(model, sharded if "of.norm" in plan else x, g)
    return "norm_cast" in ops.calls, differences(step(alone, x, g), trace)


def begun(mesh: Any) -> list[float]:
    """Return how two first forwards differ from one rank's, by rms: of a module that is no copy, of random weights."""
    torch.manual_seed(1)
    alone = octavo.nn.RMSNormMLP(256, 512, activation="relu", bias=False, recipe=octavo.recipes.delayed())
    model = octavo.nn.RMSNormMLP(256, 512, activation="relu", bias=False, recipe=octavo.recipes.delayed())
    model.load_state_dict(alone.state_dict())
    x, errors = torch.randn(2, 64, 256), []
    layouts: dict[str, Any] = {"fc1": ours.ColwiseParallel(input_layouts=Shard(1))}
    layouts |= {"norm": ours.SequenceParallel(), "fc2": ours.RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, mesh, layouts)
    for _ in range(2):
        wanted = alone(x).chunk(mesh.size(), 1)[mesh.get_local_rank()]
        y = model(x.chunk(mesh.size(), 1)[mesh.get_local_rank()])
        errors.append(((getattr(y, "_local_tensor", y) - wanted).norm() / wanted.norm()).item())
    return errors


def frozen_norm(mesh: Any) -> list[bool]:
    norm = nn.LayerNorm(16)
    norm.weight.requires_grad_(False)
    parallelize_module(norm, mesh, ours.SequenceParallel())
    return [norm.weight.requires_grad, norm.bias.requires_grad]


SUMMED_BY_RANKS = ("out.bias", "fc2.bias")  # in eager, where each has the gradient of its tokens


def on_another_mesh(mesh: Any) -> list[str]:
    """Return the errors of a layer whose input is gathered, beside one on other ranks or on two mesh dimensions."""
    layer, said = octavo.nn.Linear(256, 256), []
    parallelize_module(layer, mesh["shard"], ours.ColwiseParallel(input_layouts=Shard(0)))
    for other, placements in ((mesh["replicate"], [Shard(0)]), (mesh, [Replicate(), Shard(0)])):
        with pytest.raises(ValueError) as caught:
            layer(DTensor.from_local(torch.randn(4, 256), other, placements))
        said.append(str(caught.value))
    return said


class Scaled(nn.Module):
    """A module whose first layer reads smaller numbers than the module's input, which others read."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.second = (nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)) * 2.0**-14)


def of_another_scale(mesh: Any) -> tuple[float, float, float]:
    """Return how the second step under a delayed recipe differs from that of one rank; so the first of a resumed run.

    And a step of the model's copy, in high precision.
    """
    alone = octavo.convert(Scaled(), RECIPES["delayed"], lambda module, name: True)
    resumed, model = copy.deepcopy(alone), copy.deepcopy(alone)
    whole_input = ours.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    first, last = ours.ColwiseParallel(), ours.ColwiseParallel(output_layouts=Replicate())
    for net in (model, resumed):
        parallelize_module(net, mesh, {"": whole_input, "first": first, "second": ours.RowwiseParallel(), "last": last})

    def differ(net: Any, alone: Any = alone) -> float:
        alone.zero_grad(), net.zero_grad()
        x = torch.randn(8, 256)
        alone(x).sum().backward(), net(x.chunk(mesh.size())[mesh.get_local_rank()]).sum().backward()
        gradients = ({name: whole(p.grad) for name, p in of_either.named_parameters()} for of_either in (alone, net))
        return max(differences(*gradients).values())

    differ(model)
    second_step = differ(model)
    octavo.nn.load_delayed_state_dict(resumed, octavo.nn.delayed_state_dict(alone))
    copies = [copy.deepcopy(net) for net in (model, alone)]
    for net in copies:
        octavo.set_recipe(net, octavo.recipes.high_precision())
    return second_step, differ(resumed), differ(*copies)


def trained(mesh: Any, recipe: str, kind: str) -> list[list[str]]:
    """The gradients of two steps that an embedding and two equal modules have in compiled graphs alone.

    Each module is compiled by itself, under FSDP2 and sequence parallelism; for both there is to be one graph.
    """
    gradients_of_modules, like = [], {"norm": "layer_norm", "bias": True, "recipe": RECIPES[recipe]}
    for compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        blocks: list[Any] = [
            Whole(kind, recipe) if kind in KINDS else octavo.nn.TransformerBlock(256, 64, 4, **like) for _ in range(2)
        ]
        model = octavo.convert(nn.Sequential(nn.Embedding(64, 256), *blocks), RECIPES[recipe])
        plan = {"0": ours.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        of_block = plan_of(blocks[0], True, exact=True) if kind in KINDS else block_plan(True, exact=True)
        plan |= {f"{index}.{name}": style for index in (1, 2) for name, style in of_block.items()}
        parallelize_module(model, mesh["shard"], plan)
        for block in blocks:
            if compiled:
                block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, mesh=mesh["replicate"])
        fully_shard(model, mesh=mesh["replicate"])
        stepping = [p for name, p in model.named_parameters() if not name.endswith(SUMMED_BY_RANKS)]
        optimizer = torch.optim.SGD(stepping, 1e-2)
        for _ in range(2):
            with torch._dynamo.config.patch(error_on_recompile=True):
                model(torch.randint(64, (2, 256))).square().mean().backward()
            optimizer.step()
            gradients_of_modules.append({name: whole(p.grad) for name, p in model.named_parameters()})
            optimizer.zero_grad()
    limits = {name: 1e-6 if name.endswith(SUMMED_BY_RANKS) else 0.0 for name in gradients_of_modules[0]}
    apart = (differences(*pair) for pair in zip(gradients_of_modules[:2], gradients_of_modules[2:], strict=True))
    return [[name for name, most in limits.items() if not one[name] <= most] for one in apart]


# where sums of few bits are exact
EXACT = ("power of two", "rowwise", "gw_hp", "blockwise", "mx", "nvfp4", "high_precision")


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("recipe", tasks.RECIPES)
def test_equal_to_one_rank(pool, recipe, before, bias, shape):
    """Steps equal one rank's from the first on; bit for bit where scales are powers of two: all sums are exact."""
    most = 1e-6 if recipe in ("dynamic", "delayed") else 0.0
    for steps, evaluated, same_state in pool.run(tasks.compare, shape, recipe, before, bias):
        assert max(max(differing.values()) for differing in steps) <= most and evaluated <= most and same_state


def test_compiled_equal_to_one_rank(pool):
    """Compiled steps equal one rank's from the first on, for which there is no delayed scale yet."""
    for steps, _, same_state in pool.run(tasks.compare, (2,), "delayed", True, True, True):
        assert max(max(differing.values()) for differing in steps) <= 1e-6 and same_state


@pytest.mark.covering(1)
@pytest.mark.parametrize("layouts", tasks.LAYOUTS)
@pytest.mark.parametrize("recipe", ["power of two", "blockwise"])
def test_inputs_that_lie_otherwise(pool, recipe, layouts):
    """Sharded by tokens where all are wanted, replicated where features are, replicated weights."""
    for differing in pool.run(tasks.lies_otherwise, (2,), recipe, layouts):
        assert max(differing.values()) == 0.0


ONE_AFTER_THE_OTHER = {("high_precision", False), ("high_precision", True), ("gw_hp", True), ("nvfp4", True)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", tasks.RECIPES)
def test_fused_modules_stay_fused_and_equal_one_rank(pool, recipe, kind, sequence, shape):
    """Fused modules equal one rank bit for bit where sums are exact, and send their parts' bytes.

    The gradient of an RMSNormMLP's norm is exact too but under nvfp4, where the sum of its 256 tokens' terms, multiples
    of 2^-17 whose magnitudes add up to 2^13.9, does not fit in float32; that of the other recipes of exact sums does,
    with 2^-9 and 2^13.7.
    """
    rounded = {"of.norm.weight"} if (recipe, kind, sequence) == ("nvfp4", "RMSNormMLP", True) else set()
    for as_one, (first, second), (sent, of_parts), same_state in pool.run(fused, shape, recipe, kind, sequence):
        assert as_one == (kind == "RMSNormMLP" and (recipe, sequence) not in ONE_AFTER_THE_OTHER)  # others have splits
        exact = kind.startswith("RMS") and recipe in EXACT
        for differing in (first, second):
            assert all(most <= (0.0 if exact and name not in rounded else 2e-6) for name, most in differing.items())
        assert sent == of_parts and same_state


@pytest.mark.parametrize("why", ["torch's styles", "another layout", "a hook"])
def test_what_wants_to_see_parts_run_one_after_the_other(pool, why):
    assert pool.run(not_fused, (2,), why) == [False, False]


@pytest.mark.parametrize("how", AS_ONE)
def test_modules_that_are_sharded_or_called_otherwise_equal_one_rank(pool, how):
    """Bit for bit, as all sums are exact."""
    for as_one, differing in pool.run(called_so, (2,), how):
        assert as_one == AS_ONE[how] and max(differing.values()) == 0.0


def test_made_on_the_meta_device(pool):
    assert pool.run(tasks.from_meta, (2,)) == [(True, True)] * 2


def test_refusals(pool):
    plain, mesh, strided = pool.run(tasks.refused, (2, 2))[0]
    assert "the input is a plain tensor: give it through ColwiseParallel" in plain
    assert "want one mesh of one dimension" in mesh
    assert "placement _S" in strided and "want Shard(0), Shard(1) or Replicate()" in strided
