import copy
import dataclasses
import pickle

import pytest

from octavo import E4M3, E5M2, Cast, Delayed, Dynamic, PerBlock, PerRow, PerTensor, Recipe, recipes
from octavo.scaling.recipe import PRODUCTS

TENSOR = Cast(E4M3, PerTensor())
GRADIENT = Cast(E5M2, PerTensor())


@pytest.mark.parametrize("length", [0, -1, 1.5, "4"])
def test_a_history_needs_room(length):
    with pytest.raises(ValueError, match=r"history_length=.*at least 1"):
        Delayed(history_length=length)


def test_reduce_is_one_of_two():
    with pytest.raises(ValueError, match="'mean': use 'max' or 'most_recent'"):
        Delayed(reduce="mean")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("E4M3", PerTensor()), "format"),
        ((E4M3, "row"), "granularity"),
        ((E4M3, PerTensor(), "delayed"), "rule"),
        ((E4M3, PerTensor(), Delayed), "rule"),
    ],
)
def test_a_cast_names_its_wrong_field_and_a_right_one(arguments, field):
    with pytest.raises(TypeError, match=rf"{field}=.*is no {field}; e\.g\. octavo"):
        Cast(*arguments)


@pytest.mark.parametrize("margin", [-1, 65, 0.5])
def test_margin_is_a_small_integer(margin):
    with pytest.raises(ValueError, match=f"margin={margin}.*0 to 64"):
        Cast(E4M3, PerTensor(), margin=margin)


@pytest.mark.parametrize("granularity", [PerRow(), PerBlock(1, 128)])
def test_delayed_is_per_tensor(granularity):
    with pytest.raises(ValueError, match="needs PerTensor"):
        Cast(E4M3, granularity, Delayed())


def test_rows_are_those_of_the_operand_as_laid():
    with pytest.raises(ValueError, match="contracted dimension last"):
        Cast(E4M3, PerRow(dim=-2))


def test_cast_repr():
    assert repr(TENSOR) == "Cast(E4M3, PerTensor(), Dynamic())"
    full = Cast(E5M2, PerTensor(), Delayed(2, "most_recent"), power_of_two=True, margin=3)
    assert repr(full) == (
        "Cast(E5M2, PerTensor(), Delayed(history_length=2, reduce='most_recent'), power_of_two=True, margin=3)"
    )
    assert eval(repr(full)) == full


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("casts", [TENSOR, (TENSOR,), [TENSOR, TENSOR], (TENSOR, None), (TENSOR, TENSOR, TENSOR)])
def test_a_product_is_none_or_a_pair_of_casts(product, casts):
    with pytest.raises(TypeError, match=f"{product}=.*None or a pair of Casts"):
        Recipe(**{product: casts})


@pytest.mark.parametrize("product", PRODUCTS)
def test_e5m2_times_e5m2_is_refused(product):
    with pytest.raises(ValueError, match=f"{product} multiplies E5M2 by E5M2"):
        Recipe(**{product: (GRADIENT, GRADIENT)})
    Recipe(**{product: (GRADIENT, TENSOR)})
    Recipe(**{product: (TENSOR, GRADIENT)})


def test_histories_agree_on_length_and_reduction():
    for other in (Delayed(8), Delayed(16, "most_recent")):
        with pytest.raises(ValueError, match="one kind of history"):
            Recipe(output=(Cast(E4M3, PerTensor(), Delayed(16)), Cast(E4M3, PerTensor(), other)))


def test_a_role_has_one_delayed_scale():
    delayed = Cast(E4M3, PerTensor(), Delayed())
    wider = Cast(E4M3, PerTensor(), Delayed(), margin=1)
    with pytest.raises(ValueError, match="input has one delayed scale but two casts"):
        Recipe(output=(delayed, delayed), grad_weight=(delayed, wider))
    # one of the two Dynamic, or another role: fine
    Recipe(output=(delayed, delayed), grad_weight=(delayed, TENSOR))
    Recipe(output=(delayed, wider), grad_weight=(wider, delayed))


def test_composable_per_product():
    base = recipes.dynamic()
    for product in PRODUCTS:
        mixed = dataclasses.replace(base, **{product: None}, name="mixed")
        assert [p for p in PRODUCTS if getattr(mixed, p) is None] == [product]
        assert not mixed.is_high_precision
        assert f"  {product:<12}high precision" in str(mixed).splitlines()
    rowwise = recipes.rowwise()
    mixed = dataclasses.replace(base, grad_weight=rowwise.grad_weight)
    assert mixed.input_casts == (base.output[0], rowwise.grad_weight[1], False)
    assert mixed.weight_casts.once
    assert mixed.grad_output_casts == (base.grad_input[0], rowwise.grad_weight[0], False)


def test_replaced_fields_renew_what_is_derived():
    recipe = dataclasses.replace(recipes.delayed(4), output=None, grad_input=None, grad_weight=None)
    assert recipe.is_high_precision
    assert recipe.delayed is None


def test_a_name_is_no_part_of_the_value():
    assert dataclasses.replace(recipes.dynamic(), name="mine") == recipes.dynamic()


def test_a_changed_recipe_does_not_keep_the_name():
    dynamic = recipes.dynamic()
    changed = dataclasses.replace(dynamic, grad_weight=None)
    assert changed.name == "dynamic with grad_weight changed"
    assert dataclasses.replace(copy.deepcopy(changed), saved=dynamic.output[0], output=None).name == (
        "dynamic with grad_weight changed with output, saved changed"
    )
    assert dataclasses.replace(dynamic, grad_weight=None, name="mine").name == "mine"
    assert dataclasses.replace(dynamic, output=dynamic.output).name == "dynamic"
    assert dataclasses.replace(pickle.loads(pickle.dumps(dynamic)), name="mine").name == "mine"


def test_one_delayed_cast_among_dynamic_ones():
    recipe = Recipe(output=(TENSOR, Cast(E4M3, PerTensor(), Delayed(5, "most_recent"), margin=1)))
    assert recipe.delayed == Delayed(5, "most_recent")
    assert recipe.delayed_update[2][1] == 1
    assert recipe.delayed_update[3] == "most_recent"


def test_same_tile_but_other_values_is_not_cast_once():
    recipe = Recipe(output=(TENSOR, TENSOR), grad_weight=(GRADIENT, Cast(E4M3, PerTensor(), Dynamic(), True)))
    assert not recipe.input_casts.once
    square = Cast(E4M3, PerBlock(32, 64))
    turned = Cast(E4M3, PerBlock(64, 32))
    assert Recipe(output=(square, square), grad_weight=(turned, turned)).input_casts.once
    assert not Recipe(output=(square, square), grad_weight=(square, square)).input_casts.once


def test_contractions_are_padded_where_no_operand_gets_a_tile_more():
    for make in (recipes.dynamic, recipes.delayed, recipes.rowwise, recipes.blockwise, recipes.mx):
        assert make().pads
    assert recipes.high_precision().pads
    odd = Cast(E4M3, PerBlock(16, 24))
    assert not Recipe(output=(TENSOR, odd)).pads
    assert Recipe(output=(TENSOR, Cast(E4M3, PerBlock(24, 16)))).pads


def test_saved_is_a_dynamic_cast_and_part_of_the_value():
    recipe = dataclasses.replace(recipes.mx(), saved=TENSOR)
    assert recipe != recipes.mx()
    assert (recipe.casts, recipe.pads, recipe.delayed) == (recipes.mx().casts, True, None)  # no product's
    assert recipes.mx().saved is None
    assert str(recipe).endswith("\n  saved       Cast(E4M3, PerTensor(), Dynamic())")
    assert "saved" not in str(recipes.mx())
    assert Recipe(saved=GRADIENT).is_high_precision  # it is no product


@pytest.mark.parametrize("saved", ["E4M3", E4M3, (TENSOR, TENSOR), Cast(E4M3, PerTensor(), Delayed())])
def test_anything_else_saved_is_refused(saved):
    with pytest.raises(TypeError, match=r"saved=.*None or a Cast whose rule is Dynamic\(\)"):
        Recipe(saved=saved)


def test_fast_accum_is_of_any_products_in_any_order():
    exact = dataclasses.replace(recipes.dynamic(), fast_accum=())
    assert exact != recipes.dynamic()
    assert str(exact).endswith("\n  fast_accum  none") and "fast_accum" not in str(recipes.dynamic())
    assert exact.name == "dynamic with fast_accum changed"
    assert Recipe(fast_accum=["grad_weight", "output"]) == Recipe(fast_accum=("output", "grad_weight"))


@pytest.mark.parametrize("fast_accum", [True, "output", ("input",), ({},), None])
def test_fast_accum_of_anything_else_is_refused(fast_accum):
    with pytest.raises(ValueError, match=r"fast_accum=.* must be a tuple of products"):
        Recipe(fast_accum=fast_accum)
