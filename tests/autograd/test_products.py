import dataclasses
import functools
import itertools
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import E4M3, Cast, Delayed, HigherOrderGradientError, PerBlock, PerTensor, Recipe, kernels, recipes
from octavo.autograd import products
from octavo.autograd.casts import CastRequest, cast_role
from octavo.autograd.products import (
    Layer,
    backward_plan,
    cast_gradient,
    commit_forward,
    gradients_needed_now,
    linear,
    refuse_in_backward,
    to_save,
    unrounded,
)
from octavo.kernels.arguments import RotaryHeads
from octavo.scaling.delayed import have_same_inputs
from octavo.scaling.recipe import INPUT, PRODUCTS, WEIGHT
from tests.support.helpers import FP8_RECIPES, delayed_state, sqnr
from tests.support.passes import end_step

T, K, N = 48, 96, 80
MIXED = {**FP8_RECIPES, "high_precision": recipes.high_precision}


def run(recipe, x, weight, bias, grad, state=None):
    """Return y, dx, dW and db by a recipe."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    bias = None if bias is None else bias.clone().requires_grad_()
    state = delayed_state(recipe) if state is None else state
    operands = cast_role(weight.detach(), CastRequest(recipe, WEIGHT, True, True), state)
    y = linear(x, weight, bias, Layer(operands, recipe, state, True))
    y.backward(grad)
    return y.detach(), x.grad, weight.grad, None if bias is None else bias.grad


def data(dtype=torch.float32):
    return tuple(torch.randn(shape, dtype=dtype) for shape in ((T, K), (N, K), N, (T, N)))


def truth(x, weight, bias, grad):
    x, weight, bias, grad = (t.double() for t in (x, weight, bias, grad))
    return F.linear(x, weight, bias), grad @ weight, grad.t() @ x, grad.sum(0)


@pytest.mark.parametrize("output", MIXED)
@pytest.mark.parametrize("grad_input", MIXED)
@pytest.mark.parametrize("grad_weight", MIXED)
def test_each_product_is_the_one_of_its_own_recipe(output, grad_input, grad_weight):
    names = dict(zip(PRODUCTS, (output, grad_input, grad_weight), strict=True))
    chosen = {product: getattr(MIXED[name](), product) for product, name in names.items()}
    tensors = data()
    *results, db = run(Recipe(**chosen), *tensors)
    *exact, sums = truth(*tensors)
    for (product, name), result, expected in zip(names.items(), results, exact, strict=True):
        if name == "high_precision":
            torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-4)
        else:
            alone = run(Recipe(**{product: chosen[product]}), *tensors)[PRODUCTS.index(product)]
            torch.testing.assert_close(result, alone, rtol=1e-6, atol=1e-5)
            assert 22 < sqnr(result, expected) < 34, product
    torch.testing.assert_close(db, sums.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_pairs_are_saved_as_casts_wrote_them(name):
    recipe, (x, weight, *_) = FP8_RECIPES[name](), data()
    state = delayed_state(recipe)
    requests = [CastRequest(recipe, role, True, True) for role in (INPUT, WEIGHT)]
    of_x, of_weight = (cast_role(*cast, state) for cast in zip((x, weight), requests, strict=True))
    saved = to_save(x, of_x, weight, Layer(of_weight, recipe, state, True), True, True)
    pairs = (saved.x_q, saved.x_scale_inv), (saved.weight_q, saved.weight_scale_inv)
    for pair, written in zip(pairs, (of_x.transposed, of_weight.transposed), strict=True):
        assert all(one is other for one, other in zip(pair, written, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_results(dtype):
    x, weight, bias, grad = data(dtype)
    for result in run(recipes.dynamic(), x, weight, bias, grad):
        assert result.dtype == dtype
    y, dx, dw, db = run(recipes.dynamic(), x, weight.float(), bias.double(), grad)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype, dtype, torch.float32, torch.float64)


def test_a_delayed_role_of_a_mixed_recipe_is_committed_and_the_others_are_not():
    delayed, block = Cast(E4M3, PerTensor(), Delayed(2)), Cast(E4M3, PerBlock(1, 32))
    for recipe, rows in (
        (Recipe(output=(delayed, block)), [True, False, False]),
        (Recipe(output=(block, delayed)), [False, True, False]),
        (Recipe(grad_input=(delayed, block)), [False, False, True]),
        (Recipe(grad_weight=(block, delayed)), [True, False, False]),
        (dataclasses.replace(recipes.delayed(2), grad_weight=None), [True, True, True]),
        (dataclasses.replace(recipes.delayed(2), output=None), [True, True, True]),
        (dataclasses.replace(recipes.delayed(2), grad_input=(block, block)), [True, True, True]),
    ):
        state = delayed_state(recipe)
        x, weight, bias, grad = data()
        run(recipe, x, weight, bias, grad, state)
        assert state.scale.ne(0).tolist() == rows
        assert state.amax_history[:, 0].ne(0).tolist() == rows
        assert not state.amax_history[:, 1].any()  # committed once


def test_layers_that_cast_no_input_still_share_its_history():
    recipe, (x, weight, *_) = recipes.delayed(2), data()
    state, other = delayed_state(recipe), delayed_state(recipe)
    operands = cast_role(weight, CastRequest(recipe, WEIGHT, True, True), None)
    plan = backward_plan(Layer(operands, recipe, state, True), x.dtype, weight, None, input_cast=1)
    amax = torch.ones(1, 1)
    for of_input, shares in ((None, True), (amax, False)):
        assert have_same_inputs(state, other)
        commit_forward(plan, of_input, amax)
        assert have_same_inputs(state, other) == torch.equal(state.amax_history[0], other.amax_history[0]) == shares


def test_a_gradient_in_high_precision_is_kept_only_where_a_product_reads_it():
    x, weight, bias, grad = data()
    for left in [None, *PRODUCTS]:
        recipe = dataclasses.replace(recipes.dynamic(), **({} if left is None else {left: None}))
        layer = Layer(cast_role(weight, CastRequest(recipe, WEIGHT, True, True), None), recipe, None, True)
        saved = to_save(x, cast_role(x, CastRequest(recipe, INPUT, True, True), None), weight, layer, True, True)
        for needs in itertools.product([False, True], repeat=3):
            g = cast_gradient(grad, saved, backward_plan(layer, x.dtype, weight, bias), needs)
            read = (needs[0] and left == "grad_input") or (needs[1] and left == "grad_weight")
            summed = needs[2] and g.column_sum is None
            assert (g.grad_TN is not None) == (read or summed)


@pytest.mark.parametrize("layer", [octavo.nn.Linear, octavo.nn.LayerNormLinear, octavo.nn.LayerNormMLP])
def test_codes_that_no_product_reads_any_more_are_freed(layer, monkeypatch):
    """The gradient's codes as they lie are freed before grad_weight, which reads others."""
    read, product = [], products._matmul

    def watched(recipe, name, a, *arguments):
        if name == "grad_input":
            read.append(weakref.ref(a[0]))
        elif name == "grad_weight":
            assert read.pop()() is None
        return product(recipe, name, a, *arguments)

    module = layer(K, N, recipe=recipes.rowwise())
    y = module(torch.randn(T, K, requires_grad=True))
    monkeypatch.setattr(products, "_matmul", watched)
    y.sum().backward()
    assert not read and all(parameter.grad is not None for parameter in module.parameters())


def test_a_graph_asks_nothing_of_autograd(monkeypatch):
    """It computes all gradients that its inputs need, and it is no pass of second derivatives."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    ctx = SimpleNamespace(needs_input_grad=(True, False, True, False), are_tensors=(True, True, False))
    assert gradients_needed_now(ctx) == (True, False, True)
    refuse_in_backward(torch.ones(2), None)
    monkeypatch.undo()
    with pytest.raises(HigherOrderGradientError):
        refuse_in_backward(torch.ones(2, requires_grad=True), None)


def test_heads_that_are_turned_are_unrounded_as_they_are_computed():
    q, k, v = (torch.randn(2, 5, heads, 8) for heads in (4, 2, 2))
    angles = torch.rand(1, 5, 8) * 6
    heads = RotaryHeads(q, k, v, angles.cos(), angles.sin(), False)
    assert torch.equal(unrounded(heads, None), kernels.rotary(*heads).view(10, 64)) and heads.shape == (10, 64)


def test_nothing_asks_for_a_gradient():
    (x, weight, bias, grad), recipe = data(), recipes.dynamic()
    layer = Layer(cast_role(weight, CastRequest(recipe, WEIGHT, True, True), None), recipe, None, True)
    for bias_or_none in (bias, None):
        y = linear(x, weight, bias_or_none, layer)
        assert not y.requires_grad
        assert torch.equal(y, run(recipe, x, weight, bias_or_none, grad)[0])


@pytest.mark.parametrize("fast_accum", [("output",), ("grad_weight", "grad_input"), ()])
def test_each_product_accumulates_as_the_recipe_says(fast_accum):
    asked = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.octavo.matmul.default:
                asked.append(args[-1])
            return func(*args, **kwargs or {})

    with Products():
        run(dataclasses.replace(recipes.dynamic(), fast_accum=fast_accum), *data())
    assert asked == [product in fast_accum for product in PRODUCTS]


class Grouped(octavo.nn.GroupedLinear):
    """A GroupedLinear with the same two groups of rows each time."""

    def forward(self, x):
        return super().forward(x, torch.tensor([5, 16], dtype=torch.int32))


def checkpointed(module, reentrant):
    return lambda x: checkpoint(module, x, use_reentrant=reentrant)


MODULES = {
    "linear": lambda recipe: octavo.nn.Linear(32, 32, recipe=recipe),
    "fused": lambda recipe: octavo.nn.RMSNormMLP(32, 48, activation="gelu", recipe=recipe),
    "grouped": lambda recipe: Grouped(2, 32, 32, recipe=recipe),
}
CALLS = {
    "eager": lambda module: module,
    "compiled": functools.partial(torch.compile, backend="aot_eager"),
    "checkpointed": functools.partial(checkpointed, reentrant=False),
    "reentrant": functools.partial(checkpointed, reentrant=True),
}


def two_losses(recipe, make, call):
    """The input's gradient of two losses over one graph, the first a thousandth, in a second step; the module."""
    torch.manual_seed(0)
    module = make(recipe)
    called = call(module)
    for _ in range(2):
        x = torch.randn(16, 32, requires_grad=True)
        y = called(x)
        (y.square().sum() / 1000).backward(retain_graph=True)
        y.square().sum().backward()
        end_step()
    return x.grad, module


@pytest.mark.parametrize(
    ("make", "call"),
    [
        *((name, "eager") for name in MODULES),
        ("linear", "checkpointed"),
        ("linear", "reentrant"),
        pytest.param("linear", "compiled", marks=pytest.mark.full),
    ],
)
def test_a_larger_loss_over_the_same_graph_is_not_clipped_to_the_first(make, call):
    """A second, larger loss is rounded nearly as well as with each tensor's own amax, which remembers nothing."""
    how = MODULES[make], CALLS[call]
    by_each = recipes.delayed(4), recipes.dynamic(), recipes.high_precision()
    (delayed, module), (fresh, _), (exact, _) = (two_losses(recipe, *how) for recipe in by_each)
    assert sqnr(delayed, exact) > sqnr(fresh, exact) - 3
    for name, history in octavo.nn.delayed_state_dict(module).items():
        if name.endswith("history"):
            assert (history > 0).sum(1).tolist() == [2, 2, 2]


def test_a_pass_for_one_weight_leaves_the_other_layer_to_the_next():
    module, x = MODULES["fused"](recipes.delayed(4)), torch.randn(16, 32, requires_grad=True)
    loss = module(x).square().sum()
    torch.autograd.grad(loss, module.fc2.weight, retain_graph=True)
    assert not module.fc1.delayed_scale.any() and module.fc2.delayed_scale.all()
    loss.backward()
    assert module.fc1.delayed_scale.all()


def test_the_way_of_a_linear_is_as_the_page_on_architecture_says():
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## One Linear, function by function\n")[2].partition("\n## ")[0]
    layer, called = octavo.nn.Linear(K, N, recipe=recipes.delayed()), []

    def note(frame, event, _):
        if event == "call" and "octavo" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        layer(torch.randn(T, K, requires_grad=True)).sum().backward()
    finally:
        sys.setprofile(None)
    names, later = re.findall(r"`(\w+)`", section.replace("`cast_role` where there is no state", "")), iter(called)
    assert len(names) == 17 and [name for name in names if name not in later] == []
