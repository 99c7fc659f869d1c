"""Training steps of fused modules beside their parts': results, and the commits of delayed scales."""

import copy
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import RecipeMap, recipes
from octavo.formats import FORMATS
from octavo.kernels.activations import ACTIVATIONS
from tests.support.combinations import each_pair
from tests.support.fused_cases import LINEARS, in_float64, in_parts, linear, mlp, named, results
from tests.support.helpers import FP8_RECIPES, CountOps, gradients, sqnr
from tests.support.memory import saved_tensors

T, K, N = 32, 64, 48
each_recipe = pytest.mark.parametrize("recipe", FP8_RECIPES)
each_norm = pytest.mark.parametrize("norm", LINEARS)


def step(module: nn.Module, x: Tensor, grad: Tensor, x_requires_grad: bool = True) -> dict:
    """Return the gradients that a step leaves, without those not asked for."""
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
    actual, expected = run(module), run(apart)
    assert actual.keys() == expected.keys()  # without gradients into the output the weight gets none
    assert ("linear.weight" in actual) == (used in ("both", "output"))
    for name in actual:
        exact = name == "norm output" or used.startswith("norm")
        assert sqnr(actual[name], expected[name]) > (100 if exact else 20), name
    assert_near_state(module, apart)


def test_autocast_in_high_precision_is_torchs():
    module = mlp(recipe=recipes.high_precision())
    plain = nn.Sequential(module.norm, octavo.restore(copy.deepcopy(module.fc1)), module.fc2)
    x = torch.randn(T, K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gate, up = plain[1](plain[0](x))
        assert torch.equal(module(x), plain[2](nn.functional.silu(gate) * up))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="float64"):
        mlp()(x.double())


@each_norm
def test_an_output_in_high_precision_runs_the_parts(norm):
    for part in ("fc1", "fc2"):
        module = mlp(norm, RecipeMap(recipes.dynamic(), {part: {"output": None}}))
        with CountOps() as ops:
            outputs = results(module, torch.randn(T, K), torch.randn(T, K))
        assert ops.calls["matmul"] == 5 and not ops.calls["norm_cast"]
        assert all(tensor.isfinite().all() for tensor in outputs.values())


@each_recipe
@pytest.mark.parametrize("saved", [False, True])
def test_what_is_saved_in_high_precision(recipe, saved):
    """The norm's input, its parameter, and the activation's input unless ``saved`` casts it: no copy of an FP8 one.

    The second layer's input is saved unless backward casts it again, from the activation's input, by one scale.
    """
    module = mlp(recipe=recipe, saved=saved, activation="swiglu", inside=96, dtype=torch.bfloat16, bias=False)
    tensors = saved_tensors(module, torch.randn(T, K, dtype=torch.bfloat16, requires_grad=True))
    wide = sorted(t.numel() for t in tensors if t.dtype == torch.bfloat16)
    assert wide == ([T * K] if saved else [T * K, T * 2 * 96])
    codes = sorted(t.numel() for t in tensors if t.dtype in FORMATS)
    casts_again = not saved and recipe in ("dynamic", "delayed")
    assert codes == sorted([T * K, 192 * K, 96 * K, *([] if casts_again else [T * 96]), *([T * 192] if saved else [])])


# What a fused module loses against float64 is no more than AT_MOST times what its parts lose.

ROWS, WIDTH, OUT, INSIDE = 256, 96, 80, 160
AT_MOST = 1.05
BOTH = [False, True]
DTYPES = [torch.float32, torch.bfloat16]


def errors(module: nn.Module, steps: list[tuple[Tensor, Tensor]], truths: list[dict[str, Tensor]]) -> dict[str, float]:
    """Return each result's distance from the truth over all steps."""
    squares: dict[str, float] = defaultdict(float)
    for step, truth in zip(steps, truths, strict=True):
        for name, result in results(module, *step).items():
            assert result.dtype == step[0].dtype, name
            squares[name] += float((result.double() - truth[name]).square().sum())
    return {name: square**0.5 for name, square in squares.items()}


def assert_no_worse(
    module: nn.Module, n: int, dtype: torch.dtype, steps: int = 3, luck: float = 3.0, less: int = 0, but: str = ""
) -> None:
    """Check that a module's errors are no larger than its separate parts', over steps of delayed or other scales.

    Two independent errors of m elements differ by 1 / sqrt(m) of themselves by chance. For matrices that is little, for
    a norm's parameters and biases ``luck`` times it is allowed. ``less``: the products that are not in FP8, of which
    the result ``but`` is computed from what was saved.
    """
    data = [(torch.randn(ROWS, WIDTH).to(dtype), torch.randn(ROWS, n).to(dtype)) for _ in range(steps)]
    truth = in_float64(module)
    truths = [results(truth, x.double(), grad.double()) for x, grad in data]
    theirs = errors(in_parts(module), data, truths)
    with CountOps() as ops:
        ours = errors(module, data, truths)
    assert ops.calls["norm_cast"] + ops.calls["norm_cast_two_scalings"] == steps
    products = 3 * len(module.linear_parts) - less
    assert ops.calls["matmul"] == steps * products and ours.keys() == theirs.keys()
    for name, error in ours.items():
        expected = truths[0][name]
        chance = luck / (steps * expected.numel()) ** 0.5 if expected.ndim == 1 else 0.0
        if name != but:
            assert error <= (AT_MOST + chance) * theirs[name], (name, error / theirs[name])
        assert error < 0.2 * sum(float(truth[name].square().sum()) for truth in truths) ** 0.5, name


@each_pair(
    norm=[*LINEARS],
    recipe=[*FP8_RECIPES],
    activation=[*ACTIVATIONS],
    bias=BOTH,
    zero=BOTH,
    dtype=DTYPES,
    saved=BOTH,
    high=["", *(f"{part} {product}" for part in ("fc1", "fc2", "*") for product in ("grad_input", "grad_weight"))],
)
def test_an_mlp_loses_no_more_than_its_parts(case):
    """``high``: a product in high precision."""
    zero, (part, _, product) = case.pop("zero"), case.pop("high").partition(" ")
    if part:
        case["recipe"] = RecipeMap(named(case["recipe"], case["saved"]), {part: {product: None}})
    of_saved = case["saved"] and product == "grad_weight" and part != "fc1"
    how = {"less": {"": 0, "*": 2}.get(part, 1), "but": "fc2.weight" if of_saved else ""}
    assert_no_worse(mlp(width=WIDTH, inside=INSIDE, zero_centered_gamma=zero, **case), WIDTH, case["dtype"], **how)


@each_pair(norm=[*LINEARS], recipe=[*FP8_RECIPES], bias=BOTH, zero=BOTH, dtype=DTYPES, splits=BOTH)
def test_a_linear_loses_no_more_than_its_parts(case):
    zero, n = case.pop("zero"), {"query": OUT // 2, "key": OUT // 2} if case.pop("splits") else OUT
    assert_no_worse(linear(k=WIDTH, n=n, zero_centered_gamma=zero, **case), OUT, case["dtype"])
