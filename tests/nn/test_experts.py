"""Experts compute what a loop over experts does whose two linear layers are fused as LayerNormMLP's."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
from octavo import recipes
from octavo.autograd.casts import WEIGHT, cast_role
from octavo.autograd.chain import Chain, run_chain
from octavo.autograd.products import Layer
from octavo.nn.experts import Experts, Routing
from octavo.nn.fused import activate
from tests.support.fused_cases import SAVED
from tests.support.helpers import FP8_RECIPES, CountOps, assert_equal, gradients, sqnr

E, H, N, T, K = 5, 32, 48, 19, 2

RECIPES = FP8_RECIPES | {
    "gw_hp": recipes.rowwise_with_gw_hp,
    "saved": lambda: dataclasses.replace(recipes.blockwise(), saved=SAVED),
    "saved, gw_hp": lambda: dataclasses.replace(recipes.rowwise_with_gw_hp(), saved=SAVED),
    "saved a group": lambda: dataclasses.replace(
        recipes.rowwise_with_gw_hp(), saved=octavo.Cast(octavo.E4M3, octavo.PerTensor())
    ),
    "saved in blocks": lambda: dataclasses.replace(
        recipes.rowwise_with_gw_hp(), saved=octavo.Cast(octavo.E4M3, octavo.PerBlock(3, 16))
    ),
}


def experts_of(recipe: Any, **options: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(E, H, N, **options, recipe=recipe)


def batch(seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their experts, of which the last gets none, and weights, the gradient of the result."""
    torch.manual_seed(seed)
    weights, index = torch.randn(T, E - 1).softmax(-1).topk(K)
    x, grad = torch.randn(2, T, H).to(dtype)
    return x.requires_grad_(), index, weights.requires_grad_(), grad


def results(net: Any, call: Any = None, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    net.zero_grad()
    x, index, weights, grad = batch(seed, dtype)
    y = (net if call is None else call)(x, index, weights)
    y.backward(grad)
    return gradients(net) | {"y": y.detach(), "x": x.grad, "weights": weights.grad} | octavo.nn.delayed_state_dict(net)


class Loop(nn.Module):
    """One expert after the other; of no delayed state."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = experts.gate_up, experts.down, experts.activation

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = x.new_zeros(*index.shape, H)
        for expert in range(E):
            token, place = torch.where(index == expert)
            parameters, layers = [], []
            for part in (self.gate_up, self.down):
                weight = part.weight[expert]
                parameters.append((weight, None if part.bias is None else part.bias[expert]))
                operands = cast_role(weight.detach(), part.recipe, WEIGHT, True, True, None)
                layers.append(Layer(operands, part.recipe, None, False))
            chain = Chain(None, tuple(layers), self.activation, x.dtype, False)
            y = y.index_put((token, place), run_chain(x[token], (None, None), parameters, chain))
        return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu_tanh", "squared_relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_equal_to_a_loop_over_experts(name: str, activation: str, bias: bool) -> None:
    experts = experts_of(RECIPES[name](), activation=activation, bias=bias)
    found, expected = results(experts), results(Loop(experts))
    for key, value in expected.items():
        if key.endswith("bias"):  # torch adds rows in another order
            torch.testing.assert_close(found[key], value)
        else:
            assert torch.equal(found[key], value), key
    assert not any(found[key][E - 1].any() for key in expected if key.endswith(("weight", "bias")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_in_high_precision_they_are_a_mixture_of_experts(dtype: torch.dtype) -> None:
    experts = experts_of(recipes.high_precision(), dtype=dtype)
    x, index, weights, _ = batch(dtype=dtype)
    expected = torch.zeros(T, H, dtype=torch.float64)
    for expert in range(E):
        token, place = torch.where(index == expert)
        gate, up = (x[token].double() @ experts.gate_up.weight[expert].double().t()).chunk(2, -1)
        y = (nn.functional.silu(gate) * up) @ experts.down.weight[expert].double().t()
        expected.index_add_(0, token, y * weights[token, place, None].double())
    assert sqnr(experts(x, index, weights), expected) > (40 if dtype == torch.bfloat16 else 120)
    experts = octavo.set_recipe(experts, recipes.rowwise())
    assert 20 < sqnr(experts(x, index, weights), expected) < 40


def test_activations_are_fused_unless_somebody_looks() -> None:
    experts = experts_of(recipes.dynamic())
    x, index, weights, _ = batch()
    with CountOps() as ops, torch.no_grad():
        fused = experts(x, index, weights)
    assert dict(ops.calls) == {"grouped_cast": 4, "grouped_matmul": 2}
    seen: list[Tensor] = []
    experts.gate_up.register_forward_hook(lambda module, arguments, output: seen.append(output))
    apart = experts(x, index, weights)
    routing = Routing.of(index.flatten(), E)
    assert torch.equal(seen[0], experts.gate_up(x[routing.order // K], routing.offsets))
    y = experts.down(activate(seen[0], "swiglu"), routing.offsets)[routing.inverse]
    assert torch.equal(apart, (y.view(T, K, H) * weights[..., None]).sum(1))
    assert sqnr(fused, apart) > 25


def test_parts_follow_recipes_of_their_own() -> None:
    experts = experts_of(octavo.RecipeMap(recipes.dynamic(), {"down": {"grad_weight": None}, "gate_up": None}))
    assert experts.gate_up.recipe.is_high_precision and experts.down.recipe.grad_weight is None
    found, expected = results(experts), results(experts_of(recipes.high_precision()))
    assert all(sqnr(found[key], value) > 18 for key, value in expected.items() if value.any())


def test_compiled_they_are_one_graph_whatever_the_routing() -> None:
    torch.compiler.reset()
    experts, dtype = experts_of(recipes.delayed(), dtype=torch.bfloat16), torch.bfloat16
    other, counter = copy.deepcopy(experts), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for seed in range(3):
        assert_equal(results(experts, seed=seed, dtype=dtype), results(other, compiled, seed, dtype))
    assert counter.frame_count == 1


def test_nothing_is_read_on_the_host() -> None:
    experts = experts_of(recipes.delayed())
    with FakeTensorMode(allow_non_fake_inputs=True):  # where a read raises
        x, index, weights, grad = batch()
        assert experts(x, index, weights).shape == x.shape
        experts(x, index, weights).backward(grad)


@pytest.mark.parametrize("shape", [(2, 3), (0,)], ids=str)
def test_any_leading_dimensions_and_autocast(shape: tuple[int, ...]) -> None:
    experts, x = experts_of(recipes.blockwise(), bias=True), torch.randn(*shape, H, requires_grad=True)
    tokens = x.numel() // H
    index, weights = torch.randint(E, (tokens, K)), torch.rand(tokens, K)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.sum().backward()
    assert x.grad.shape == x.shape and experts.down.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["dynamic", "high precision"])
def test_wrong_input_is_refused(name: str) -> None:
    experts = experts_of(recipes.high_precision() if name == "high precision" else recipes.dynamic())
    x, index, weights, _ = batch()
    for wrong, error, said in (
        ((x, index[1:], weights[1:]), ValueError, r"top_k_index \[18, 2\] .* must both be \[19 tokens, k\]"),
        ((x, index, weights[:, 1:]), ValueError, r"top_k_weights \[19, 1\]"),
        ((x, index.float(), weights), TypeError, r"top_k_index is torch\.float32"),
        ((x, index, index), TypeError, r"top_k_weights is torch\.int64"),
        ((x, index + E, weights), RuntimeError, "not below 5"),
        ((x, index - E, weights), RuntimeError, "not below 5"),
        ((x[:, 1:], index, weights), ValueError, "needs in_features=32"),
        ((x.bfloat16(), index, weights), TypeError, "the weight is torch.float32"),
    ):
        with pytest.raises(error, match=said):
            experts(*wrong)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        experts.double()(x.double(), index, weights)
    with pytest.raises(ValueError, match="activation='tanh'"):
        Experts(E, H, N, "tanh")


@pytest.mark.parametrize("name", RECIPES)
def test_layouts_that_a_gpu_wants_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes written transposed, contractions padded to 16."""
    experts = Experts(E, 35, 23, bias=True, recipe=RECIPES[name]())
    flipped = copy.deepcopy(experts)
    for part in (flipped.gate_up, flipped.down):
        part.weight = nn.Parameter(part.weight.detach().mT.contiguous().mT)  # as GPT-OSS stores it
    torch.manual_seed(1)
    weights, index = torch.randn(T, E - 1).softmax(-1).topk(K)
    x, grad = torch.randn(2, T, 35)

    def computed(net: Experts) -> dict[str, Tensor]:
        net.zero_grad()
        given = x.clone().requires_grad_()
        y = net(given, index, weights)
        y.backward(grad)
        return gradients(net) | {"y": y.detach(), "x": given.grad}

    expected = computed(experts)
    for key, value in computed(flipped).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)
    for module in ("casts", "grouped"):
        monkeypatch.setattr(f"octavo.autograd.{module}.needs_transposed_codes", lambda device: True)
    for module in ("casts", "products"):
        monkeypatch.setattr(f"octavo.autograd.{module}.contraction_multiple", lambda device: 16)
    for net in (experts, flipped):
        octavo.nn.invalidate(net)
        for part in (net.gate_up, net.down):
            part.reset_delayed_state()
        for key, value in computed(net).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)
