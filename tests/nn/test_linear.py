import copy
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import octavo
from octavo import HigherOrderGradientError, UnsupportedOpError, recipes
from octavo.autograd.chain import activated_linear
from octavo.nn.candidates import features
from octavo.nn.linear import TransposedLinear, checked_splits, merge_keys
from tests.support.groups import SIZES, offsets_of, slices_of
from tests.support.helpers import FP8_RECIPES, CountOps, assert_equal, gradients, sqnr, to_fp8

each_recipe = pytest.mark.parametrize("name", FP8_RECIPES)


def layer(name: str = "dynamic", k: int = 64, n: int = 48, **options) -> octavo.nn.Linear:
    return octavo.nn.Linear(k, n, recipe=FP8_RECIPES[name](), **options)


def test_it_is_a_torch_linear():
    torch.manual_seed(3)
    plain = nn.Linear(24, 40)
    torch.manual_seed(3)
    ours = octavo.nn.Linear(24, 40)
    assert isinstance(ours, nn.Linear)
    assert ours.recipe == recipes.dynamic()
    assert_equal(ours.state_dict(), plain.state_dict())
    assert [name for name, _ in ours.named_parameters()] == ["weight", "bias"]
    assert repr(ours) == "Linear(in_features=24, out_features=40, bias=True, recipe=dynamic)"
    assert octavo.nn.Linear(24, 40, bias=False, device="meta", dtype=torch.float16).weight.dtype == torch.float16
    assert octavo.nn.Linear(24, 40, True, "meta", torch.float16).weight.dtype == torch.float16  # as torch's


def test_a_recipe_must_be_a_recipe():
    assert octavo.nn.Linear(8, 8, recipe="dynamic").recipe == recipes.dynamic()
    with pytest.raises(ValueError, match="'fast' is no recipe: choose"):
        octavo.nn.Linear(8, 8, recipe="fast")
    with pytest.raises(TypeError, match=r"is no octavo\.Recipe; try octavo\.recipes\.dynamic"):
        octavo.nn.Linear(8, 8, recipe=recipes.dynamic)


@each_recipe
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 64), (64,), (2, 3, 64), (2, 0, 64), (0, 64), (1, 2, 3, 4, 64), (1, 64)], ids=str)
def test_any_leading_dimensions(name, bias, shape):
    ours = layer(name, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    y = ours(x)
    assert y.shape == (*shape[:-1], 48)
    expected = F.linear(x.detach().double(), ours.weight.double(), ours.bias.double() if bias else None)
    y.sum().backward()
    assert x.grad.shape == shape
    if x.numel():
        assert sqnr(y, expected) > 25
        assert sqnr(ours.weight.grad, x.detach().double().reshape(-1, 64).sum(0).expand(48, 64)) > 20
    else:
        assert not ours.weight.grad.any()
    if bias:
        assert torch.equal(ours.bias.grad, torch.full((48,), float(x.numel() // 64)))


@each_recipe
@pytest.mark.parametrize(("k", "n"), [(0, 8), (8, 0)])
def test_no_features(name, k, n):
    with warnings.catch_warnings(action="ignore"):  # torch: "Initializing zero-element tensors is a no-op"
        ours = layer(name, k, n)
    x = torch.randn(2, 3, k, requires_grad=True)
    y = ours(x)
    y.sum().backward()
    assert torch.equal(y, ours.bias.expand(2, 3, n))
    assert (x.grad.shape, ours.weight.grad.shape) == ((2, 3, k), (n, k))
    assert not x.grad.any()


def test_errors_name_both_sides():
    ours = layer()
    with pytest.raises(TypeError, match=r"bfloat16.*float32.*autocast"):
        ours(torch.randn(2, 64, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float64"):
        layer(dtype=torch.float64)(torch.randn(2, 64, dtype=torch.float64))


@each_recipe
def test_gradients_of_inputs_first_and_of_weights_later(name):
    """Inputs' gradients first and weights' later, as pipelines without bubbles ask for them, take each product once."""
    ours, x, grad = layer(name), torch.randn(8, 64), torch.randn(8, 48)
    ours(x).backward(torch.randn(8, 48))
    other = copy.deepcopy(ours)
    ours.zero_grad()
    whole = x.clone().requires_grad_()
    with CountOps() as at_once:
        ours(whole).backward(grad)
    leaf = x.clone().requires_grad_()
    with CountOps() as apart:
        y = other(leaf)
        (dx,) = torch.autograd.grad(y, leaf, grad, retain_graph=True)
        dw, db = torch.autograd.grad(y, list(other.parameters()), grad)
    assert torch.equal(dx, whole.grad) and torch.equal(dw, ours.weight.grad) and torch.equal(db, ours.bias.grad)
    assert apart.calls["matmul"] == at_once.calls["matmul"] == 3
    assert_equal(*(octavo.nn.delayed_state_dict(module) | {"x": x} for module in (other, ours)))


@each_recipe
def test_no_product_runs_but_for_a_gradient_that_is_asked_for(name):
    whole, x, grad = layer(name), torch.randn(8, 64), torch.randn(8, 48)
    expected = {}
    for of_input, of_weight, products in ((True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)):
        ours, leaf = copy.deepcopy(whole), x.clone().requires_grad_(of_input)
        ours.weight.requires_grad_(of_weight)
        with CountOps() as ops:
            ours(leaf).backward(grad)
        assert ops.calls["matmul"] == products
        actual = gradients(ours) | ({"x": leaf.grad} if of_input else {})
        expected = expected or actual
        assert_equal(actual, {key: expected[key] for key in actual})
        assert ("x" in actual, "weight" in actual) == (of_input, of_weight)
    with torch.no_grad(), CountOps() as ops:
        whole(x)
    assert ops.calls == {"cast": 2, "matmul": 1}


def test_a_result_may_be_changed_in_place():
    for shape in ((8, 64), (2, 4, 64)):
        ours, x = layer(), torch.randn(shape)
        grads = []
        for in_place in (False, True):
            ours.zero_grad()
            y = ours(x)
            y = y.add_(1).relu_() if in_place else (y + 1).relu()
            y.sum().backward()
            grads.append(gradients(ours))
        assert_equal(*grads)


@each_recipe
def test_create_graph_says_what_to_do(name):
    ours = layer(name)
    x = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(HigherOrderGradientError, match=r"create_graph=True.*high_precision"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func_transforms_say_what_to_do(transform):
    ours = layer()
    with pytest.raises(HigherOrderGradientError, match=r"torch\.func.*high_precision"):
        transform(ours, torch.randn(4, 64))
    octavo.set_recipe(ours, recipes.high_precision())
    transform(ours, torch.randn(4, 64))


@pytest.mark.parametrize("kind", ["linear", "fused", "activated"])
def test_gradients_in_batches_say_what_to_do(kind):
    """torch.autograd.grad(is_grads_batched=True), jacobian(vectorize=True) and torch.func.vmap of a backward."""
    linear = layer(bias=False)
    module = {
        "linear": linear,
        "fused": octavo.nn.RMSNormLinear(64, 64),
        "activated": lambda x: activated_linear(
            x, None, linear.weight, None, linear.layer_of(x, linear.layer_tensors(), True), "relu"
        ),
    }[kind]
    x = torch.randn(4, 64, requires_grad=True)
    y = module(x)
    directions = torch.randn(2, *y.shape)
    with pytest.raises(HigherOrderGradientError, match=r"in batches.*high_precision"):
        torch.autograd.grad(y, x, directions, is_grads_batched=True)
    y = module(x)
    with pytest.raises(HigherOrderGradientError, match=r"in batches.*high_precision"):
        torch.func.vmap(lambda dy: torch.autograd.grad(y, x, dy)[0])(directions)


def test_torch_jit_script_says_what_to_do():
    with pytest.raises(UnsupportedOpError, match=r"torch\.jit\.trace.*restore"):
        torch.jit.script(nn.Sequential(layer()))


@pytest.mark.parametrize("which", ["input", "weight", "bias"])
@pytest.mark.parametrize("kind", ["linear", "fused"])
@pytest.mark.parametrize("training", [False, True], ids=["under no_grad", "in training"])
def test_forward_mode_derivatives_say_what_to_do(training, kind, which):
    """Forward-mode derivatives say what to do, also without gradients, where no autograd function would refuse them."""
    model = octavo.nn.Linear(64, 64) if kind == "linear" else octavo.nn.RMSNormLinear(64, 64)
    linear, x = model if kind == "linear" else model.linear, torch.randn(4, 64)
    tensors = {"input": x, "weight": linear.weight.detach(), "bias": linear.bias.detach()}
    prefix = "" if kind == "linear" else "linear."
    with torch.set_grad_enabled(training), forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
        replaced = {} if which == "input" else {prefix + which: dual}
        with pytest.raises(HigherOrderGradientError, match=r"forward-mode.*high_precision"):
            torch.func.functional_call(model, replaced, (dual if which == "input" else x,))
        model(x)  # no dual number is there


def test_high_precision_allows_double_backward():
    ours = octavo.set_recipe(layer(), recipes.high_precision())
    x = torch.randn(4, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert ours.weight.grad.abs().sum() > 0


SPLITS = {"query": 4, "key": 2, "value": 2}


def test_a_number_and_a_mapping():
    assert checked_splits(8) == checked_splits(np.int64(8)) == (8, None)
    size, splits = checked_splits(SPLITS)
    assert (size, splits) == (8, SPLITS)
    assert splits is not SPLITS  # the caller's may change
    for number in (8.0, "8"):
        with pytest.raises(TypeError, match="as an integer"):
            checked_splits(number)


@pytest.mark.parametrize("name", ["names", "recipe", "in_features", "training", "weight_scale_inv"])
def test_no_split_is_called_like_an_attribute(name):
    """Separate splits, as under tensor parallelism, are modules of their names."""
    with pytest.raises(ValueError, match=rf"a Linear has \['{name}'\] already"):
        octavo.nn.Linear(8, {"gate": 4, name: 4})


@pytest.mark.parametrize("splits", [{}, {"weight": 2}, {"bias": 2}, {"a.b": 2}, {"": 2}, {"0": 2}, {"a": 2, "b c": 2}])
def test_names_must_fit_a_state_dict(splits):
    with pytest.raises(ValueError, match="splits need names like 'query', not"):
        checked_splits(splits)


def test_a_splits_size_cant_be_negative():
    with pytest.raises(ValueError, match="a split's size can't be negative"):
        octavo.nn.Linear(64, {"q": 64, "k": -32})
    assert octavo.nn.Linear(64, {"q": 64, "k": 0})(torch.randn(8, 64))[1].shape == (8, 0)


def separate(parameters=("weight", "bias")):
    columns = {"weight": (3,), "bias": ()}
    return {f"{name}.{one}": torch.randn(size, *columns[one]) for name, size in SPLITS.items() for one in parameters}


def test_what_is_not_all_there_or_joined_already_is_left_alone():
    for missing in ("key.weight", "value.bias"):
        state = separate()
        del state[missing]
        present = missing.split(".")[1]
        assert merge_keys(state, "", SPLITS) == []
        assert present not in state and f"query.{present}" in state
        assert ({"weight", "bias"} - {present}) <= state.keys()
    state = {**separate(parameters=("weight",)), "weight": torch.ones(8, 3)}
    before = dict(state)
    assert merge_keys(state, "", SPLITS) == []
    assert state.keys() == before.keys()


WIDE = {"query": 32, "key": 16, "value": 8}


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_named_splits_are_one_layers_output_in_parts(name):
    whole, ours = layer(name, 64, 56), layer(name, 64, WIDE)
    ours.load_state_dict(whole.state_dict())
    assert (ours.out_features, ours.weight.shape) == (56, (56, 64))
    for shape in [(64,), (8, 64), (2, 4, 64), (0, 64)]:
        x = torch.randn(shape, requires_grad=True)
        grad = torch.randn(*shape[:-1], 56)
        for module in (whole, ours):
            module.zero_grad()
            module.reset_delayed_state()
        expected = whole(x)
        parts = ours(x)
        assert isinstance(parts, tuple)
        assert [part.shape for part in parts] == [(*shape[:-1], size) for size in WIDE.values()]
        assert torch.equal(torch.cat(parts, dim=-1), expected)
        expected.backward(grad)
        first, x.grad = x.grad, None
        with CountOps() as ops:
            torch.autograd.backward(parts, grad.split([*WIDE.values()], dim=-1))
        assert ops.calls["matmul"] == 2  # not once a split
        assert torch.equal(x.grad, first)
        assert_equal(gradients(ours), gradients(whole))


@pytest.mark.parametrize("name", ["dynamic", "rowwise"])
def test_a_split_that_nothing_is_computed_from(name):
    ours = layer(name, 64, WIDE)
    query, _, value = ours(torch.randn(8, 64))
    (query.sum() + value.sum()).backward()
    assert not ours.weight.grad[32:48].any() and ours.weight.grad[:32].any() and ours.weight.grad[48:].any()


def test_separate_layers_load_into_named_splits():
    net = nn.ModuleDict({"qkv": layer("delayed", 64, WIDE)})
    net["qkv"](torch.randn(8, 64))[0].sum().backward()
    parts = nn.ModuleDict({"qkv": nn.ModuleDict({name: nn.Linear(64, size) for name, size in WIDE.items()})})
    separate = parts.state_dict()
    for assign in (False, True):
        assert net.load_state_dict(separate, assign=assign) == ([], [])
        assert not net["qkv"].delayed_scale.any()  # of the weights that are gone
        x = torch.randn(8, 64)
        with octavo.using(net, recipes.high_precision()):
            results = net["qkv"](x)
        for y, (split, plain) in zip(results, parts["qkv"].items(), strict=True):
            torch.testing.assert_close(y, plain(x), msg=split)
    assert "qkv.query.weight" in separate  # the caller's own is left alone
    assert net.load_state_dict(net.state_dict()) == ([], [])


def test_separate_layers_of_other_sizes_do_not():
    ours = layer("dynamic", 64, WIDE)
    state = {f"{name}.weight": torch.ones(size, 64) for name, size in zip(WIDE, (16, 32, 8), strict=True)}
    state["bias"] = torch.zeros(56)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"query\.weight is \[16, 64\], but its split has 32 rows"):
            ours.load_state_dict(state, strict=strict)
    del state["key.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"(.|\n)*Unexpected key.*"query\.weight"'):
        ours.load_state_dict(state)


def test_nothing_is_joined_if_a_bias_does_not_fit():
    ours = layer("dynamic", 64, WIDE)
    before = ours.weight.clone()
    state = {f"{name}.weight": torch.ones(size, 64) for name, size in WIDE.items()}
    state |= {f"{name}.bias": torch.ones(size) for name, size in zip(WIDE, (32, 16, 7), strict=True)}
    with pytest.raises(RuntimeError, match=r"value\.bias is \[7\], but its split has 8 rows"):
        ours.load_state_dict(state)
    assert torch.equal(ours.weight, before)
    keys = set(state)
    assert len(merge_keys(state, "", WIDE)) == 1 and state.keys() == keys


def test_splits_are_printed_copied_and_called_by_name():
    ours = layer("mx", 8, {"gate": 4, "up": 2})
    assert repr(ours) == "Linear(in_features=8, out_features=6, bias=True, splits={'gate': 4, 'up': 2}, recipe=mx)"
    assert copy.deepcopy(ours).splits == ours.splits == {"gate": 4, "up": 2}


# --- GroupedLinear computes what a loop over experts of octavo.nn.Linear does, each on its own rows

E, K, N = 4, 48, 40
RECIPES = FP8_RECIPES | {"gw_hp": recipes.rowwise_with_gw_hp, "high precision": recipes.high_precision}
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def layer_of(recipe: octavo.Recipe, experts: int = E, **options: Any) -> octavo.nn.GroupedLinear:
    torch.manual_seed(0)
    return octavo.nn.GroupedLinear(experts, K, N, recipe=recipe, **options)


def batch(sizes: Sequence[int], ungrouped: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return rows and the gradient of a layer's output."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(sum(sizes) + ungrouped, size, generator=generator).to(dtype) for size in (K, N))
    return x.requires_grad_(), grad


def loop_of(layer: octavo.nn.GroupedLinear) -> list[octavo.nn.Linear]:
    linears = []
    for expert in range(layer.experts):
        one = octavo.nn.Linear(K, N, layer.bias is not None, dtype=layer.weight.dtype, recipe=layer.recipe)
        one.load_state_dict({name: value[expert] for name, value in layer.state_dict().items()})
        linears.append(one)
    return linears


@pytest.mark.parametrize("name", RECIPES)
@each_dtype
@pytest.mark.parametrize(("sizes", "ungrouped"), SIZES, ids=str)
def test_equal_to_a_loop_of_linears(name: str, dtype: torch.dtype, sizes: list[int], ungrouped: int) -> None:
    layer = layer_of(RECIPES[name](), len(sizes), bias=name != "high precision", dtype=dtype)
    x, grad = batch(sizes, ungrouped, dtype)
    y = layer(x, offsets_of(sizes))
    y.backward(grad)
    other = x.detach().clone().requires_grad_()
    loop, rows = loop_of(layer), slices_of(sizes)
    expected = [one(other[of]) for one, of in zip(loop, rows, strict=True)]
    torch.cat(expected).backward(grad[: sum(sizes)])
    # BLAS adds float32 numbers in an order that depends on the CPU and on how they lie
    tolerances = {} if layer.recipe.is_high_precision else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(y[: sum(sizes)], torch.cat(expected), **tolerances)
    assert not y[sum(sizes) :].any()
    torch.testing.assert_close(x.grad, torch.zeros_like(x) if other.grad is None else other.grad, **tolerances)
    for expert, (one, size) in enumerate(zip(loop, sizes, strict=True)):
        if size == 0:
            assert not any(p.grad[expert].any() for p in layer.parameters())
        else:
            torch.testing.assert_close(layer.weight.grad[expert], one.weight.grad, **tolerances)
            if layer.bias is not None:  # torch adds rows in another order
                torch.testing.assert_close(layer.bias.grad[expert], one.bias.grad)


def test_a_step_takes_few_calls() -> None:
    """Forward and backward call at most 115 of octavo's functions, in 12 files, before the device's kernels begin."""
    module, room = layer(dtype=torch.bfloat16), str(Path(octavo.__file__).parent)
    x, grad = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(16, 48, dtype=torch.bfloat16)
    module(x).backward(grad)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (path := frame.f_code.co_filename).startswith(room):
            called.append(path.removeprefix(room))

    sys.setprofile(note)
    try:
        module(x).backward(grad)
    finally:
        sys.setprofile(None)
    above = [path for path in called if not path.startswith(("/kernels/cpu", "/kernels/reference"))]
    assert len(above) <= 115 and len({*above}) <= 12, Counter(above)


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


# --- transformers' Conv1D


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_it_is_a_linear_layer_with_its_weight_transposed(name):
    conv = Conv1D(48, 64)  # N, K
    nn.init.normal_(conv.bias)
    ours = to_fp8(conv, FP8_RECIPES[name]())
    linear = octavo.nn.Linear(64, 48, recipe=FP8_RECIPES[name]())
    linear.load_state_dict({"weight": conv.weight.t(), "bias": conv.bias})
    x, grad = torch.randn(2, 5, 64), torch.randn(2, 5, 48)
    results = []
    for module in (ours, linear):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(grad)
        results.append([y, leaf.grad, module.bias.grad])
    assert all(map(torch.equal, *results))
    assert torch.equal(ours.weight.grad, linear.weight.grad.t())


def test_conversion_and_back():
    conv = Conv1D(8, 16)
    weight, x = conv.weight, torch.randn(2, 16)
    assert features(conv) == (16, 8)
    expected = conv(x)
    to_fp8(conv, recipes.delayed())
    assert isinstance(conv, TransposedLinear) and isinstance(conv, Conv1D)
    assert 20 < sqnr(conv(x), expected) < 40
    octavo.restore(conv)
    assert type(conv) is Conv1D
    assert conv.weight is weight
    assert torch.equal(conv(x), expected)
