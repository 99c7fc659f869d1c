"""Training steps of fused modules beside those of their parts: what is computed, what is committed, what is not."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

import octavo
from octavo import RecipeMap, recipes
from octavo.formats import FORMATS
from tests.support.combinations import each_pair
from tests.support.fused_cases import LINEARS, SAVED, in_float64, in_parts, linear, mlp, named, results
from tests.support.helpers import FP8_RECIPES, CountOps, assert_equal, gradients, sqnr
from tests.support.memory import saved_tensors

T, K, N = 32, 64, 48
each_recipe = pytest.mark.parametrize("recipe", FP8_RECIPES)
each_norm = pytest.mark.parametrize("norm", LINEARS)


def step(module: nn.Module, x: torch.Tensor, grad: torch.Tensor, x_requires_grad: bool = True) -> dict:
    """The gradients that a step leaves, those not asked for left out."""
    module.zero_grad()
    leaf = x.clone().requires_grad_(x_requires_grad)
    module(leaf).backward(grad)
    return gradients(module) | ({"x": leaf.grad} if x_requires_grad else {})


def assert_near_state(module: nn.Module, other: nn.Module) -> None:
    """The same delayed state but for roundings."""
    state, expected = octavo.nn.delayed_state_dict(module), octavo.nn.delayed_state_dict(other)
    assert state.keys() == expected.keys()
    for name in state:
        assert torch.equal(state[name] == 0, expected[name] == 0), name
        torch.testing.assert_close(state[name], expected[name], rtol=0.05, atol=0, msg=name)


@pytest.mark.parametrize("step_of", [5, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_whatever_is_frozen(recipe, step_of):
    """All 128 choices of what needs a gradient, by default every fifth: the others' are those of a trainable module.

    Each backward commits to the delayed state of what it reaches, once, as in the parts.
    """
    whole = mlp("layer_norm", recipe, activation="gelu_tanh", inside=32)
    x, grad = torch.randn(T, K), torch.randn(T, K)
    expected = step(copy.deepcopy(whole), x, grad)
    names = ["x", *(name for name, _ in whole.named_parameters())]
    for needed in [*itertools.product([True, False], repeat=len(names))][::step_of]:
        needs = dict(zip(names, needed, strict=True))
        if not any(needed):
            continue
        module = copy.deepcopy(whole)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(needs[name])
        apart = in_parts(module)
        for _ in range(2 if recipe == "delayed" else 1):  # its first step takes its own amax, the second the history
            found = step(module, x, grad, needs["x"])
            beside = step(apart, x, grad, needs["x"])
            assert found.keys() == beside.keys() == {name for name in names if needs[name]}
            assert_near_state(module, apart)
        if recipe == "rowwise":
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=f"{name} of {needs}")


@each_norm
@each_recipe
@pytest.mark.parametrize("used", ["both", "output", "norm", "norm twice"])
def test_gradients_into_either_result(norm, recipe, used):
    module = linear(norm, recipe, return_norm_output=True)
    grads = torch.randn(2, T, N), torch.randn(2, T, K)

    def run(module: nn.Module) -> dict:
        module.zero_grad()
        x = torch.randn(2, T, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y, normed = module(x)
        assert y.shape == (2, T, N) and normed.shape == x.shape and normed.dtype == y.dtype
        with torch.no_grad():
            assert torch.equal(module(x)[1], normed)
        chosen = {"both": (0, 1), "output": (0,), "norm": (1,), "norm twice": (1, 1)}[used]
        sum(((y, normed)[i] * grads[i]).sum() for i in chosen).backward()
        return {"y": y.detach(), "norm output": normed.detach(), "x": x.grad, **gradients(module)}

    apart = in_parts(module)
    found, expected = run(module), run(apart)
    assert found.keys() == expected.keys()  # without gradients into the output the weight gets none
    assert ("linear.weight" in found) == (used in ("both", "output"))
    for name in found:
        exact = name == "norm output" or used.startswith("norm")
        assert sqnr(found[name], expected[name]) > (100 if exact else 20), name
    assert_near_state(module, apart)


@each_pair(norm=[*LINEARS], recipe=[*FP8_RECIPES], dtype=[torch.bfloat16, torch.float16], x=["float32", "autocast's"])
def test_autocast(case):
    dtype = case["dtype"]
    for build, n in ((linear, N), (mlp, K)):
        module = build(case["norm"], case["recipe"])
        x = torch.randn(T, K).to(dtype if case["x"] == "autocast's" else torch.float32).requires_grad_()
        truth = in_float64(module)(x.detach().double())
        with torch.autocast("cpu", dtype=dtype):
            y = module(x)
            grad = torch.randn(T, n).to(dtype)
            y.backward(grad)
            inside = gradients(module)
            module.zero_grad()
            for part in map(module.get_submodule, module.linear_parts):
                part.reset_delayed_state()
            again = module(x)
        again.backward(grad)  # outside: the same
        assert y.dtype == dtype and x.grad.dtype == x.dtype
        assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
        assert_equal(gradients(module), inside)
        assert sqnr(y, truth) > 20
        if x.dtype == torch.float32:  # else torch's norms warn of weights of another dtype
            with torch.autocast("cpu", dtype=dtype):
                apart = in_parts(module)(x)
            assert apart.dtype == dtype and sqnr(y, truth) > sqnr(apart, truth) - 1


def test_autocast_in_high_precision_is_torchs():
    module = mlp(recipe=recipes.high_precision())
    plain = nn.Sequential(module.norm, octavo.restore(copy.deepcopy(module.fc1)), module.fc2)
    x = torch.randn(T, K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gate, up = plain[1](plain[0](x))
        assert torch.equal(module(x), plain[2](nn.functional.silu(gate) * up))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="float64"):
        mlp()(x.double())


@each_pair(
    product=["grad_input", "grad_weight"],
    part=["fc1", "fc2", "*"],
    recipe=[*FP8_RECIPES],
    activation=["gelu", "swiglu"],
    dtype=[torch.float32, torch.bfloat16],
    saved=[False, True],
)
def test_a_product_in_high_precision(case):
    part, product, dtype = case.pop("part"), case.pop("product"), case["dtype"]
    recipe = RecipeMap(named(case.pop("recipe"), case["saved"]), {part: {product: None}})
    module = mlp("layer_norm", recipe, width=K, inside=64, **case)
    x, grad = torch.randn(4 * T, K).to(dtype), torch.randn(4 * T, K).to(dtype)
    with CountOps() as ops:
        found = results(module, x, grad)
    assert ops.calls["matmul"] == 6 - (2 if part == "*" else 1)
    assert ops.calls["norm_cast"] + ops.calls["norm_cast_two_scalings"] == 1
    truth, apart = results(in_float64(module), x.double(), grad.double()), results(in_parts(module), x, grad)
    for name in found:
        assert found[name].dtype == dtype
        if name == "fc2.weight" and product == "grad_weight" and part != "fc1" and case["saved"]:
            assert sqnr(found[name], truth[name]) > 24  # its input is computed from what was saved
        else:
            least = 20 * math.log10(1.05) if found[name].ndim > 1 else 3
            assert sqnr(found[name], truth[name]) > sqnr(apart[name], truth[name]) - least, name


@each_norm
def test_an_output_in_high_precision_runs_the_parts(norm):
    for part in ("fc1", "fc2"):
        module = mlp(norm, RecipeMap(recipes.dynamic(), {part: {"output": None}}))
        with CountOps() as ops:
            found = results(module, torch.randn(T, K), torch.randn(T, K))
        assert ops.calls["matmul"] == 5 and not ops.calls["norm_cast"]
        assert all(tensor.isfinite().all() for tensor in found.values())


@each_recipe
@pytest.mark.parametrize("saved", [False, True])
def test_what_is_saved_in_high_precision(recipe, saved):
    """The norm's input, its parameter, and the activation's input unless ``saved`` casts it: no copy of an FP8 one."""
    module = mlp(recipe=recipe, saved=saved, activation="swiglu", inside=96, dtype=torch.bfloat16, bias=False)
    x = torch.randn(T, K, dtype=torch.bfloat16, requires_grad=True)
    kept = saved_tensors(module, x)
    wide = sorted(t.numel() for t in kept if t.dtype == torch.bfloat16)
    assert wide == ([T * K] if saved else [T * K, T * 2 * 96])
    codes = sorted(t.numel() for t in kept if t.dtype in FORMATS)
    assert codes == sorted([T * K, T * 96, 192 * K, 96 * K] + ([T * 192] if saved else []))


def test_saving_in_fp8_leaves_the_outputs_and_the_second_weights_gradient_alone():
    module = mlp("layer_norm", recipes.rowwise(), inside=256)
    x, grad = torch.randn(T, K), torch.randn(T, K)
    plain = results(module, x, grad)
    for saved in (SAVED, octavo.Cast(octavo.E5M2, octavo.PerTensor()), octavo.Cast(octavo.E4M3, octavo.PerRow())):
        octavo.set_recipe(module, dataclasses.replace(recipes.rowwise(), saved=saved))
        found = results(module, x, grad)
        same = {name for name in found if torch.equal(found[name], plain[name])}
        assert same == {"y", "fc2.weight", "fc2.bias"}
        assert all(sqnr(found[name], plain[name]) > 15 for name in found.keys() - same)


def test_norms_parameters_in_float32_beside_bfloat16_weights():
    module = mlp("layer_norm", "rowwise", dtype=torch.bfloat16)
    module.norm.float()
    x = torch.randn(T, K, dtype=torch.bfloat16)
    found = step(module, x, torch.randn(T, K, dtype=torch.bfloat16))
    assert found["norm.weight"].dtype == found["norm.bias"].dtype == torch.float32
    assert found["x"].dtype == found["fc1.weight"].dtype == torch.bfloat16
    assert sqnr(module(x), in_float64(module)(x.double())) > 20


def test_rms_norms_own_eps():
    module = linear(recipe="rowwise")
    x = 1e-5 * torch.randn(T, K)
    module.norm.eps = None
    assert sqnr(module(x), in_parts(module)(x)) > 25
    assert torch.equal(module(torch.zeros(2, K)), module.linear.bias.expand(2, N))
