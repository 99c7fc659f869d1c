"""Ranks with different settings of one model all raise an error that names layer and option with both values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo import recipes
from octavo.distributed import ColwiseParallel, Fp8Reduction, PrepareModuleInput, RowwiseParallel
from octavo.distributed.checkpoint import PlainModel
from octavo.distributed.ranks import Ranks
from octavo.errors import RanksDifferError
from octavo.scaling.recipe import RecipeMap
from tests.support.byte_counter import REDUCE, ByteCounter
from tests.support.helpers import every_layer

WIDTH = 128
Settings = dict[str, Any]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(3)])


def x() -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.bfloat16)


def fsdp2(mesh: Any, settings: Settings, after: Any = None) -> Any:
    recipe = RecipeMap(recipes.dynamic(), {"1": settings.get("recipe", recipes.dynamic())})
    model = octavo.convert(layers(), recipe, every_layer, settings.get("weight_storage"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(x())
    if after is not None:  # another recipe later
        octavo.set_recipe(model, after)
        model(x())
    return model


def later(mesh: Any, settings: Settings) -> None:
    fsdp2(mesh, {}, settings.get("recipe", recipes.delayed()))


def styles(mesh: Any, settings: Settings) -> None:
    recipe, exact = settings.get("recipe", recipes.blockwise()), settings.get("exact", False)
    model = octavo.convert(layers(), RecipeMap(recipes.blockwise(), {"1": recipe}), every_layer)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0), exact=exact)}
    plan["2"] = ColwiseParallel(input_layouts=Shard(0))
    parallelize_module(model, mesh, plan)(x())


def prepared(mesh: Any, settings: Settings) -> None:
    model = nn.Sequential(octavo.convert(layers()[:1], recipes.blockwise(), every_layer))
    take = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), **settings)
    parallelize_module(model, mesh, {"0": take, "0.0": ColwiseParallel(input_layouts=Shard(0))})(x())


def fused(mesh: Any, settings: Settings) -> None:
    recipe = RecipeMap(recipes.dynamic(), {"fc2": settings.get("recipe", recipes.dynamic())})
    mlp = octavo.nn.RMSNormMLP(WIDTH, WIDTH, "gelu", bias=False, dtype=torch.bfloat16, recipe=recipe)
    parallelize_module(mlp, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    mlp(x())


def experts(mesh: Any, settings: Settings) -> None:
    model = octavo.nn.Experts(4, WIDTH, WIDTH, dtype=torch.bfloat16, recipe=settings.pop("recipe", recipes.dynamic()))
    octavo.distributed.expert_parallel(model, mesh, **settings)
    model(x(), torch.arange(8).view(8, 1) % 4, torch.ones(8, 1, dtype=torch.bfloat16))


def optimizer(mesh: Any, settings: Settings) -> None:
    model = fully_shard(layers(), mesh=mesh)
    model(x()).sum().backward()
    make = getattr(octavo.optim, settings.pop("of", "AdamW"))
    make(model.parameters(), **{"lr": torch.tensor(0.25), **settings}).step()


def in_backward(mesh: Any, settings: Settings) -> None:
    model = fully_shard(layers(), mesh=mesh)
    optimizer = octavo.optim.SGD(model.parameters())
    octavo.optim.update_in_backward(optimizer, **settings)
    model(x()).sum().backward()


def reduced(mesh: Any, settings: Settings, fsdp: bool = False) -> None:
    reduction = Fp8Reduction(group=mesh.get_group(), **settings)
    if fsdp:
        model: Any = fully_shard(layers(), mesh=mesh)
        model.set_custom_reduce_scatter(reduction)
    else:
        model = DistributedDataParallel(layers(), process_group=mesh.get_group())
        model.register_comm_hook(reduction, octavo.distributed.fp8_reduce_hook)
    model(x()).sum().backward()


def saved(mesh: Any, settings: Settings) -> None:
    model = octavo.convert(layers(), recipes.delayed(**settings), every_layer)
    PlainModel(model).gather_delayed(Ranks(mesh.get_group()))


def error_of_rank(mesh: Any, name: str, *settings_of_ranks: Settings) -> str:
    """Return this rank's error where ranks have different settings, or "nothing"."""
    try:
        CASES[name](mesh, dict(settings_of_ranks[mesh.get_rank()]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


CASES: dict[str, Callable[..., Any]] = {
    case.__name__: case
    for case in (fsdp2, later, styles, prepared, fused, experts, optimizer, in_backward, reduced, saved)
}
CASES["reduced in fsdp2"] = functools.partial(reduced, fsdp=True)
ROWWISE, HIGH = {"recipe": recipes.rowwise()}, {"recipe": recipes.high_precision()}
OUTPUT = "1: recipe.output is (Cast(E4M3, PerTensor(), Dynamic()), Cast(E4M3, PerTensor(), Dynamic())) on rank 0, "


@pytest.mark.parametrize(
    ("name", "here", "there", "says"),
    [
        ("fsdp2", {}, ROWWISE, OUTPUT + "(Cast(E4M3, PerRow(), Dynamic()), Cast(E4M3, PerRow(), Dynamic())) on rank 1"),
        ("fsdp2", {}, {"weight_storage": "fp8"}, "weight_storage is torch.bfloat16 on rank 0, fp8 PerTensor() on"),
        ("later", {}, HIGH, "None on rank 1"),
        ("styles", {}, HIGH, "1: recipe.output"),
        ("styles", {}, {"exact": True}, "1: exact is False on rank 0, True on rank 1"),
        ("prepared", {}, {"exact": True}, "exact is False on rank 0, True on rank 1"),
        ("fused", {}, HIGH, OUTPUT[3:]),
        ("experts", {}, ROWWISE, "recipe.output"),
        ("experts", {"exact": True}, {}, "exact is True on rank 0, False on rank 1"),
        ("optimizer", {}, {"lr": 0.5}, "AdamW's lr of group 0 is 0.25 on rank 0, 0.5 on rank 1"),
        ("optimizer", {"moments": "bf16"}, {"seed": 3}, "AdamW's seed is 0 on rank 0, 3 on rank 1"),
        ("optimizer", {"of": "Muon"}, {"of": "Muon", "ns_steps": 3}, "ns_steps of group 0 is 5 on rank 0, 3 on rank 1"),
        ("in_backward", {}, {"outstanding_weight_updates_bytes": 0}, "is 67108864 on rank 0, 0 on rank 1"),
        ("reduced", {}, {"seed": 1}, "seed is 0 on rank 0, 1 on rank 1"),
        ("reduced in fsdp2", {"format": octavo.E5M2}, {}, "format is E5M2 on rank 0, E4M3 on rank 1"),
        ("saved", {}, {"history_length": 3}, "history_length=16"),
    ],
)
def test_ranks_that_differ_say_in_what(pool: Any, name: str, here: Settings, there: Settings, says: str) -> None:
    first, second = pool.run(error_of_rank, (2,), name, here, there, seconds=60)
    assert first == second and first.startswith(RanksDifferError.__name__)
    assert says in first


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        ({}, {"skip_nonfinite": True}, "AdamW's skip_nonfinite is False on rank 0, True on rank 2"),
        ({}, {"lr": 0.5}, "AdamW's lr of group 0 is 0.25 on rank 0, 0.5 on rank 2"),
        ({"of": "Muon"}, {"of": "Muon", "directions": "fp8"}, "Muon's directions is bf16 on rank 0, fp8 on rank 2"),
    ],
)
def test_replicas_of_shards_that_differ_say_in_what(pool: Any, here: Settings, there: Settings, says: str) -> None:
    """Under HSDP the ranks of a shard group are of one replica, and have the same settings."""
    first, *others = pool.run(error_of_rank, (2, 2), "optimizer", here, here, there, there, seconds=60)
    assert others == [first] * 3
    assert first.startswith(RanksDifferError.__name__) and says in first


def counts_of_reductions(mesh: Any) -> list[int]:
    """Return how often values are reduced: in a forward, after other recipes, in two steps, in DDP's first forward."""
    model, counts = fsdp2(mesh, {}), []
    with ByteCounter() as counter:

        def count(run: Callable[[], Any]) -> Any:
            before, result = counter.calls[REDUCE], run()
            counts.append(counter.calls[REDUCE] - before)
            return result

        count(lambda: model(x()))
        for recipe in (recipes.rowwise(), recipes.dynamic()):
            octavo.set_recipe(model, recipe)
            count(lambda: model(x()))
        model(x()).sum().backward()
        steps = octavo.optim.AdamW(model.parameters())
        count(steps.step)
        count(steps.step)
        alone = octavo.convert(layers(), recipes.dynamic(), every_layer)
        parallel = DistributedDataParallel(alone, process_group=mesh.get_group())
        count(lambda: parallel(x()).sum()).backward()
        count(octavo.optim.AdamW(alone.parameters()).step)
    return counts


def test_ranks_are_asked_once_and_ddps_never(pool: Any) -> None:
    amaxes = 1  # of whole weights, or of their columns, in each forward
    assert pool.run(counts_of_reductions, (2,)) == [[amaxes, amaxes + 1, amaxes + 1, 1, 0, 0, 0]] * 2
