"""Which inputs are gathered in FP8; what is gathered is in tests/distributed/test_tensor_parallel.py."""

import dataclasses

import pytest
import torch

from octavo import E4M3, PerBlock, recipes
from octavo.autograd.gather_input import arguments_of, gather_input, gathered_transposed, why_not_gathered
from octavo.scaling.recipe import Cast
from octavo.tensor.gathered_input import Wire
from tests.support.parallel_tasks import RECIPES

SQUARE = Cast(E4M3, PerBlock(128, 128))
SQUARES = dataclasses.replace(recipes.dynamic(), output=(SQUARE, SQUARE), grad_weight=(SQUARE, SQUARE))
REASONS = {
    "gw_hp": "high precision",
    "high_precision": "high precision",
    "blockwise": "128 tokens reach",
    "mx": "32 tokens",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_can_be_sent(recipe):
    reason = why_not_gathered(RECIPES[recipe], 100)
    assert REASONS[recipe] in reason if recipe in REASONS else reason is None
    if recipe not in ("gw_hp", "high_precision"):
        assert why_not_gathered(RECIPES[recipe], 256) is None
    assert "neither per tensor nor by rows" in why_not_gathered(SQUARES, 256)
    assert (arguments_of(RECIPES[recipe]) == arguments_of(recipes.dynamic())) == (recipe == "dynamic")


def gathered_as_cast_alone(mesh, recipe, shape, dim):
    """Whether codes and scales, with the strides of the whole input's own cast, are its."""
    from octavo.autograd.casts import INPUT, cast_role

    x, rank = torch.randn(shape), mesh.get_local_rank()
    whole = cast_role(x.reshape(-1, shape[-1]), RECIPES[recipe], INPUT, True, True, None)
    own = x.chunk(2, dim)[rank].contiguous()
    wire = Wire(mesh.get_group().group_name, 2, dim, [])
    found = gather_input(own, RECIPES[recipe], None, wire)
    operands = found.operands()
    transposed = operands.transposed or gathered_transposed(found.shard, RECIPES[recipe], wire)
    assert operands.transposed or gathered_transposed(found.shard, RECIPES[recipe], wire) is transposed  # once
    pairs = zip((*whole.as_is, *whole.transposed), (*operands.as_is, *transposed), strict=True)
    return found.shape == x.shape, [torch.equal(a.float(), b.float()) and a.shape == b.shape for a, b in pairs]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("shape", "dim"), [((2, 256, 40), 1), ((256, 3, 40), 0), ((512, 130), 0)])
@pytest.mark.parametrize("recipe", ["dynamic", "rowwise", "blockwise", "mx"])
def test_pairs_are_those_of_the_whole_input(pool, recipe, shape, dim):
    for same_shape, same in pool.run(gathered_as_cast_alone, (2,), recipe, shape, dim):
        assert same_shape and same == [True] * 4
