"""GroupedLinear computes what a loop over experts of octavo.nn.Linear does, each on its own rows."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import octavo
from octavo import kernels, recipes
from octavo.autograd.casts import WEIGHT, cast_role
from octavo.autograd.products import Layer, linear
from octavo.errors import HigherOrderGradientError
from octavo.scaling.delayed import State
from octavo.scaling.recipe import PRODUCTS
from tests.support.groups import SIZES, offsets_of, slices_of
from tests.support.helpers import FP8_RECIPES, assert_equal, gradients

E, K, N = 4, 48, 40
RECIPES = FP8_RECIPES | {"gw_hp": recipes.rowwise_with_gw_hp, "high precision": recipes.high_precision}
each_recipe = pytest.mark.parametrize("name", RECIPES)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def layer_of(recipe: octavo.Recipe, experts: int = E, **options: Any) -> octavo.nn.GroupedLinear:
    torch.manual_seed(0)
    return octavo.nn.GroupedLinear(experts, K, N, recipe=recipe, **options)


def batch(
    sizes: Sequence[int], rest: int = 0, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Rows and the gradient of what a layer makes of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes) + rest
    x, grad = (torch.randn(rows, size, generator=generator).to(dtype) for size in (K, N))
    return x.requires_grad_(), grad


def loop_of(layer: octavo.nn.GroupedLinear) -> list[octavo.nn.Linear]:
    found = []
    for expert in range(layer.experts):
        one = octavo.nn.Linear(K, N, layer.bias is not None, dtype=layer.weight.dtype, recipe=layer.recipe)
        one.load_state_dict({name: value[expert] for name, value in layer.state_dict().items()})
        found.append(one)
    return found


@each_recipe
@each_dtype
@pytest.mark.parametrize(("sizes", "rest"), SIZES, ids=str)
def test_equal_to_a_loop_of_linears(name: str, dtype: torch.dtype, sizes: list[int], rest: int) -> None:
    layer = layer_of(RECIPES[name](), len(sizes), bias=name != "high precision", dtype=dtype)
    x, grad = batch(sizes, rest, dtype)
    y = layer(x, offsets_of(sizes))
    y.backward(grad)
    other = x.detach().clone().requires_grad_()
    loop, rows = loop_of(layer), slices_of(sizes)
    expected = [one(other[of]) for one, of in zip(loop, rows, strict=True)]
    torch.cat(expected).backward(grad[: sum(sizes)])
    assert torch.equal(y[: sum(sizes)], torch.cat(expected)) and not y[sum(sizes) :].any()
    assert torch.equal(x.grad, torch.zeros_like(x) if other.grad is None else other.grad)
    for expert, (one, size) in enumerate(zip(loop, sizes, strict=True)):
        if size == 0:
            assert not any(p.grad[expert].any() for p in layer.parameters())
        else:
            assert torch.equal(layer.weight.grad[expert], one.weight.grad)
            if layer.bias is not None:  # torch adds rows in another order
                torch.testing.assert_close(layer.bias.grad[expert], one.bias.grad)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_a_product_in_high_precision_leaves_the_others(name: str, product: str) -> None:
    recipe, sizes = FP8_RECIPES[name](), [5, 0, 17, 3]
    results = []
    for chosen in (recipe, dataclasses.replace(recipe, **{product: None}), recipes.high_precision()):
        layer, (x, grad) = layer_of(chosen, bias=False), batch(sizes)
        y = layer(x, offsets_of(sizes))
        y.backward(grad)
        results.append(dict(zip(PRODUCTS, (y.detach(), x.grad, layer.weight.grad), strict=True)))
    fp8, mixed, high = results
    for each in PRODUCTS:
        torch.testing.assert_close(mixed[each], (high if each == product else fp8)[each], rtol=1e-6, atol=1e-5)


def test_experts_share_a_delayed_history() -> None:
    """By hand: each expert's products read the one state, and the largest amax of all is rolled."""
    recipe = recipes.delayed(3)
    layer = layer_of(recipe)
    state = State.empty(3)
    parameters = [[p.detach().clone() for p in one.parameters()] for one in loop_of(layer)]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step, sizes in enumerate(([9, 0, 4, 30], [0, 0, 0, 5], [1, 2, 3, 4])):
        x, grad = batch(sizes, seed=step)
        y = layer(x, offsets_of(sizes))
        y.backward(grad)
        for (weight, bias), of in zip(parameters, slices_of(sizes), strict=True):
            leaves = [leaf.detach().requires_grad_() for leaf in (x[of], weight, bias)]
            operands = cast_role(weight, recipe, WEIGHT, True, True, state)
            one = linear(*leaves, Layer(operands, recipe, state, False))
            one.backward(grad[of])
            assert torch.equal(one, y[of]) and torch.equal(leaves[0].grad, x.grad[of])
            weight.add_(leaves[1].grad, alpha=-0.1)
            bias.add_(leaves[2].grad, alpha=-0.1)
        amaxes = x, layer.weight, grad
        kernels.delayed_update(*state, *(t.detach().abs().amax().view(1, 1) for t in amaxes), *recipe.delayed_update)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(layer.delayed_scale, state.scale)
        assert torch.equal(layer.delayed_amax_history, state.amax_history)
        for expert, (weight, _) in enumerate(parameters):
            assert torch.equal(layer.weight[expert], weight)
            with torch.no_grad():
                layer.bias[expert] = parameters[expert][1]  # whose gradient is added in another order


@pytest.mark.full  # by default with two of them: tests/nn/test_experts.py
def test_compiled_it_is_one_graph_whatever_the_routing() -> None:
    torch.compiler.reset()
    layer = layer_of(recipes.rowwise_with_gw_hp(), dtype=torch.bfloat16)
    other, counter = copy.deepcopy(layer), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for step, sizes in enumerate(([9, 0, 4, 4], [17, 0, 0, 0], [1, 2, 3, 4])):
        found = []
        for net, call in ((layer, layer), (other, compiled)):
            x, grad = batch(sizes, 17 - sum(sizes), torch.bfloat16, step)
            net.zero_grad()
            y = call(x, offsets_of(sizes))
            y.backward(grad)
            found.append(gradients(net) | {"x": x.grad, "y": y} | octavo.nn.delayed_state_dict(net))
        assert_equal(*found)
    assert counter.frame_count == 1


def test_moves_and_evaluation() -> None:
    layer, sizes = layer_of(recipes.delayed(), device="meta"), [3, 4, 0, 2]
    assert layer(torch.empty(9, K, device="meta"), torch.empty(E, dtype=torch.int32, device="meta")).shape == (9, N)
    layer.to_empty(device="cpu").reset_parameters()
    x, _ = batch(sizes)
    dynamic = layer_of(recipes.dynamic())
    dynamic.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x, offsets_of(sizes)), dynamic.eval()(x, offsets_of(sizes)))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, offsets_of(sizes))
        (row,) = octavo.summary(layer).converted
        assert (row.kind, row.shape) == ("GroupedLinear", (E, N, K))
        assert octavo.restore(layer).recipe.is_high_precision and list(layer.state_dict()) == ["weight", "bias"]
        assert y.dtype == layer(x, offsets_of(sizes)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["dynamic", "high precision"])
def test_wrong_input_is_refused(name: str) -> None:
    layer, x, offsets = layer_of(RECIPES[name]()), torch.randn(9, K), offsets_of([3, 4, 0, 2])
    for wrong, error, said in (
        ((x[None], offsets), ValueError, r"\(1, 9, 48\): rows sorted by expert are \[T, K\]"),
        ((x[:, 1:], offsets), ValueError, "needs in_features=48"),
        ((x.bfloat16(), offsets), TypeError, "bfloat16 but the weight is torch.float32"),
        ((x, offsets.long()), TypeError, "offsets are int32, not torch.int64"),
        ((x, offsets[None]), ValueError, r"offsets of shape \[1, 4\]"),
        ((x, offsets.to("meta")), ValueError, "offsets on meta"),
        ((x, offsets[1:]), ValueError, "offsets of 3 experts, but the weight has 4"),
        ((x, offsets.flip(0)), ValueError, r"offsets\[1\] = 7 is below 9"),
        ((x, offsets + 1), ValueError, r"offsets\[3\] = 10: there are 9 rows"),
    ):
        with pytest.raises(error, match=said):
            layer(*wrong)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        layer.double()(x.double(), offsets)
    for sizes in ((0, 4, 4), (4, 0, 4), (4, 4, 0)):
        with pytest.raises(ValueError, match=r"=0.*: at least 1"):
            octavo.nn.GroupedLinear(*sizes)


def test_what_fp8_refuses() -> None:
    layer, (x, _), offsets = layer_of(recipes.dynamic()), batch([3, 4, 0, 2]), offsets_of([3, 4, 0, 2])
    with pytest.raises(HigherOrderGradientError):
        torch.autograd.grad(layer(x, offsets).sum(), x, create_graph=True)
