import pytest
import torch

from octavo import E4M3, Cast, Delayed, Dynamic, PerRow, PerTensor, Recipe, recipes
from octavo.autograd.casts import GRAD_OUTPUT, INPUT, Operands, State, cast_role
from octavo.kernels import dequantize
from tests.support.helpers import FP8_RECIPES, CountOps, delayed_state, sqnr


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_cast_role_lays_each_operand_for_its_product(name):
    recipe = FP8_RECIPES[name]()
    x = torch.randn(130, 70)
    operands = cast_role(x, recipe, INPUT, True, True, delayed_state(recipe))
    for pair, laid, cast in (
        (operands.as_is, x, recipe.output[0]),
        (operands.transposed, x.t(), recipe.grad_weight[1]),
    ):
        qdata, scale_inv = pair
        assert qdata.shape == laid.shape
        assert scale_inv.shape == cast.granularity.scale_shape(laid.shape)
        back = dequantize(qdata, scale_inv, cast.tile, torch.float32)
        assert 29 < sqnr(back, laid) < 36
    assert (operands.amax is None) == (recipe.delayed is None)


def test_only_what_is_asked_for_is_cast():
    x = torch.randn(8, 8)
    rowwise = recipes.rowwise()
    assert cast_role(x, rowwise, INPUT, False, False, None) == Operands()
    assert cast_role(x, rowwise, INPUT, True, False, None).transposed is None
    assert cast_role(x, rowwise, INPUT, False, True, None).as_is is None
    assert cast_role(x, recipes.high_precision(), INPUT, True, True, None) == Operands()
    for recipe, expected in ((recipes.dynamic(), {"cast": 1}), (rowwise, {"cast_two_scalings": 1})):
        with CountOps() as ops:
            cast_role(x, recipe, INPUT, True, True, None)
        assert ops.calls == expected  # x is read once


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_column_sums_come_with_the_cast(name):
    x = torch.randn(8, 8)
    recipe = FP8_RECIPES[name]()
    for transposed in (False, True):
        sums = cast_role(x, recipe, GRAD_OUTPUT, True, transposed, delayed_state(recipe), column_sum=True).column_sum
        assert torch.equal(sums, x.sum(0))
    assert cast_role(x, recipe, GRAD_OUTPUT, True, True, delayed_state(recipe)).column_sum is None


def test_a_role_with_one_delayed_and_one_dynamic_cast():
    delayed = Cast(E4M3, PerTensor(), Delayed(2))
    row = Cast(E4M3, PerRow(), Dynamic())
    x = torch.randn(8, 8)
    for casts in ((delayed, row), (row, delayed)):
        recipe = Recipe(output=(casts[0], row), grad_weight=(row, casts[1]))
        operands = cast_role(x, recipe, INPUT, True, True, State(torch.zeros(3), torch.zeros(3, 2)))
        assert operands.amax == x.abs().max()
