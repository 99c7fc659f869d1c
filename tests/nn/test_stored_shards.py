"""Weights that live in FP8 under FSDP2: gathers, training, files."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import octavo
from octavo import UnsupportedOpError, recipes
from octavo.nn.recipe_module import RecipeModule
from octavo.weights.operands import fp8_pair
from octavo.weights.stored import StoredWeight, local_stored
from tests.support.byte_counter import GATHER, REDUCE, ByteCounter
from tests.support.expert_models import H, Mixture
from tests.support.helpers import stepped
from tests.support.sharded_weights import (
    adamw,
    average,
    batch,
    differences,
    held,
    model,
    on_meta,
    rows_of,
    shard,
    sharded,
)
from tests.support.stored_weights import widened

FULL = StateDictOptions(full_state_dict=True)
SENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
each_recipe = pytest.mark.parametrize("recipe", ["dynamic", "delayed", "blockwise"])
both = pytest.mark.parametrize("recipe", ["dynamic", "blockwise"])


@each_recipe
def test_a_part_takes_a_byte_an_element(recipe, two_ranks):
    net, whole = sharded(recipe, two_ranks), model(recipe)
    for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
        part = local_stored(p)
        assert isinstance(p, DTensor) and p.shape == q.shape and p.dtype == q.dtype and part.is_shard
        assert part.granularity == q.granularity
        assert torch.equal(part.qdata.view(torch.uint8), rows_of(q.qdata.view(torch.uint8), two_ranks)), name
        assert part.qdata.untyped_storage().nbytes() == -(-q.shape[0] // 2) * q.shape[1]
        assert recipe != "blockwise" or torch.equal(part.scale_inv, rows_of(q.scale_inv, two_ranks))
    assert [m.gathered for m in octavo.summary(net).modules] == ["as stored"] * 3


def test_what_sharded_weights_refuse(two_ranks):
    layer = octavo.convert(nn.Linear(256, 256), recipes.dynamic(), lambda module, name: True, "fp8")
    with pytest.raises(UnsupportedOpError, match="sharded by rows"):
        fully_shard(layer, mesh=two_ranks, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    plain = nn.Linear(4, 6, bias=False)
    plain.weight = nn.Parameter(StoredWeight.cast(torch.ones(6, 4)))
    with pytest.raises(UnsupportedOpError, match="a FSDPLinear can't read a weight that is stored in FP8"):
        fully_shard(plain, mesh=two_ranks)(torch.ones(2, 4))
    net = sharded("dynamic", two_ranks)
    for change in (octavo.restore, lambda net: octavo.convert(net, recipes.dynamic(), weight_storage="fp8")):
        with pytest.raises(ValueError, match=r"0: octavo.* of a weight that fully_shard has sharded in FP8; do"):
            change(net)
    with pytest.raises(ValueError, match=r"reads weights scaled PerBlock\(128, 128\), but they are stored PerTensor"):
        octavo.set_recipe(net, recipes.blockwise())
    assert net[0].recipe.name == "dynamic"
    octavo.convert(net, recipes.delayed())
    assert net[0].recipe.name == "delayed"
    state = net.state_dict() | {"0.weight": torch.ones(37, 140)}
    del state["0.weight_scale_inv"]
    with pytest.raises(ValueError, match=r"a sharded weight \(37, 140\), here \(18, 140\), is loaded from one that is"):
        net.load_state_dict(state)


def beside_replicas(mesh: Any, recipe: str) -> list[str]:
    """Return what differs between training a sharded model in mixed precision and one that every rank has."""
    runs = []
    for net in (sharded(recipe, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), model(recipe)):
        optimizer, losses = adamw(net), []
        for step in range(3):
            losses.append(net(batch(step, dist.get_rank())).float().square().mean())
            losses[-1].backward()
            if not isinstance(net[0].weight, DTensor):
                average(net, mesh)
            optimizer.step()
            optimizer.zero_grad()
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        runs.append((held(net, optimizer), torch.stack(losses)))
    (shards, losses), (whole, expected) = runs
    return differences(shards, whole, mesh) + ["losses"] * (not torch.equal(losses, expected))


@both
def test_training_in_mixed_precision_equals_that_of_replicas(pool, recipe):
    assert pool.run(beside_replicas, (2,), recipe, seconds=60) == [[]] * 2


def counted(mesh: Any, recipe: str) -> list[Any]:
    """Bytes gathered and all-reduces within a forward and backward, of the second step."""
    net = sharded(recipe, mesh)
    optimizer = adamw(net)
    for _ in range(2):
        with ByteCounter() as counter:
            net(batch(0, 0)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = sum(2 * -(-p.shape[0] // 2) * p.shape[1] for p in net.parameters())
    return [counter.bytes[GATHER] / rows, counter.calls[REDUCE]]


@both
def test_a_byte_a_weight_and_nothing_but_gathers(pool, recipe):
    for share, reduces in pool.run(counted, (2,), recipe, seconds=60):
        assert reduces == 0 and 1.0 <= share / 2 <= 1.001  # forward and backward


def in_high_precision(mesh: Any, recipe: str) -> list[bool]:
    """Products in bf16 read the gathered codes' values; then FP8 products as before."""
    net, whole = sharded(recipe, mesh), widened(model(recipe))
    x = batch(0, 0)
    before = net(x)
    octavo.set_recipe(net, recipes.high_precision())
    with torch.no_grad():
        same = [torch.equal(net.eval()(x), whole(x))]
    net.train()(x).float().sum().backward()
    whole(x).float().sum().backward()
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        same.append(torch.equal(p.grad.to_local(), rows_of(q.grad, mesh)))
    octavo.set_recipe(net, getattr(recipes, recipe)())
    return [*same, torch.equal(net(x), before)]


@both
def test_high_precision_and_back(pool, recipe):
    assert pool.run(in_high_precision, (2,), recipe, seconds=60) == [[True] * 5] * 2


def frozen(recipe: str, kind: str, *, is_training: bool = True) -> Any:
    """Return (a model whose frozen weights are stored by a recipe's granularity, an input)."""
    torch.manual_seed(0)
    if kind == "linear":
        net: Any = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)).to(torch.bfloat16)
    else:
        net = Mixture(kind, experts=4, intermediate=48)
    net.requires_grad_(False).train(is_training)
    x = torch.randn(8, H if kind != "linear" else 256, dtype=next(net.parameters()).dtype)
    return octavo.convert(net, getattr(recipes, recipe)(), lambda _, name: name != "router", "fp8"), x


def passed(net: Any, x: Any) -> list[torch.Tensor]:
    """Return a forward's output and the gradient that passes frozen weights."""
    x = x.clone().requires_grad_()
    y = net(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad]


def frozen_in_high_precision(mesh: Any, recipe: str, kind: str, is_training: bool) -> list[bool]:
    """Return what equals the same block without FSDP2: products in FP8, high precision and FP8; codes; scales."""
    runs = []
    for is_sharded in (False, True):
        net, x = frozen(recipe, kind, is_training=is_training)
        for module in [*net.children(), net] if is_sharded else ():
            fully_shard(module, mesh=mesh)
        runs.append(passed(net, x))
        with octavo.using(net, recipes.high_precision()):
            runs[-1] += passed(net, x)
        runs[-1] += passed(net, x)
        readers = [module for module in net.modules() if isinstance(module, RecipeModule)]
        runs[-1] += [tensor.float() for reader in readers for tensor in fp8_pair(reader, is_training)]
    return [torch.equal(one, other) for one, other in zip(*runs, strict=True)]


@pytest.mark.parametrize("is_training", [True, pytest.param(False, marks=pytest.mark.full)], ids=["train", "eval"])
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        *itertools.product(("linear", "octavo"), ("dynamic", "blockwise", "rowwise", "mx")),
        *itertools.product(["stored transposed"], ("dynamic", "blockwise")),  # others can't be stored so
    ],
)
def test_frozen_weights_in_high_precision_are_as_without_fsdp2(pool, recipe, kind, ranks, is_training):
    for same in pool.run(frozen_in_high_precision, (ranks,), recipe, kind, is_training, seconds=60):
        assert all(same) and len(same) == 10


def compiled(mesh: Any, recipe: str, whole: bool) -> Any:
    """Whether a compiled model trains as the eager one, and the graphs after each step."""
    torch.compiler.reset()
    counters.clear()
    runs, graphs = [], []
    for compile in (False, True):
        net = fully_shard(model(recipe), mesh=mesh) if whole else sharded(recipe, mesh)
        if compile and whole:
            net.forward = torch.compile(net.forward, backend="aot_eager", fullgraph=True)
        if compile and not whole:
            net[0].compile(backend="aot_eager", fullgraph=True)
        optimizer = adamw(net)
        for step in range(3):
            stepped(optimizer, net(batch(step, dist.get_rank())).float().square().mean())
            graphs.append(counters["stats"]["unique_graphs"])
        runs.append(held(net, optimizer))
    return all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0]), graphs[3:]


@pytest.mark.full  # by default tests/distributed/test_compile.py compiles on two ranks
@pytest.mark.parametrize("whole", [False, True], ids=["a layer", "in one graph"])
@both
def test_compiled_equals_eager_and_is_compiled_once(pool, recipe, whole):
    for same, graphs in pool.run(compiled, (2,), recipe, whole, seconds=120):
        assert same and graphs[-1] == graphs[1] > 0


@both
def test_a_state_dict_holds_sharded_codes(recipe, two_ranks):
    net, whole = sharded(recipe, two_ranks), model(recipe).state_dict()
    state = net.state_dict()
    assert state.keys() == whole.keys()
    for name, value in state.items():
        assert value.shape == whole[name].shape and value.dtype == whole[name].dtype
        plain = name.endswith("scale_inv") and recipe == "dynamic"
        assert type(value) is (torch.Tensor if plain else DTensor), name
        assert type(value if plain else value.to_local()) is torch.Tensor
    assert state["0.weight"].to_local().data_ptr() == local_stored(net[0].weight).qdata.data_ptr()


def moved(mesh: Any, recipe: str) -> list[Any]:
    """State dicts between sharded models, full ones of codes, and full ones of plain values."""
    net, equal = sharded(recipe, mesh), []
    full = get_model_state_dict(net, options=FULL)
    sent = dict(full) if mesh.get_rank() == 0 else {}
    for load in (
        lambda other: other.load_state_dict(net.state_dict(), assign=other[0].weight.is_meta),
        lambda other: set_model_state_dict(other, get_model_state_dict(net)),
        lambda other: set_model_state_dict(other, dict(full), options=FULL),
        lambda other: set_model_state_dict(other, dict(sent), options=SENT),
    ):
        for other in (sharded(recipe, mesh, seed=1), shard(on_meta(recipe), mesh)):
            load(other)
            if not other[0].weight.is_meta:  # of which set_model_state_dict of shards sets nothing
                equal.append(codes_equal(net, other))
    equal.append(torch.equal(net(batch(0, 0)), other(batch(0, 0))))
    equal += [torch.equal(full[name], value) for name, value in model(recipe).state_dict().items()]
    again, state = sharded(recipe, mesh, seed=2), widened(model(recipe)).state_dict()
    set_model_state_dict(again, state, options=FULL)
    equal.append(values_equal(net, again))
    full_state = get_model_state_dict(again, options=FULL)  # on a CPU its one scale is the model's own tensor
    set_model_state_dict(again, full_state if mesh.get_rank() == 0 else {}, options=SENT)
    return [*equal, values_equal(net, again)]


def values_equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(local_stored(p).dequantize(), local_stored(q).dequantize()) for p, q in pairs)


def codes_equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = [(local_stored(p), local_stored(q)) for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    return all(
        torch.equal(p.qdata.view(torch.uint8), q.qdata.view(torch.uint8)) and torch.equal(p.scale_inv, q.scale_inv)
        for p, q in pairs
    )


@both
def test_state_dicts_move(pool, recipe):
    for equal in pool.run(moved, (2,), recipe, seconds=60, whole=True):
        assert all(equal) and len(equal) == 16
