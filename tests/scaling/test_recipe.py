import copy
import dataclasses
import pickle

import pytest

from octavo import E4M3, E5M2, Cast, Delayed, Dynamic, PerBlock, PerRow, PerTensor, Recipe, recipes
from octavo.scaling.recipe import PRODUCTS

TENSOR = Cast(E4M3, PerTensor())
GRADIENT = Cast(E5M2, PerTensor())
DELAYED = Cast(E4M3, PerTensor(), Delayed(16))
WIDER = dataclasses.replace(DELAYED, margin=1)
A_PAIR = r"=.*None or a pair of Casts"
REFUSED = [
    *((lambda n=n: Delayed(history_length=n), ValueError, r"history_length=.*at least 1") for n in (0, -1, 1.5, "4")),
    (lambda: Delayed(reduce="mean"), ValueError, "'mean': use 'max' or 'most_recent'"),
    (lambda: Cast("E4M3", PerTensor()), TypeError, r"format=.*is no format; e\.g\. octavo"),
    (lambda: Cast(E4M3, "row"), TypeError, r"granularity=.*is no granularity; e\.g\. octavo"),
    (lambda: Cast(E4M3, PerTensor(), "delayed"), TypeError, r"rule=.*is no rule; e\.g\. octavo"),
    (lambda: Cast(E4M3, PerTensor(), Delayed), TypeError, r"rule=.*is no rule; e\.g\. octavo"),
    *((lambda m=m: Cast(E4M3, PerTensor(), margin=m), ValueError, f"margin={m}.*0 to 64") for m in (-1, 65, 0.5)),
    (lambda: Cast(E4M3, PerRow(), Delayed()), ValueError, "needs PerTensor"),
    (lambda: Cast(E4M3, PerBlock(1, 128), Delayed()), ValueError, "needs PerTensor"),
    (lambda: Cast(E4M3, PerRow(dim=-2)), ValueError, "contracted dimension last"),
    (lambda: Recipe(output=TENSOR), TypeError, f"output{A_PAIR}"),
    (lambda: Recipe(grad_input=(TENSOR,)), TypeError, f"grad_input{A_PAIR}"),
    (lambda: Recipe(grad_weight=[TENSOR, TENSOR]), TypeError, f"grad_weight{A_PAIR}"),
    (lambda: Recipe(output=(TENSOR, None)), TypeError, f"output{A_PAIR}"),
    (lambda: Recipe(output=(TENSOR, TENSOR, TENSOR)), TypeError, f"output{A_PAIR}"),
    *((lambda p=p: Recipe(**{p: (GRADIENT, GRADIENT)}), ValueError, f"{p} multiplies E5M2 by E5M2") for p in PRODUCTS),
    *(
        (lambda rule=rule: Recipe((DELAYED, Cast(E4M3, PerTensor(), rule))), ValueError, "one kind of history")
        for rule in (Delayed(8), Delayed(16, "most_recent"))
    ),
    (
        lambda: Recipe(output=(DELAYED, DELAYED), grad_weight=(DELAYED, WIDER)),
        *(ValueError, "input has one delayed scale but two casts"),
    ),
    *(
        (lambda saved=saved: Recipe(saved=saved), TypeError, r"saved=.*None or a Cast whose rule is Dynamic\(\)")
        for saved in ("E4M3", E4M3, (TENSOR, TENSOR), DELAYED)
    ),
    *(
        (lambda fast=fast: Recipe(fast_accum=fast), ValueError, r"fast_accum=.* must be a tuple of products")
        for fast in (True, "output", ("input",), ({},), None)
    ),
]


@pytest.mark.parametrize(("make", "error", "said"), REFUSED)
def test_what_is_no_recipe_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_what_comes_close_to_that_is_one():
    Recipe(output=(GRADIENT, TENSOR), grad_input=(TENSOR, GRADIENT))
    Recipe(output=(DELAYED, DELAYED), grad_weight=(DELAYED, TENSOR))  # one of the two Dynamic
    Recipe(output=(DELAYED, WIDER), grad_weight=(WIDER, DELAYED))  # another role


def test_cast_repr():
    assert repr(TENSOR) == "Cast(E4M3, PerTensor(), Dynamic())"
    full = Cast(E5M2, PerTensor(), Delayed(2, "most_recent"), power_of_two=True, margin=3)
    assert repr(full) == (
        "Cast(E5M2, PerTensor(), Delayed(history_length=2, reduce='most_recent'), power_of_two=True, margin=3)"
    )
    assert eval(repr(full)) == full


def test_composable_per_product():
    base = recipes.dynamic()
    for product in PRODUCTS:
        mixed = dataclasses.replace(base, **{product: None}, name="mixed")
        assert [p for p in PRODUCTS if getattr(mixed, p) is None] == [product]
        assert not mixed.is_high_precision
        assert f"  {product:<12}high precision" in str(mixed).splitlines()
    assert dataclasses.replace(base, name="mine") == base
    none = dataclasses.replace(recipes.delayed(4), **dict.fromkeys(PRODUCTS))
    assert none.is_high_precision and none.delayed is None
    rowwise = recipes.rowwise()
    mixed = dataclasses.replace(base, grad_weight=rowwise.grad_weight)
    assert mixed.input_casts == (base.output[0], rowwise.grad_weight[1], False)
    assert mixed.weight_casts.once
    assert mixed.grad_output_casts == (base.grad_input[0], rowwise.grad_weight[0], False)


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


def test_fast_accum_is_of_any_products_in_any_order():
    exact = dataclasses.replace(recipes.dynamic(), fast_accum=())
    assert exact != recipes.dynamic()
    assert str(exact).endswith("\n  fast_accum  none") and "fast_accum" not in str(recipes.dynamic())
    assert exact.name == "dynamic with fast_accum changed"
    assert Recipe(fast_accum=["grad_weight", "output"]) == Recipe(fast_accum=("output", "grad_weight"))
