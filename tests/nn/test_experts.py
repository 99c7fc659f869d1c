"""Experts equal a loop over experts whose two linear layers are fused as LayerNormMLP's."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

import octavo
from octavo import E4M3, Cast, PerBlock, PerTensor, recipes
from octavo.autograd.casts import CastRequest, cast_role
from octavo.autograd.chain import Chain, ChainTensors, run_chain
from octavo.autograd.products import Layer
from octavo.kernels.reference.activation import activate
from octavo.nn.candidates import features
from octavo.nn.experts import ConvertedExperts, Experts, ExpertsPart, Routing, keys_of
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.recipe import WEIGHT
from octavo.weights.stored import StoredWeight
from tests.support import expert_models
from tests.support.expert_models import GroupedExperts
from tests.support.fused_cases import SAVED
from tests.support.helpers import FP8_RECIPES, CountOps, assert_equal, every_layer, gradients, padded_as_on_gpu, sqnr
from tests.support.stored_weights import STORED, of_codes, store

E, H, N, T, K = 4, 32, 48, 19, 2

RECIPES = FP8_RECIPES | {
    "gw_hp": recipes.rowwise_with_gw_hp,
    "saved": lambda: dataclasses.replace(recipes.blockwise(), saved=SAVED),
    "saved, gw_hp": lambda: dataclasses.replace(recipes.rowwise_with_gw_hp(), saved=SAVED),
    "saved a group": lambda: dataclasses.replace(recipes.rowwise_with_gw_hp(), saved=Cast(E4M3, PerTensor())),
    "saved in blocks": lambda: dataclasses.replace(recipes.rowwise_with_gw_hp(), saved=Cast(E4M3, PerBlock(3, 16))),
}


def experts_of(recipe: Any, **options: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(E, H, N, **options, recipe=recipe)


def batch(seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, their experts, of which the last gets none, weights, and the gradient of the result."""
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
    """A loop over experts, without delayed state."""

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
                parameters += [weight, None if part.bias is None else part.bias[expert]]
                operands = cast_role(weight.detach(), CastRequest(part.recipe, WEIGHT, True, True), None)
                layers.append(Layer(operands, part.recipe, None, False))
            chain = Chain(None, tuple(layers), self.activation, x.dtype, False)
            y = y.index_put((token, place), run_chain(ChainTensors(x[token], None, None, *parameters), chain))
        return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu_tanh", "squared_relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_equal_to_a_loop_over_experts(name: str, activation: str, bias: bool) -> None:
    experts = experts_of(RECIPES[name](), activation=activation, bias=bias)
    actual, expected = results(experts), results(Loop(experts))
    for key, value in expected.items():
        if key.endswith("bias"):  # torch adds rows in another order
            torch.testing.assert_close(actual[key], value)
        else:
            assert torch.equal(actual[key], value), key
    assert not any(actual[key][E - 1].any() for key in expected if key.endswith(("weight", "bias")))


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
    routing = Routing.by_expert(index.flatten(), E)
    assert torch.equal(seen[0], experts.gate_up(x[routing.order // K], routing.offsets))
    y = experts.down(activate(seen[0], "swiglu"), routing.offsets)[routing.inverse]
    assert torch.equal(apart, (y.view(T, K, H) * weights[..., None]).sum(1))
    assert sqnr(fused, apart) > 25


def test_parts_follow_recipes_of_their_own() -> None:
    experts = experts_of(octavo.RecipeMap(recipes.dynamic(), {"down": {"grad_weight": None}, "gate_up": None}))
    assert experts.gate_up.recipe.is_high_precision and experts.down.recipe.grad_weight is None
    actual, expected = results(experts), results(experts_of(recipes.high_precision()))
    assert all(sqnr(actual[key], value) > 18 for key, value in expected.items() if value.any())


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
        ((x, index + E, weights), RuntimeError, "not below 4"),
        ((x, index - E, weights), RuntimeError, "not below 4"),
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
        leaf = x.clone().requires_grad_()
        y = net(leaf, index, weights)
        y.backward(grad)
        return gradients(net) | {"y": y.detach(), "x": leaf.grad}

    expected = computed(experts)
    for key, value in computed(flipped).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)
    for module in ("casts", "grouped"):
        monkeypatch.setattr(f"octavo.autograd.{module}.needs_transposed_codes", lambda device: True)
    for module in ("casts", "products"):
        monkeypatch.setattr(f"octavo.autograd.{module}.contraction_multiple", padded_as_on_gpu)
    for net in (experts, flipped):
        octavo.nn.invalidate(net)
        for part in (net.gate_up, net.down):
            part.reset_delayed_state()
        for key, value in computed(net).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)


# --- transformers' experts modules and torchtitan's: what changes is their forward alone, and back

# a gate; biases, stored [E, in, out], gate and up interleaved, an activation that no cast knows; the same concatenated;
# no gate
SIZES = {"hidden_size": H, "intermediate_size": N, "num_local_experts": E}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: MixtralExperts(transformers.MixtralConfig(**SIZES)),
    "gpt-oss": lambda: GptOssExperts(transformers.GptOssConfig(**SIZES)),
    "privacy filter": lambda: OpenAIPrivacyFilterExperts(transformers.OpenAIPrivacyFilterConfig(**SIZES)),
    "nemotron": lambda: NemotronHExperts(
        transformers.NemotronHConfig(hidden_size=H, moe_intermediate_size=N, n_routed_experts=E)
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def built(kind: str) -> Any:
    torch.manual_seed(0)
    experts = KINDS[kind]()
    experts.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    return experts


def in_fp8(kind: str, recipe: Any, **options: Any) -> Any:
    return octavo.convert(nn.ModuleDict({"experts": built(kind)}), recipe, every_layer, **options)["experts"]


@each_kind
def test_names_parameters_and_hooks_stay(kind: str) -> None:
    plain = built(kind)
    experts = copy.deepcopy(plain)
    called: list[str] = []
    experts.register_forward_hook(lambda *_: called.append("experts"))
    parameters, expected = dict(experts.named_parameters()), results(experts)
    assert octavo.convert(experts, recipes.high_precision(), every_layer) is experts
    assert isinstance(experts, ConvertedExperts) and isinstance(experts, type(plain))
    assert type(experts).__name__ == type(plain).__name__
    assert list(experts.state_dict()) == list(plain.state_dict())
    assert {name: id(p) for name, p in experts.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    for key, value in results(experts).items():
        torch.testing.assert_close(value, expected[key])
    octavo.set_recipe(experts, recipes.rowwise())
    for key, value in results(experts).items():
        assert 20 < sqnr(value, expected[key]) < (200 if key == "down_proj_bias" else 45), key  # which no cast passes
    assert type(octavo.restore(experts)) is type(plain) and not dict(experts.named_children()).keys() & {"gate_up"}
    assert_equal(results(experts), expected)
    assert len(called) == 4
    assert experts.state_dict().keys() == plain.state_dict().keys() and features(experts) == (H, N)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", FP8_RECIPES)
@pytest.mark.parametrize(("kind", "activation"), [("mixtral", "swiglu"), ("nemotron", "squared_relu")])
def test_equal_to_octavos_own(name: str, kind: str, activation: str) -> None:
    experts = in_fp8(kind, FP8_RECIPES[name]())
    octavos = octavo.nn.Experts(E, H, N, activation, bias=False, recipe=FP8_RECIPES[name]())
    keys = {f"{part}.weight": key for part, key in keys_of(experts).items()}
    octavos.load_state_dict({theirs: experts.state_dict()[key] for theirs, key in keys.items()})
    for _ in range(2):
        assert_equal(results(experts), {keys.get(key, key): value for key, value in results(octavos).items()})


@pytest.mark.parametrize("name", ["dynamic", "blockwise"])
@pytest.mark.parametrize("kind", ["gpt-oss", "privacy filter"])
def test_equal_to_linears_with_the_models_own_gate(name: str, kind: str) -> None:
    experts = in_fp8(kind, FP8_RECIPES[name]())
    torch.manual_seed(1)
    weights, index = torch.randn(T, E).softmax(-1).topk(K)
    x = torch.randn(T, H)
    expected = torch.zeros(T, H)
    for expert in range(E):
        token, place = torch.where(index == expert)
        linears = []
        for key in ("gate_up_proj", "down_proj"):
            weight, bias = getattr(experts, key)[expert].detach(), getattr(experts, f"{key}_bias")[expert].detach()
            linears.append(octavo.nn.Linear(*weight.shape, recipe=FP8_RECIPES[name]()))
            linears[-1].load_state_dict({"weight": weight.t(), "bias": bias})
        y = linears[1](experts._apply_gate(linears[0](x[token])))
        expected.index_add_(0, token, y * weights[token, place, None])
    torch.testing.assert_close(experts(x, index, weights), expected, rtol=1e-5, atol=1e-5)


def test_recipes_by_the_names_of_the_module_its_parts_and_parameters() -> None:
    def chosen(**rules: Any) -> list[str]:
        patterns = {key.replace("__", "."): rule for key, rule in rules.items()}
        experts = in_fp8("mixtral", octavo.RecipeMap(recipes.dynamic(), patterns))
        names = [part.recipe.name for part in (experts.gate_up, experts.down)]
        octavo.set_recipe(experts, recipes.rowwise())
        octavo.set_recipe(nn.ModuleDict({"experts": experts}), octavo.RecipeMap(recipes.dynamic(), patterns))
        assert names == [part.recipe.name for part in (experts.gate_up, experts.down)]
        return names

    assert chosen(experts=recipes.mx()) == ["mx", "mx"]
    assert chosen(experts__down=recipes.mx()) == ["dynamic", "mx"]
    assert chosen(experts__gate_up_proj=None, experts=recipes.mx()) == ["mx", "mx"]
    assert chosen(experts=recipes.mx(), experts__gate_up_proj=None) == ["high_precision", "mx"]
    with pytest.warns(UserWarning, match=r"match no module: \['experts.up_proj'\]"):
        chosen(experts__up_proj=None)


def test_a_second_convert_finds_recipes_by_the_same_names() -> None:
    model = nn.ModuleDict({"experts": built("mixtral")})
    for _ in range(2):
        recipe = octavo.RecipeMap(recipes.dynamic(), {"experts": recipes.blockwise()})
        octavo.convert(model, recipe, lambda *_: True)
        parts = [module for module in model.modules() if isinstance(module, RecipeModule)]
        assert parts and {part.recipe.name for part in parts} == {"blockwise"}
        assert sorted(part.fp8.gather.name for part in parts) == ["experts.down", "experts.gate_up"]


def test_what_convert_takes_by_default_and_what_summary_says() -> None:
    model, recipe = nn.ModuleDict({"experts": built("gpt-oss")}), recipes.dynamic()
    with pytest.warns(UserWarning, match=r"converted nothing: 32 x 48 features; .* \(1 such, first experts\)"):
        octavo.convert(model, recipe)
    assert [row.reason[:16] for row in octavo.summary(model).modules] == ["32 x 48 features"] * 2
    octavo.convert(model, recipe, lambda module, name: min(features(module)) >= 32)
    rows = [(row.name, row.shape, row.recipe) for row in octavo.summary(model).modules]
    assert rows == [("experts.gate_up_proj", (E, H, 2 * N), recipe), ("experts.down_proj", (E, N, H), recipe)]
    with octavo.using(model, recipes.mx()):
        assert {row.recipe for row in octavo.summary(model).modules} == {recipes.mx()}
    octavo.convert(model, recipes.blockwise())
    assert {row.recipe for row in octavo.summary(model).modules} == {recipes.blockwise()}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda experts: experts.double(), "torch.float64"),
        (lambda experts: setattr(experts, "forward", lambda *_: None), "its forward was replaced"),
        (lambda it: it.register_parameter("scale", nn.Parameter(torch.ones(E))), "experts stay|no linear layer"),
        (lambda experts: delattr(experts, "has_gate"), "no linear layer"),
    ],
)
def test_left_alone(spoil: Callable[[Any], Any], reason: str) -> None:
    experts = built("mixtral")
    spoil(experts)
    kind = type(experts)
    with pytest.warns(UserWarning, match=rf"converted nothing: .*{reason}|{reason}"):
        octavo.convert(experts, recipes.dynamic(), every_layer)
    assert type(experts) is kind


@pytest.mark.parametrize("how", ["loaded", "written", "replaced"])
def test_a_weight_of_other_origin_forgets_its_history(how: str) -> None:
    experts = in_fp8("mixtral", recipes.delayed())
    results(experts)
    larger = {key: 64 * value for key, value in experts.state_dict().items()}
    if how == "loaded":
        experts.load_state_dict(larger)
        assert not experts.gate_up.delayed_scale.any()
    elif how == "written":
        with torch.no_grad():
            experts.gate_up_proj.copy_(larger["gate_up_proj"])
    else:
        experts.gate_up_proj = nn.Parameter(larger["gate_up_proj"])
    rows, offsets = torch.randn(T, H), Routing.by_expert(torch.randint(E, (T,)), E).offsets
    y = experts.gate_up(rows, offsets)
    with octavo.using(experts, recipes.high_precision()):
        assert sqnr(y, experts.gate_up(rows, offsets)) > 20


def test_expert_parallelism_of_transformers_leaves_out_what_other_ranks_have() -> None:
    experts, x = in_fp8("mixtral", recipes.dynamic()), torch.randn(T, H)
    index = torch.randint(E, (T, K))
    alone = experts(x, index, torch.tensor([1.0, 0.0]).expand(T, K))
    index[:, 1] = E
    with pytest.raises(RuntimeError, match="not below 4"):
        experts(x, index, torch.ones(T, K))
    experts._is_expert_parallel = True
    weights = torch.ones(T, K, requires_grad=True)
    y = experts(x, index, weights)
    assert sqnr(y, alone) > 25  # whose groups had other rows too
    y.sum().backward()
    assert not weights.grad[:, 1].any()


def test_parts_are_not_their_holders_owners() -> None:
    experts = in_fp8("gpt-oss", recipes.delayed())
    assert [type(child) for child in experts.children()] == [ExpertsPart, ExpertsPart]
    assert not list(experts.gate_up.parameters())
    routing = Routing.by_expert(torch.randint(E, (8,)), E)
    assert experts.gate_up(torch.randn(8, H), routing.offsets).shape == (8, 2 * N)
    assert copy.deepcopy(experts).to("meta").to_empty(device="cpu").gate_up.delayed_scale.tolist() == [0, 0, 0]
    stored = in_fp8("mixtral", recipes.delayed(), weight_storage="fp8")  # which has no other parameters
    stored.gate_up(torch.randn(8, H), routing.offsets)
    assert stored.to("meta").gate_up.delayed_scale.is_meta
    assert not stored.to_empty(device="cpu").gate_up.delayed_scale.is_meta


class NamedByShapes(GroupedExperts):
    """The structure of torchtitan 0.3's: the same, by other names."""

    def __init__(self) -> None:
        super().__init__()
        for name in [*self._parameters]:
            self.register_parameter(f"{name}_{'EDF' if name == 'w2' else 'EFD'}", self._parameters.pop(name))

    def __getattr__(self, name: str) -> Any:
        shapes = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}
        return super().__getattr__(shapes.get(name, name))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return super().forward(x_RD, num_tokens_per_expert_E)


@pytest.mark.parametrize(("name", "kind"), [("delayed", GroupedExperts), ("rowwise", NamedByShapes)])
def test_torchtitans(name: str, kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"experts": kind(), "own": kind()})
    w1, w2, w3 = sorted(model["own"]._parameters)
    model["own"].load_state_dict(model["experts"].state_dict())
    counts = torch.tensor([3.0, 0.0, 9.0, 5.0])  # as torch.histc counts
    traces = []
    recipe = octavo.RecipeMap(FP8_RECIPES[name](), {f"experts.{w2}": {"grad_weight": None}})
    octavo.convert(model, recipe, lambda module, name: name == "experts")
    for experts in model.values():
        torch.manual_seed(1)
        x, grad = torch.randn(2, T, H)
        y = experts(x.requires_grad_(), counts)
        y.backward(grad)
        assert not y[17:].any()
        traces.append(gradients(experts) | {"y": y.detach(), "x": x.grad})
    assert all(17 < sqnr(value, traces[1][key]) < 45 for key, value in traces[0].items())
    assert not any(value[1].any() for key, value in traces[0].items() if key[0] == "w")
    assert features(model["experts"]) == (H, N) and model["experts"].down.recipe.grad_weight is None
    assert [row.name for row in octavo.summary(model).converted] == [f"experts.{key}" for key in (w1, w3, w2)]
    assert type(octavo.restore(model)["experts"]) is kind
    assert torch.equal(model["experts"](x, counts), y)


class GeluExperts(GroupedExperts):
    """The structure of torchtitan's experts, with another activation."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        rows = zip(x.split(num_tokens_per_expert.tolist()), self.w1, self.w2, self.w3, strict=True)
        return torch.cat([(nn.functional.gelu(x @ w1.t()) * (x @ w3.t())) @ w2.t() for x, w1, w2, w3 in rows])


def padded(run: Any) -> Any:
    return lambda *args: run(*args)


@padded
def run_experts(x: Tensor, *weights: Tensor) -> Tensor:
    return nn.functional.silu(x @ weights[0][0].t())


class CallsFunction(GroupedExperts):
    """The same, whose activation is in a decorated function of its file."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return run_experts(x, self.w1, self.w2, self.w3)


def test_experts_of_torchtitans_parameters_with_another_activation_stay() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(8, 8), "experts": GeluExperts()})
    with pytest.warns(UserWarning, match="experts stay in high precision: 1 modules' weights, first experts's"):
        octavo.convert(model, recipes.dynamic(), every_layer)
    assert type(model["experts"]) is GeluExperts and type(model["linear"]) is octavo.nn.Linear
    assert keys_of(CallsFunction()) == keys_of(GroupedExperts()) == {"gate": "w1", "up": "w3", "down": "w2"}


def test_a_forward_over_that_of_transformers_stays() -> None:
    kind = type(built("mixtral"))

    class Doubled(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any) -> Tensor:
            return 2 * super().forward(*args)

    experts = built("mixtral")
    assert keys_of(experts)
    experts.__class__ = Doubled
    with pytest.warns(UserWarning, match="converted nothing"):
        assert type(octavo.convert(experts, recipes.dynamic(), every_layer)) is Doubled


# --- experts whose weights live in FP8

RAGGED = 160, 288  # of blocks of 128 the last are not whole
both = pytest.mark.parametrize("recipe", ["dynamic by powers of two", "blockwise"])  # codes are those of a cast


@pytest.mark.covering(1)
@both
@pytest.mark.parametrize("kind", KINDS)
def test_converted_experts_compute_as_plain_ones_of_their_values(kind: str, recipe: str) -> None:
    stored = store(nn.ModuleDict({"experts": built(kind)}), STORED[recipe]())["experts"]
    for part in stored.parts:
        weight = part.weight_parameter
        assert isinstance(weight, StoredWeight) and isinstance(weight, nn.Parameter)
        assert torch.equal(getattr(stored, f"{part.weight_key}_scale_inv"), weight.scale_inv)
    plain = octavo.convert(nn.ModuleDict({"experts": built(kind)}), STORED[recipe](), every_layer)["experts"]
    expected = results(plain)
    assert_equal(results(stored), expected)
    for copied in (copy.deepcopy(stored), pickle.loads(pickle.dumps(stored))):
        assert_equal(results(copied), expected)
    codes, narrow = stored.down_proj.qdata, copy.deepcopy(stored).bfloat16().down_proj
    assert isinstance(narrow, StoredWeight) and torch.equal(narrow.qdata.view(torch.uint8), codes.view(torch.uint8))
    restored = octavo.restore(of_codes(stored))
    plain.load_state_dict(stored.state_dict())
    assert type(restored) is type(built(kind)) and type(restored.down_proj) is nn.Parameter
    assert_equal(dict(restored.state_dict()), dict(plain.state_dict()))
    with torch.no_grad():
        stored.down_proj.zero_()
    stored.load_state_dict(plain.state_dict())
    assert_equal(results(stored), expected)
    octavo.set_recipe(stored, recipes.high_precision())
    octavo.set_recipe(plain, recipes.high_precision())
    # torch's products, whose last bits depend on where a tensor's memory begins
    torch.testing.assert_close(results(stored), results(plain), rtol=1e-5, atol=1e-5)
    index, x = torch.zeros(3, 1, dtype=torch.int64), torch.randn(3, 32)
    with torch.inference_mode():
        torch.testing.assert_close(stored(x, index, torch.ones(3, 1)), plain(x, index, torch.ones(3, 1)))


def test_what_a_state_dict_holds() -> None:
    layer = store(octavo.nn.GroupedLinear(2, 300, 40, bias=False), recipes.blockwise())
    state = layer.state_dict()
    shapes = {name: (value.dtype, list(value.shape)) for name, value in state.items()}
    assert shapes == {"weight": (torch.uint8, [2, 40, 1, 300]), "weight_scale_inv": (torch.float32, [2, 1, 3])}
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.zeros(3, 40, 300)})
    with pytest.raises(ValueError, match=r"weight_scale_inv of shape \(1, 3\) does not fit \(2, 40, 300\)"):
        layer.load_state_dict(state | {"weight_scale_inv": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="weight holds FP8 codes, but there is no weight_scale_inv"):
        layer.load_state_dict({"weight": state["weight"]})


def model_of_both() -> nn.Module:
    torch.manual_seed(0)
    experts = octavo.nn.Experts(E, *RAGGED, recipe=recipes.high_precision())
    return nn.ModuleDict({"linear": nn.Linear(160, 160), "own": experts, "titan": GroupedExperts()}).bfloat16()


@pytest.mark.parametrize("make", [recipes.rowwise, recipes.mx, recipes.rowwise_with_gw_hp])
def test_recipes_that_can_not_store_change_nothing(make: Any) -> None:
    model, recipe = model_of_both(), octavo.RecipeMap(recipes.dynamic(), {"titan.down": make()})
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"^titan.w2: weights can't be stored in FP8 under"):
        store(model, recipe)
    assert type(model["linear"]) is nn.Linear and type(model["titan"]) is GroupedExperts
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with pytest.raises(ValueError, match="can't read weights that are stored in FP8"):
        octavo.set_recipe(store(model), recipe)


def test_frozen_experts_that_are_stored_transposed_have_no_scales_of_rows() -> None:
    model = expert_models.built("stored transposed", "dynamic").requires_grad_(False)
    with pytest.raises(ValueError, match=r"experts\.\w+: experts \[E, K, N\] can't be stored in FP8 under 'mx'"):
        octavo.convert(model, recipes.mx(), lambda module, name: name != "router", "fp8")
    assert not any(isinstance(parameter, StoredWeight) for parameter in model.parameters())


def test_each_matrix_of_the_experts_says_its_recipe() -> None:
    experts = expert_models.built("stored", "dynamic").experts
    assert repr(experts.gate_up) == "ExpertsPart(gate_up_proj, recipe=dynamic)"
    assert repr(experts.down) == "ExpertsPart(down_proj, recipe=dynamic)"


def test_some_of_the_experts_matrices() -> None:
    experts = store(GroupedExperts(), octavo.RecipeMap(recipes.dynamic(), {"w3": recipes.high_precision()}))
    assert [isinstance(experts.get_parameter(key), StoredWeight) for key in ("w1", "w3", "w2")] == [True, False, True]
    experts(torch.randn(6, 32), torch.tensor([1, 2, 0, 3])).sum().backward()
