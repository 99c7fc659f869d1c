import copy
import dataclasses
import pickle

import pytest
from torch import nn

import octavo
from octavo import (
    E2M1,
    E4M3,
    E5M2,
    Cast,
    Delayed,
    Dynamic,
    PerBlock,
    PerRow,
    PerTensor,
    Recipe,
    RecipeMap,
    Rotation,
    Stochastic,
    recipes,
)
from octavo.formats import E4M4
from octavo.granularity import PADDING, tiles_along
from octavo.scaling.recipe import PRODUCTS, under
from tests.support.helpers import every_layer

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
    *((lambda m=m: Cast(E4M3, PerTensor(), margin=m), ValueError, f"margin={m}.*0 to 64") for m in (-1, 65, 0.5, True)),
    (lambda: Cast.of("Cast(E4M3, PerTensor(), power_of_two='False')"), ValueError, "'False' must be True or False"),
    (lambda: Cast.of("-" * 100_000 + "1"), ValueError, r"^'-{199}\.\.\. is no Cast, such as"),
    (lambda: Cast.of("foo.bar()"), ValueError, r"'foo\.bar\(\)' is no Cast, such as .*malformed node"),
    (lambda: Cast(E4M4, PerTensor()), ValueError, "E4M4 is none that casts write; use E4M3, E5M2, E2M1"),
    (lambda: Stochastic(True), ValueError, "seed=True"),
    (lambda: Cast(E4M3, PerRow(), Delayed()), ValueError, "needs PerTensor"),
    (lambda: Cast(E4M3, PerBlock(1, 128), Delayed()), ValueError, "needs PerTensor"),
    (lambda: Cast(E4M3, PerRow(dim=-2)), ValueError, "contracted dimension last"),
    (
        lambda: Cast(E2M1, PerBlock(16, 16), power_of_two=True, rotation=Rotation()),
        *(ValueError, r"rotation=.* runs along rows: give PerBlock\(1, 16\)"),
    ),
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
    assert mixed.weight_casts.coincide
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
    assert not recipe.input_casts.coincide
    square = Cast(E4M3, PerBlock(32, 64))
    turned = Cast(E4M3, PerBlock(64, 32))
    assert Recipe(output=(square, square), grad_weight=(turned, turned)).input_casts.coincide
    assert not Recipe(output=(square, square), grad_weight=(square, square)).input_casts.coincide


def test_contractions_are_padded_where_no_operand_gets_a_tile_more():
    for make in (recipes.dynamic, recipes.delayed, recipes.rowwise, recipes.blockwise, recipes.mx):
        assert make().may_pad
    assert recipes.high_precision().may_pad
    for cols in (*range(1, 2 * PADDING + 1), 4 * PADDING):
        tiles = [
            (tiles_along(terms, cols), tiles_along(terms + -terms % PADDING, cols)) for terms in range(8 * PADDING)
        ]
        recipe = Recipe(output=(TENSOR, Cast(E4M3, PerBlock(24, cols))))
        assert recipe.may_pad == all(padded == unpadded for unpadded, padded in tiles), cols


def test_saved_is_a_dynamic_cast_and_part_of_the_value():
    recipe = dataclasses.replace(recipes.mx(), saved=TENSOR)
    assert recipe != recipes.mx()
    assert (recipe.casts, recipe.may_pad, recipe.delayed) == (recipes.mx().casts, True, None)  # no product's
    assert recipes.mx().saved is None
    assert str(recipe).endswith("\n  saved       Cast(E4M3, PerTensor(), Dynamic())")
    assert "saved" not in str(recipes.mx())
    assert Recipe(saved=GRADIENT).is_high_precision  # it is no product


def test_a_map_takes_fast_accum_as_a_list_as_json_has_it():
    values = ["grad_input", "output"], ("output", "grad_input")
    by_list, by_tuple = (octavo.RecipeMap(recipes.dynamic(), {"*": {"fast_accum": value}}) for value in values)
    assert by_list == by_tuple and by_list.of("0").fast_accum == ("output", "grad_input")


def test_fast_accum_is_of_any_products_in_any_order():
    exact = dataclasses.replace(recipes.dynamic(), fast_accum=())
    assert exact != recipes.dynamic()
    assert str(exact).endswith("\n  fast_accum  none") and "fast_accum" not in str(recipes.dynamic())
    assert exact.name == "dynamic with fast_accum changed"
    assert Recipe(fast_accum=["grad_weight", "output"]) == Recipe(fast_accum=("output", "grad_weight"))


# --- recipes by names of layers

DYNAMIC, MX = recipes.dynamic(), recipes.mx()
BLOCK = Cast(E4M3, PerBlock(1, 128))


def test_patterns_match_whole_names_dots_too():
    recipe = RecipeMap(DYNAMIC, {"head": None, "blocks.0.*": MX, "*.fc2": recipes.rowwise(), "x.[ab]": MX, "y.?": MX})
    expected = {
        "head": "high_precision",
        "head.weight": "dynamic",
        "my.head": "dynamic",
        "blocks.0.attention.out": "mx",
        "blocks.0": "dynamic",
        "blocks.00.out": "dynamic",
        "blocks.1.mlp.fc2": "rowwise",
        "fc2": "dynamic",
        "x.a": "mx",
        "x.c": "dynamic",
        "y.1": "mx",
        "y.12": "dynamic",
        "Head": "dynamic",
        "": "dynamic",
    }
    assert {name: recipe.of(name).name for name in expected} == expected
    assert RecipeMap(DYNAMIC, {"*": MX}).of("") == MX
    assert RecipeMap(DYNAMIC).of("any") is DYNAMIC


def test_rules_apply_in_order_each_on_what_the_ones_before_gave():
    change = {"grad_weight": None}
    assert RecipeMap(DYNAMIC, {"a": None, "*": MX}).of("a") == MX
    assert RecipeMap(DYNAMIC, {"*": MX, "a": None}).of("a").is_high_precision
    changed = RecipeMap(DYNAMIC, {"a": MX, "*": change}).of("a")
    assert changed == dataclasses.replace(MX, grad_weight=None)
    assert changed.name == "mx with grad_weight changed"
    assert RecipeMap(DYNAMIC, {"*": change, "a": MX}).of("a") == MX
    both = RecipeMap(DYNAMIC, {"*": change, "a": {"saved": BLOCK, "output": (BLOCK, TENSOR)}}).of("a")
    assert both == dataclasses.replace(DYNAMIC, grad_weight=None, saved=BLOCK, output=(BLOCK, TENSOR))
    assert RecipeMap(DYNAMIC, {"a": None, "*": {"output": (TENSOR, TENSOR)}}).of("a") == Recipe((TENSOR, TENSOR))


def test_a_change_is_refused_only_where_no_recipe_that_it_may_change_can_have_it():
    delayed, change = recipes.delayed(), {"grad_weight": (Cast(E5M2, PerTensor(), Delayed(4)), TENSOR)}
    plain = {product: getattr(DYNAMIC, product) for product in ("output", "grad_input", "grad_weight")}
    for before in (DYNAMIC, None, plain):
        recipe = RecipeMap(delayed, {"x.*": before, "x.fc": change})
        expected = dataclasses.replace(DYNAMIC if before else Recipe(), **change)
        assert recipe.of("x.fc") == expected and recipe.of("fc") is delayed
        with pytest.raises(ValueError, match="one kind of history"):
            RecipeMap(delayed, {"x.*": before, "*fc": change}).of("fc")  # as the default stays its recipe
    for rules in ({"*": change}, {"x": recipes.delayed(8), "*": change}, {"*": change, "x": DYNAMIC}):
        with pytest.raises(ValueError, match="one kind of history"):
            RecipeMap(delayed, rules)


def test_layers_share_one_recipe_named_after_its_own():
    recipe = RecipeMap(DYNAMIC, {"*.fc2": {"grad_weight": None}})
    assert recipe.of("a.fc2") is recipe.of("b.fc2")
    mine = RecipeMap(dataclasses.replace(DYNAMIC, name="mine"), {"*.fc2": {"grad_weight": None}})
    assert mine.of("a.fc2") == recipe.of("a.fc2")
    assert mine.of("a.fc2").name == "mine with grad_weight changed"
    for nothing in ({}, {"saved": None}, {"output": DYNAMIC.output}):
        assert RecipeMap(DYNAMIC, {"*": nothing}).of("a").name == "dynamic"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("dynamic",), TypeError, r"default='dynamic' is no octavo\.Recipe"),
        ((recipes.dynamic,), TypeError, r"is no octavo\.Recipe"),
        ((RecipeMap(DYNAMIC),), TypeError, r"is no octavo\.Recipe"),
        ((DYNAMIC, [("a", None)]), TypeError, "is no dict of patterns and rules"),
        ((DYNAMIC, {"a": "mx"}), TypeError, "'a': 'mx' is no name's pattern with a Recipe, None or changes"),
        ((DYNAMIC, {0: None}), TypeError, "0: None is no name's pattern"),
        ((DYNAMIC, {"a": RecipeMap(DYNAMIC)}), TypeError, "is no name's pattern"),
        ((DYNAMIC, {"a": {"grad": None}}), ValueError, r"changes \['grad'\]; a recipe has output, .*, saved"),
        ((DYNAMIC, {"a": {"name": "x"}}), ValueError, r"changes \['name'\]"),
        ((DYNAMIC, {"a": {"output": TENSOR}}), TypeError, "output=.* must be None or a pair of Casts"),
        ((DYNAMIC, {"a": {"output": [TENSOR, TENSOR]}}), TypeError, "output=.* must be None or a pair of Casts"),
        ((DYNAMIC, {"a": {"saved": Cast(E4M3, PerTensor(), Delayed())}}), TypeError, "saved=.*Dynamic"),
        ((DYNAMIC, {"a": {"output": (Cast(E5M2, PerTensor()),) * 2}}), ValueError, "E5M2 by E5M2"),
    ],
)
def test_wrong_rules(arguments, error, message):
    with pytest.raises(error, match=message):
        RecipeMap(*arguments)


def test_it_is_a_value():
    rules = {"a": None, "*": {"grad_weight": None}}
    recipe = RecipeMap(DYNAMIC, rules)
    same = RecipeMap(recipes.dynamic(), {"a": None, "*": {"grad_weight": None}})
    assert recipe == same and hash(recipe) == hash(same)
    assert recipe != DYNAMIC
    reversed_rules = dict(reversed(rules.items()))
    for other in (RecipeMap(MX, rules), RecipeMap(DYNAMIC, {"a": None}), RecipeMap(DYNAMIC, reversed_rules)):
        assert recipe != other
    assert recipe != under(recipe, "b")
    assert len({recipe, same, under(recipe, "b")}) == 2
    assert copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe)) == recipe
    rules["b"] = None  # the caller's own
    rules["*"]["output"] = None
    assert recipe == same
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.default = MX


@pytest.mark.parametrize("call", [octavo.convert, octavo.set_recipe], ids=lambda call: call.__name__)
def test_convert_and_set_recipe_take_it(call):
    net = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), "head": nn.Linear(8, 4)})
    if call is octavo.set_recipe:
        octavo.convert(net, DYNAMIC, select=every_layer)
    options = {"select": every_layer} if call is octavo.convert else {}
    delayed = recipes.delayed(4)
    call(net, RecipeMap(delayed, {"layers.0": MX, "head": None, "layers.[01]": {"grad_weight": None}}), **options)
    names = ["mx with grad_weight changed", "delayed with grad_weight changed", "delayed", "high_precision"]
    assert [m.recipe.name for m in octavo.summary(net).modules] == names
    assert net["layers"][2].delayed_amax_history.shape == (3, 4)
    assert not hasattr(net["head"], "delayed_scale")
    with pytest.warns(UserWarning, match=r"match no module: \['lm_head', 'layer\.0'\]") as caught:
        call(net, RecipeMap(DYNAMIC, {"lm_head": None, "head": None, "layer.0": None}), **options)
    assert caught[0].filename == __file__  # where the caller is
    with pytest.raises(TypeError, match=r"is no octavo\.Recipe"):
        call(net, {"head": None}, **options)


@pytest.mark.parametrize(
    "build",
    [
        lambda r: octavo.nn.Linear(8, 8, recipe=r),
        lambda r: octavo.nn.LayerNormLinear(8, 8, recipe=r),
        lambda r: octavo.nn.RMSNormLinear(8, 8, recipe=r),
        lambda r: octavo.nn.LayerNormMLP(8, 8, recipe=r),
        lambda r: octavo.nn.RMSNormMLP(8, 8, recipe=r),
        lambda r: octavo.nn.SelfAttention(8, 2, recipe=r),
        lambda r: octavo.nn.TransformerBlock(8, 8, 2, recipe=r),
    ],
    ids=["Linear", "LayerNormLinear", "RMSNormLinear", "LayerNormMLP", "RMSNormMLP", "SelfAttention", "Block"],
)
def test_every_module_asks_for_its_parts_by_the_names_they_have(build):
    names = [module.name for module in octavo.summary(build(None)).modules]
    for chosen in names:
        module = build(RecipeMap(DYNAMIC, {chosen: MX}))
        names_of_recipes = {m.name: m.recipe.name for m in octavo.summary(module).modules}
        assert names_of_recipes == {name: "mx" if name == chosen else "dynamic" for name in names}
        octavo.set_recipe(module, DYNAMIC)
        assert octavo.set_recipe(module, RecipeMap(DYNAMIC, {chosen: MX})) is module
        assert {m.name: m.recipe.name for m in octavo.summary(module).modules} == names_of_recipes
