"""Weights that live in FP8 under tensor parallelism, and computations with them, are those of one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import distributed as ours
from octavo.distributed.checkpoint import load_checkpoint, save_checkpoint
from octavo.optim import AdamW
from octavo.schedule import Phase, PrecisionSchedule
from octavo.weights.operands import fp8_pair
from octavo.weights.stored import StoredWeight, local_stored
from tests.support.combinations import in_full
from tests.support.parallel_tasks import RECIPES, Pair, differences, small, step, whole

STYLES = {"torch's": torch_parallel, "octavo's": ours}


def pair(seed: int = 0, k: int = 256, n: int = 512, bias: bool = True) -> Pair:
    """Layers whose first rank's amax is the whole one's, by far, and whose sums are exact."""
    torch.manual_seed(seed)
    model = Pair(k, n, bias)
    for layer in (model.up, model.down):
        layer.weight.data[0, 0] = 16.0
    return model


def store(model: nn.Module, recipe: str) -> Any:
    return octavo.convert(model, RECIPES[recipe], lambda module, name: True, weight_storage="fp8")


def shard(model: nn.Module, mesh: Any, styles: Any = ours) -> Any:
    """Over a mesh (tensor), or (data, tensor) with FSDP2 over the first."""
    plan = {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
    if mesh.ndim == 1:
        return parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh["shard"], plan)
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh["replicate"])
    return model


def made(mesh: Any, recipe: str, before: bool = True, styles: str = "octavo's", **options: Any) -> tuple[Any, Any]:
    """Return models (on one rank, on all): the latter stored ``before`` it is parallelized or after."""
    alone, model = pair(**options), pair(**options)
    store(alone, recipe)
    if before:
        store(model, recipe)
    shard(model, mesh, STYLES[styles])
    return alone, model if before else store(model, recipe)


def codes(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict, of codes and scales."""
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def compare(mesh: Any, recipe: str, before: bool, styles: str) -> tuple[Any, ...]:
    """Return (names of codes and scales that differ, bytes of codes here, differences of forward and backward)."""
    alone, model = made(mesh, recipe, before, styles)
    parts = [local_stored(layer.weight) for layer in (model.up, model.down)]
    sizes = [part.qdata.untyped_storage().nbytes() for part in parts]
    x, g, largest = small(3, 8, 256), small(3, 8, 256), []
    if recipe == "delayed":
        step(alone, x, g)
        octavo.nn.load_delayed_state_dict(model, octavo.nn.delayed_state_dict(alone))
    for _ in range(2):
        largest.append(max(differences(step(alone, x, g), step(model, x, g)).values()))
    for net in (alone, model):
        octavo.set_recipe(net, octavo.recipes.high_precision())
    largest.append(max(differences(step(alone, x, g), step(model, x, g)).values()))
    unequal_codes = unequal(codes(model), codes(alone))
    octavo.set_recipe(model, RECIPES[recipe])
    read = [[t.float() for layer in (m.up, m.down) for t in fp8_pair(layer, False)] for m in (model.eval(), alone)]
    same = all(map(torch.equal, *read))
    restored = unequal({n: whole(p) for n, p in octavo.restore(model).named_parameters()}, restored_values(alone))
    return unequal_codes + restored, sizes, largest, same


def restored_values(model: nn.Module) -> dict[str, Tensor]:
    return dict(octavo.restore(copy.deepcopy(model)).named_parameters())


def refused(mesh: Any, recipe: str, before: bool, rows: int = 128) -> tuple[str, bool]:
    """Return (the error about blocks that would be cut, whether all is as it was)."""
    layer = nn.Linear(256, rows)
    model = store(nn.Sequential(layer), recipe) if before else nn.Sequential(layer)
    with pytest.raises((ValueError, octavo.UnsupportedOpError)) as caught:
        parallelize_module(model, mesh, {"0": ours.ColwiseParallel()})
        store(model, recipe)
    return str(caught.value), isinstance(layer.weight if before else layer.weight.to_local(), StoredWeight) == before


def uneven(mesh: Any) -> tuple[list[str], float]:
    """49 rows and columns: (names of codes that differ, the largest difference of a step)."""
    alone, model = pair(k=30, n=49), pair(k=30, n=49)
    store(alone, "power of two"), store(model, "power of two")
    style = ours.ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, {"up": style, "down": ours.RowwiseParallel()})
    x, g = small(2, 8, 30), small(2, 8, 30)
    largest = max(differences(step(alone, x, g), step(model, x, g)).values())
    return unequal(codes(model), codes(alone)), largest


def adamw(model: nn.Module, master: str) -> AdamW:
    return AdamW(model.parameters(), lr=0.05, moments="fp8", master=master, weight_decay=0.1)


def stepped(mesh: Any, recipe: str, master: str) -> list[list[str]]:
    """The names of codes and scales that differ after each of three steps, of the same gradients."""
    runs, unequal_names = [(model, adamw(model, master)) for model in made(mesh, recipe, bias=False)], []
    for number in range(3):
        for model, optimizer in runs:
            shared_gradients([*model.parameters()], number)
            optimizer.step()
        unequal_names.append(unequal(*(codes(model) for model, _ in runs)))
    return unequal_names


def shared_gradients(parameters: list[nn.Parameter], number: int) -> None:
    """The same of any layout; larger at first, so that scales change."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    torch.manual_seed(number)
    for parameter in parameters:
        grad = torch.randn(parameter.shape) * 10.0 ** (2 - number)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad


SPLITS = {"a": 512, "b": 512}


class Splits(nn.Module):
    """A module with named splits of one input, and their readers."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.up = octavo.nn.Linear(256, SPLITS, bias=True, recipe=RECIPES[recipe])
        self.down = octavo.nn.Linear(512, 256, recipe=RECIPES[recipe])
        for parameter in self.parameters():
            parameter.data.copy_(small(*parameter.shape))
        self.up.weight.data[700, 0] = 16.0  # the second split's amax is the whole one's

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x)
        return self.down(a + b)


def exact_adamw(model: nn.Module) -> AdamW:
    """Return an AdamW without random bits, which depend on a parameter's number: splits are several."""
    return AdamW(model.parameters(), lr=0.05, moments="fp32", master="fp32", weight_decay=0.1)


def splits(mesh: Any, recipe: str, path: str) -> tuple[Any, ...]:
    """Return (layers whose codes differ from one rank's after steps or a load; the difference of outputs)."""
    torch.manual_seed(0)
    alone = store(Splits(recipe), recipe)
    model, other = copy.deepcopy(alone), copy.deepcopy(alone)
    octavo.nn.separate_splits(alone)
    for net in (model, other):
        shard(net, mesh)
    data = mesh["replicate"].get_local_rank() if mesh.ndim == 2 else 0
    x, g = small(2, 8, 256), small(2, 8, 256)
    wanted, got = step(alone, x, g), step(model, *((one.chunk(2)[data] if mesh.ndim == 2 else one) for one in (x, g)))
    y = wanted["y"].chunk(2)[data] if mesh.ndim == 2 else wanted["y"]
    largest = differences({"y": y}, {"y": got["y"]})["y"]
    for name in ("high_precision", recipe):  # FSDP2 gathers the same codes for other products
        both = [octavo.set_recipe(net, RECIPES[name])(x) for net in (alone, model)]
        largest = max(largest, float((both[0] - both[1]).abs().max()))
    runs = [(net, exact_adamw(net)) for net in (alone, model)]
    for number in range(3):
        for net, optimizer in runs:
            of_splits(net, number)
            optimizer.step()
            optimizer.zero_grad()
    for storage in (None, "fp8"):  # in the weights' dtype, and in FP8 again
        for net, optimizer in runs:
            PrecisionSchedule(net, optimizer, [Phase(RECIPES[recipe], weight_storage=storage)])
            of_splits(net, 3)
            optimizer.step()
            optimizer.zero_grad()
            net(x)
    save_checkpoint(path, model, runs[1][1])
    load_checkpoint(path, other, exact_adamw(other))
    layers = [(name, of_layer(getattr(net, name))) for net in (model, other) for name in ("up", "down")]
    return [name for name, of in layers if not all(map(torch.equal, of, of_layer(getattr(alone, name))))], largest


def of_layer(layer: Any) -> list[Tensor]:
    """Return codes and scales of a layer, or of all its splits."""
    return [whole(value) for name, value in layer.state_dict().items() if "weight" in name]


def of_splits(net: Any, number: int) -> None:
    """Give a model's weights gradients that are the same on any layout."""
    shared_gradients([layer.weight for layer in (net.up.a, net.up.b, net.down)], number)


ALL = ["dynamic", "power of two", "delayed", "blockwise"]
EXACT = ("power of two", "blockwise")  # scales of inputs are powers of two, so that sums are exact


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("styles", STYLES)
@pytest.mark.parametrize("before", [True, False], ids=["stored first", "parallel first"])
@pytest.mark.parametrize("recipe", ALL)
def test_equal_to_one_rank(pool, recipe, before, styles, shape):
    """Codes and scales, forward and backward, high precision, exports and restored layers equal one rank's."""
    for unequal, sizes, largest, same in pool.run(compare, shape, recipe, before, styles):
        assert unequal == [] and same
        assert sizes == [256 * 512 // shape[0]] * 2
        assert max(largest) <= (0.0 if recipe in EXACT else 1e-6)


@pytest.mark.parametrize("before", [True, False])
def test_blocks_are_not_cut(pool, before):
    for said, unchanged in pool.run(refused, (2,), "blockwise", before):
        assert "64 rows each are no whole blocks" in said and unchanged


def test_rows_and_columns_that_do_not_divide(pool):
    assert pool.run(uneven, (2,)) == [([], 0.0)] * 2


STEPS = [("dynamic", "split16", (2,)), *in_full(("blockwise", "split24", (2,)), ("dynamic", "fp32", (2, 2)))]


@pytest.mark.parametrize(("recipe", "master", "shape"), STEPS)
def test_steps_equal_those_of_one_rank(pool, recipe, master, shape):
    """Rows and columns; also beside FSDP2. Random bits too depend on an element's place in the whole weight."""
    assert all(unequal_names == [[]] * 3 for unequal_names in pool.run(stepped, shape, recipe, master))


@pytest.mark.parametrize("recipe", ["power of two", pytest.param("blockwise", marks=pytest.mark.full)])
def test_named_splits(pool, recipe, tmp_path):
    """Forward and after set_recipe; steps, whose scales are those of whole splits; another storage; a checkpoint."""
    assert pool.run(splits, (2, 2), recipe, str(tmp_path)) == [([], 0.0)] * 4
