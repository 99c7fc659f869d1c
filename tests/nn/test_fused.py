import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import octavo
from octavo import HigherOrderGradientError, recipes
from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.reference.activation import activate, produced
from octavo.kernels.reference.norm import normalise
from octavo.nn import LayerNorm, RMSNorm
from tests.support.combinations import each_pair
from tests.support.fused_cases import LINEARS, in_float64, linear, mlp, results
from tests.support.helpers import FP8_RECIPES, CountOps, assert_equal, gradients, sqnr

T, K, N = 40, 64, 48
FUSED = {"norm_cast", "norm_cast_two_scalings"}
ALL_FOUR = {
    "LayerNormLinear": lambda **options: linear("layer_norm", **options),
    "RMSNormLinear": lambda **options: linear("rms_norm", **options),
    "LayerNormMLP": lambda **options: mlp("layer_norm", **options),
    "RMSNormMLP": lambda **options: mlp("rms_norm", **options),
}
each_module = pytest.mark.parametrize("kind", ALL_FOUR)
each_recipe = pytest.mark.parametrize("recipe", FP8_RECIPES)
each_norm = pytest.mark.parametrize("norm", LINEARS)


def is_fused(module: nn.Module, *shape: int) -> bool:
    with CountOps() as ops, torch.no_grad():
        module(torch.randn(*(shape or (4, K)), dtype=module.norm.weight.dtype))
    return bool(FUSED & ops.calls.keys())


def forget(module: nn.Module) -> None:
    for part in map(module.get_submodule, module.linear_parts):
        part.reset_delayed_state()


def width_of(module: nn.Module) -> int:
    return N if hasattr(module, "linear") else K


def assert_near(actual: dict, expected: dict, db: float = 20.0) -> None:
    """The same but for FP8 roundings that fell otherwise."""
    assert actual.keys() == expected.keys()
    for name in actual:
        assert actual[name].shape == expected[name].shape and actual[name].dtype == expected[name].dtype
        assert sqnr(actual[name], expected[name]) > db, name


def test_parameters_are_those_of_the_parts():
    for norm, bias in itertools.product(LINEARS, (True, False)):
        module, plain = LINEARS[norm](K, N, bias=bias), {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}[norm](K)
        names = [f"norm.{name}" for name, _ in plain.named_parameters()]
        names += ["linear.weight", "linear.bias"] if bias else ["linear.weight"]
        assert list(module.state_dict()) == names
        assert torch.equal(module.norm.weight, plain.weight)
    assert octavo.nn.RMSNormMLP(K, 96).fc1.weight.shape == (192, K)
    assert octavo.nn.RMSNormMLP(K, 96, "relu").fc1.weight.shape == (96, K)
    module = octavo.nn.LayerNormMLP(K, 96, eps=1e-3, dtype=torch.bfloat16, device="meta")
    assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.bfloat16, "meta")}
    assert module.norm.eps == 1e-3
    assert "activation=swiglu" in repr(module)
    assert module.fc1.recipe == recipes.dynamic()


@each_pair(kind=[*ALL_FOUR], recipe=[*FP8_RECIPES], dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_any_leading_dimensions(case):
    module, dtype = ALL_FOUR[case["kind"]](recipe=case["recipe"], dtype=case["dtype"]), case["dtype"]
    for shape in [(K,), (5, K), (2, 3, K), (2, 3, 4, K), (0, K), (2, 0, K)]:
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        module.zero_grad()
        forget(module)
        y = module(x)
        assert y.shape == (*shape[:-1], width_of(module)) and y.dtype == dtype
        y.sum().backward()  # a gradient of stride 0
        assert x.grad.shape == shape
        assert all(p.grad.dtype == dtype for p in module.parameters())
        if x.numel():
            assert sqnr(y, in_float64(module)(x.detach().double())) > 20
        else:
            assert not any(p.grad.any() for p in module.parameters())
    x = torch.randn(K, 4, 3, dtype=dtype).transpose(0, 2)  # any strides
    forget(module)
    assert torch.equal(module(x), module(x.contiguous()))


@each_module
def test_a_norm_without_a_weight_runs_in_parts(kind):
    module, x, outputs = ALL_FOUR[kind](), torch.randn(4, K), []
    for affine in (True, False):  # of ones and zeros; none
        module.norm = type(module.norm)(K, elementwise_affine=affine)
        outputs.append({"y": module(x)})
    assert_near(*outputs)


@each_module
def test_errors_name_both_sides(kind):
    module = ALL_FOUR[kind]()
    with pytest.raises(TypeError, match=r"bfloat16.*float32.*autocast"):
        module(torch.randn(2, K, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float64"):
        copy.deepcopy(module).double()(torch.randn(2, K, dtype=torch.float64))
    with pytest.raises(HigherOrderGradientError, match=r"torch\.func.*high_precision"):
        torch.func.grad(lambda x: module(x).sum())(torch.randn(2, K))
    x = torch.randn(2, K, requires_grad=True)
    with pytest.raises(HigherOrderGradientError, match=r"create_graph=True.*high_precision"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


HOOKS = {
    "forward": lambda part, call: part.register_forward_hook(call),
    "forward pre": lambda part, call: part.register_forward_pre_hook(call),
    "backward": lambda part, call: part.register_full_backward_hook(call),
    "backward pre": lambda part, call: part.register_full_backward_pre_hook(call),
}


@each_norm
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_on_a_part_is_called(norm, hook):
    for module in (linear(norm), mlp(norm)):
        x, grad = torch.randn(T, K), torch.randn(T, width_of(module))
        expected = results(module, x, grad)
        for part in module.children():
            called = []
            handle = HOOKS[hook](part, lambda *args, called=called: called.append(args))
            actual = results(module, x, grad)
            assert len(called) == 1
            assert_near(actual, expected)
            assert not is_fused(module)
            handle.remove()
            assert is_fused(module)
        assert_equal(results(module, x, grad), expected)


@each_module
def test_a_replaced_part_is_called(kind):
    module = ALL_FOUR[kind]()
    for name, part in list(module.named_children()):
        part.forward = lambda x, forward=part.forward: forward(x)  # as tools that wrap a forward do
        assert not is_fused(module)
        del part.forward
        setattr(module, name, torch.nn.utils.parametrizations.weight_norm(copy.deepcopy(part)))
        assert not is_fused(module) or name == "norm"
        setattr(module, name, type("Mine", (type(part),), {})(*part.weight.shape[::-1]))
        assert not is_fused(module)
        setattr(module, name, part)
        assert is_fused(module)
    restored = octavo.restore(copy.deepcopy(module))
    assert not is_fused(restored)
    x = torch.randn(T, K)
    assert torch.equal(restored(x), octavo.set_recipe(module, recipes.high_precision())(x))


@each_module
@pytest.mark.parametrize("zero", [False, True])
def test_finite_differences_in_high_precision(kind, zero):
    options = {"k": 6, "n": {"a": 3, "b": 2}} if "Linear" in kind else {"width": 6, "inside": 4}
    module = ALL_FOUR[kind](recipe=recipes.high_precision(), dtype=torch.float64, zero_centered_gamma=zero, **options)
    module.return_norm_output = True
    tensors = [torch.randn(3, 6, dtype=torch.float64), *(p.detach() for p in module.parameters())]
    names = [name for name, _ in module.named_parameters()]

    def call(x, *parameters):
        outputs = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))
        return tuple(torch.utils._pytree.tree_leaves(outputs))

    torch.autograd.gradcheck(call, [tensor.requires_grad_() for tensor in tensors])


@pytest.mark.parametrize("n", [N, {"a": 32, "b": 16}], ids=["", "splits"])
@pytest.mark.parametrize("recipe", [recipes.dynamic(), recipes.high_precision()], ids=["FP8", "in parts"])
@each_norm
def test_the_norms_output_has_the_outputs_dtype(norm, recipe, n):
    module = linear(norm, recipe, n=n, return_norm_output=True)
    for enabled, expected in ((False, torch.float32), (True, torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = torch.utils._pytree.tree_leaves(module(torch.randn(T, K)))
        assert {t.dtype for t in outputs} == {expected}


@each_module
@each_recipe
def test_without_gradients_no_more_is_done_than_the_output(kind, recipe):
    module = ALL_FOUR[kind](recipe=recipe)
    x = torch.randn(T, K)
    expected = module(x).detach()
    products = len(module.linear_parts)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), CountOps() as ops:
            assert torch.equal(module(x), expected)
        assert ops.calls == {"norm_cast": 1, "matmul": products, "cast": 2 * products - 1}
    module.eval()
    before = octavo.nn.delayed_state_dict(module)
    y = module(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    if before:
        assert_equal(octavo.nn.delayed_state_dict(module), before)


each_activation = pytest.mark.parametrize("name", ACTIVATIONS)


@each_activation
def test_it_is_what_the_casts_compute(name):
    h = 3 * torch.randn(40, 64)
    grad = torch.randn(40, 64 // (1 + ACTIVATIONS[name].gated))
    leaf = h.clone().requires_grad_()
    y = activate(leaf, name)
    y.backward(grad)
    torch.testing.assert_close(y, produced(h, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad, produced(grad, name, h), rtol=1e-5, atol=1e-5)


@each_activation
def test_gate_and_up_together_or_apart_in_any_shape(name):
    h = torch.randn(2, 3, 16, dtype=torch.bfloat16)
    y = activate(h, name)
    assert y.dtype == torch.bfloat16
    assert y.shape == (2, 3, 16 // (1 + ACTIVATIONS[name].gated))
    if ACTIVATIONS[name].gated:
        assert torch.equal(activate(h.chunk(2, dim=-1), name), y)
        assert not torch.equal(activate(h.roll(8, dims=-1), name), y)  # the gate comes first


# --- norms alone

KINDS = {"layer_norm": (LayerNorm, nn.LayerNorm), "rms_norm": (RMSNorm, nn.RMSNorm)}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_they_are_torchs(kind, dtype):
    ours, plain = (cls(24, 1e-3, dtype=dtype) for cls in KINDS[kind])
    assert isinstance(ours, type(plain))
    assert_equal(ours.state_dict(), plain.state_dict())
    assert repr(ours) == repr(plain)
    with torch.no_grad():
        ours.weight.normal_()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 24, dtype=dtype)
    assert torch.equal(ours(x), plain(x))
    for module in (ours, plain):
        module(x).square().sum().backward()
    assert_equal(gradients(ours), gradients(plain))


@each_kind
def test_a_zero_centered_gamma_starts_as_the_identity_and_adds_one(kind):
    ours, plain = KINDS[kind][0](24, zero_centered_gamma=True), KINDS[kind][1](24, eps=1e-5)
    x = torch.randn(5, 24)
    for _ in range(2):
        assert not ours.weight.any()
        assert torch.equal(ours(x), plain(x))
        with torch.no_grad():
            ours.weight.normal_()
        plain.load_state_dict({**ours.state_dict(), "weight": 1 + ours.weight})
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.factor(), plain.weight)
        ours.reset_parameters()
        plain.reset_parameters()
    assert copy.deepcopy(ours).zero_centered_gamma


def test_without_a_bias_and_with_torchs_own_eps():
    assert LayerNorm(8, bias=False).bias is None
    assert RMSNorm(8).bias is None
    ours = RMSNorm(8, eps=None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (1e-4 * torch.randn(5, 8)).to(dtype)
        normed = normalise(x, ours.weight, None, *ours.norm())[0].to(dtype)
        torch.testing.assert_close(normed, F.rms_norm(x, (8,)), rtol=torch.finfo(dtype).eps, atol=1e-6)
