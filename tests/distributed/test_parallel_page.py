"""docs/tensor-parallel.md: its matrix has every recipe, with the counted bytes."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import recipes
from octavo.autograd.gather_input import GatherReader, can_gather
from octavo.distributed import Fp8Reduction
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT
from octavo.weights.stored import StoredWeight
from tests.support import parallel_tasks as tasks
from tests.support.byte_counter import GATHER
from tests.support.seams.features import OF_RECIPES

PAGE = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text(encoding="utf-8")
CALLS = {f"`{name}()`": name for name in ("dynamic", "delayed", "blockwise", "mx", "nvfp4", "high_precision")}
CALLS |= {"`rowwise(power_of_two=True)`": "rowwise", "`rowwise_with_gw_hp()`": "gw_hp"}
BF16 = 2 * 512 * 256


def matrix():
    lines = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 9]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}


def scales(recipe):
    """Return what decides how ranks send a recipe's input: the tiles of both its casts, and whether they are one."""
    return tuple((cast and cast.tile, cast and cast.is_delayed) for cast in recipe.input_casts[:2])


def test_no_recipe_is_left_out():
    rows = matrix()
    assert rows.keys() == CALLS.keys()
    shown = {scales(tasks.RECIPES[key]) for key in CALLS.values()}
    others = OF_RECIPES.keys() - {"dynamic_with_output_hp"}  # a head's
    assert [name for name in others if scales(OF_RECIPES[name]) not in shown] == []
    for call, (gathered, _, _, _, *others) in rows.items():
        reader = GatherReader(tasks.RECIPES[CALLS[call]], None, True)
        sent = can_gather(reader, INPUT, False)
        assert sent == can_gather(reader, GRAD_OUTPUT, False)
        assert gathered == ("in FP8" if sent else "in their dtype")
        stored = StoredWeight.why_not_storable(tasks.RECIPES[CALLS[call]]) is None
        assert others == ["yes", "yes", "yes" if stored else "never"]


ERRORS = {
    "`rowwise(power_of_two=True)`": ("rowwise", {}),
    "the same, `exact=True`": ("rowwise", {"exact": True}),
    "`rowwise(power_of_two=True)`, `reduction=Fp8Reduction()`": ("rowwise", {"reduction": Fp8Reduction()}),
    "`rowwise()`": ("twice", {}),
    "`rowwise()`, `exact=True`": ("twice", {"exact": True}),
    "`dynamic()`": ("dynamic", {}),
    "`dynamic()`, `reduction=Fp8Reduction()`": ("dynamic", {"reduction": Fp8Reduction()}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", ERRORS)
def test_errors(pool, case):
    """The page quotes the errors."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {case} | 0.0")]
    cells = [float(cell) for cell in row.strip("| ").split(" | ")[1:]]
    assert pool.run(tasks.errors, (2,), *ERRORS[case])[0] == pytest.approx(cells, abs=1.5e-3)


@pytest.mark.full
@pytest.mark.parametrize("call", CALLS)
def test_bytes(pool, call):
    assert matrix()[call][1:3] == [f"{counter[GATHER] / BF16:.3f}" for counter in gathers(pool, call, "")]
    assert matrix()[call][3] == f"{sum(counter[GATHER] for counter in gathers(pool, call, 'exact')) / 2 / BF16:.3f}"


def gathers(pool, call, styles):
    return pool.run(tasks.sequence_parallel, (2,), CALLS[call], True, torch.bfloat16, styles)[0][1:]


def saved_bytes(mesh, sequence):
    """Return the bytes that a block with named splits keeps for backward, for each token and feature of a rank."""
    block = octavo.nn.TransformerBlock(512, 1024, 8, recipe=recipes.dynamic(), dtype=torch.bfloat16)
    parallelize_module(block, mesh, tasks.block_plan(sequence))
    x = torch.randn(2, 512, 512, dtype=torch.bfloat16)
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in block.parameters()}
    sizes = {}

    def pack(tensor):
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block((tasks.own_tokens(x, mesh) if sequence else x).requires_grad_())
    assert output.shape[-1] == 512  # it lives until the sizes are counted, as what it keeps does
    return sum(sizes.values()) / x.numel()


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


@pytest.mark.full
def test_bytes_that_a_block_with_splits_keeps(pool):
    pattern = r"keeps ([\d.]+) bytes for backward .*? instead of [\d.]+ \(([\d.]+) instead"
    numbers = re.search(pattern, PAGE, re.DOTALL).groups()
    assert tuple(f"{pool.run(saved_bytes, (2,), sequence)[0]:.1f}" for sequence in (True, False)) == numbers
