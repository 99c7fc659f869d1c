"""convert(fuse=True) in transformers' models as they come, tiny and random."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import warnings
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import octavo
from octavo import E4M3, Cast, Dynamic, PerBlock, recipes
from octavo.autograd import casts
from octavo.kernels import layouts
from octavo.nn.candidates import SHARDED
from octavo.nn.fused import run_as_one
from octavo.nn.known_forwards import (
    Attention,
    FeedForward,
    KnownForward,
    LeanRMSNorm,
    refusal,
)
from octavo.nn.saved import predicted_by_kind, saved_by_kind, twin_of
from octavo.nn.tensor_parallel import FusedParts
from tests.support.helpers import CountOps, assert_equal, every_layer, gradients, to_fp8

transformers = pytest.importorskip("transformers")

from tests.support.tiny_models import DECODER, MODELS, T5, VOCABULARY, new  # noqa: E402

WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
ATTENTIONS = {
    "llama": MODELS["llama"],
    "mistral": ("Mistral", "MistralForCausalLM", DECODER | {"sliding_window": 4}),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", DECODER | WINDOWS),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", DECODER | WINDOWS | {"head_dim": 16}),
}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4}
FAMILIES = {
    "llama": MODELS["llama"],
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", DECODER | {"head_dim": 16}),
    "mixtral": MODELS["mixtral"],
    "vit": MODELS["vit"],
    "t5": MODELS["t5"],
    "t5, gated": ("T5", "T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "num_layers": 1}),
    "mamba": ("Mamba", "MambaForCausalLM", MAMBA),
}
# feed-forwards and norms that are fused
FUSED = {
    "llama": (2, 5),
    "qwen3": (2, 9),
    "mixtral": (0, 5),  # its experts are converted with their activation whether fused or not
    "vit": (2, 0),  # torch's LayerNorm saves its input alone already
    "t5": (4, 12),
    "t5, gated": (2, 7),
    "mamba": (0, 3),
}
# a mixer reads one layer's weight without calling it, which convert says
pytestmark = pytest.mark.filterwarnings("ignore:2 layers stay in high precision, first backbone.layers.0.mixer.dt_proj")
each_family = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("llama", "t5, gated") else pytest.mark.full) for kind in FAMILIES]
)


def build(kind: str, recipe: octavo.Recipe | None = None, fuse: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    net = new(*FAMILIES[kind]).train().to(dtype)
    return net if recipe is None else octavo.convert(net, recipe, every_layer, fuse=fuse)


def inputs(kind: str, seed: int = 5) -> dict[str, Tensor]:
    if kind != "vit":
        tokens = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": tokens, "labels": tokens}
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    return {"pixel_values": images, "labels": torch.tensor([0, 1])}


def step(net: Any, kind: str = "llama", seed: int = 5) -> dict[str, Tensor]:
    """The loss and gradients of a step."""
    net.zero_grad()
    arguments = inputs(kind, seed)
    if kind == "vit":
        arguments["pixel_values"] = arguments["pixel_values"].to(net.dtype)
    loss = net(**arguments).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(net)}


def fused(net: nn.Module) -> tuple[int, int]:
    modules = list(net.modules())
    return sum(isinstance(one, FeedForward) for one in modules), sum(isinstance(one, LeanRMSNorm) for one in modules)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the distance of all gradients together, by their size."""
    assert a.keys() == b.keys()
    difference = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return float((difference / sum(one.double().square().sum() for one in b.values())).sqrt())


@each_family
def test_it_computes_what_the_model_does(kind: str) -> None:
    net, plain = build(kind, recipes.blockwise()), build(kind, recipes.blockwise(), fuse=False)
    assert fused(net) == FUSED[kind] and fused(plain) == (0, 0)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
    octavo.convert(net, recipes.blockwise())
    assert fused(net) == FUSED[kind]  # as it was
    # float32 differs in its last bits, 2^-24; an element so near a tie between codes that it rounds to the other, 1/8
    # of it away, is one in 2^20, and one of at least 2 x 12 x 64 that make up a gradient
    assert distance(step(net, kind), step(plain, kind)) < 1 / 8 / (24 * 64) ** 0.5
    saved = [saved_by_kind(model, (), inputs(kind)) for model in (net, plain)]
    assert saved == [predicted_by_kind(model, (), inputs(kind)) for model in (net, plain)]
    less = sum(saved[0].values()) - sum(saved[1].values())
    assert less == 0 if kind == "vit" else less < 0  # GELU, of one input, saves that alone
    assert_equal(step(octavo.restore(net), kind), step(build(kind), kind))
    assert [type(one) for one in net.modules()] == [type(one) for one in build(kind).modules()]


@pytest.mark.parametrize("saved", [None, Cast(E4M3, PerBlock(1, 32), Dynamic())])
def test_a_feed_forward_is_octavos_own_bit_for_bit(saved: Cast | None) -> None:
    """vit's is fc1 and fc2 of a LayerNormMLP without its norm, llama's an RMSNormMLP, of one matrix for gate and up."""
    vit = build("vit", recipes.delayed()).vit.layers[0].mlp
    x = torch.randn(3, 17, 64)
    parts = FusedParts(x, [linear.layer_tensors() for linear in (vit.fc1, vit.fc2)])
    assert torch.equal(vit(x), run_as_one(parts, None, [vit.fc1, vit.fc2], "gelu", x.dtype))
    recipe = dataclasses.replace(recipes.blockwise(), saved=saved)
    layer = build("llama", recipe).model.layers[0]
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    octavos = octavo.nn.RMSNormMLP(64, 176, eps=norm.variance_epsilon, bias=False, recipe=recipe)
    joined = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    octavos.load_state_dict({"norm.weight": norm.weight, "fc1.weight": joined, "fc2.weight": mlp.down_proj.weight})
    # 176 is no multiple of 128: a block of joined rows has some of gate's and some of up's, so weights of one scale
    with torch.no_grad():
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight[::7, ::3] = 1.0
        octavos.fc1.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = mlp(norm(a)), octavos(b)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(mlp.down_proj.weight.grad, octavos.fc2.weight.grad)
    assert distance({"x": a.grad, "norm": norm.weight.grad}, {"x": b.grad, "norm": octavos.norm.weight.grad}) < 0.02


class Run(NamedTuple):
    """The computation of a model with attention: its arguments, and the number of products of the first step."""

    values: dict[str, Tensor]
    in_autocast: dict[str, Tensor]
    tokens: Tensor
    arguments: list[dict[str, Any]]
    products: int


def run_of(kind: str, fuse: bool) -> Run:
    functions, arguments = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, list[dict[str, Any]]()
    attend = functions["sdpa"]

    def noted(*args: Any, **named: Any) -> Any:
        arguments.append({name: str(value) for name, value in named.items()})
        return attend(*args, **named)

    torch.manual_seed(0)
    net = octavo.convert(new(*ATTENTIONS[kind]).train(), recipes.mx(), every_layer, fuse=fuse)
    assert sum(isinstance(one, Attention) for one in net.modules()) == 2 * fuse
    vectors = [one for layer in net.model.layers for one in layer.self_attn.parameters() if one.ndim == 1]
    with torch.no_grad():
        for vector in vectors:  # weights of norms, which are 1 in a new model, and biases, which are 0
            vector.add_(torch.linspace(-0.5, 0.5, len(vector)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(functions, "sdpa", noted)
        with CountOps() as ops:
            values = step(net)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            in_autocast = step(net)
        net.eval().generation_config.pad_token_id = 0
        tokens = net.generate(inputs(kind)["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
    return Run(values, in_autocast, tokens, arguments, ops.calls["matmul"])


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.full), *[*ATTENTIONS][1:]])
def test_attention_computes_what_its_own_class_does(kind: str) -> None:
    """Attention computes as its class does; under mx no scale is of two layers, so joined layers have equal codes."""
    fused, plain = run_of(kind, True), run_of(kind, False)
    # see test_it_computes_what_the_model_does; in autocast, between roundings to bfloat16
    assert distance(fused.values, plain.values) < 1 / 8 / (24 * 64) ** 0.5
    assert distance(fused.in_autocast, plain.in_autocast) < 0.1
    assert torch.equal(fused.tokens, plain.tokens) and fused.arguments == plain.arguments
    assert plain.products - fused.products == 2 * 2 * 3  # of two layers, two layers less, each of three products


def test_attention_of_another_forward_is_named_and_stays() -> None:
    net = build("llama")
    attention = net.model.layers[0].self_attn
    attention.__class__ = type("Other", (type(attention),), {"forward": lambda self, **kwargs: None})
    octavo.convert(net, recipes.dynamic(), every_layer, fuse=True)
    assert octavo.summary(net).not_fused == {"model.layers.0.self_attn": "octavo does not know the forward of Other"}


def test_it_generates_the_same_tokens() -> None:
    tokens, generated = inputs("t5")["input_ids"][:, :4], []
    for fuse in (True, False):
        net = build("t5", recipes.blockwise(), fuse).eval()
        net.generation_config.pad_token_id = 0
        generated.append(net.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=True))
    assert torch.equal(*generated)


def test_where_someone_looks_on_the_parts_run_as_they_are() -> None:
    net, plain = (build("llama", recipes.dynamic(), fuse, torch.bfloat16) for fuse in (True, False))
    mlp = net.model.layers[0].mlp
    norms_alone = copy.deepcopy(net)
    for layer in norms_alone.model.layers:
        octavo.restore(layer.mlp)
        to_fp8(layer.mlp, recipes.dynamic())
    expected = {"fused": step(net), "apart": step(norms_alone)}
    assert distance(expected["fused"], expected["apart"]) > 0
    seen = []
    for part, is_fused in ((mlp.gate_proj, False), (mlp.down_proj, False), (mlp.act_fn, False), (mlp, True)):
        handle = part.register_forward_hook(lambda module, *_: seen.append(module))
        norms = step(net)
        handle.remove()
        assert seen.pop() is part and not seen
        assert (distance(norms, expected["fused"]) == 0) == is_fused
    mlp.down_proj.recipe = recipes.high_precision()
    plain.model.layers[0].mlp.down_proj.recipe = recipes.high_precision()
    trace = step(net)
    assert torch.isfinite(trace["loss"]) and distance(trace, step(plain)) < 0.2


def test_lora_on_a_layer_of_each_kind() -> None:
    peft = pytest.importorskip("peft")
    traces = []
    for fuse in (True, False):
        net = build("llama", recipes.blockwise(), fuse)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        traces.append(step(peft.get_peft_model(net, config).train()))
    assert any("down_proj.lora_A" in name for name in traces[0])
    assert distance(*traces) < 1 / 8 / (24 * 64) ** 0.5  # see test_it_computes_what_the_model_does


class Tanh(nn.Tanh):
    pass


class SiLU(nn.Module):
    """Another function than torch's of this name."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (3 * x).sigmoid()


REFUSED = {
    "another forward": (lambda mlp: setattr(mlp, "__class__", Doubled), "octavo does not know the forward of Doubled"),
    "forward replaced": (lambda mlp: setattr(mlp, "forward", mlp.forward), "its forward was replaced on the instance"),
    "another activation": (lambda mlp: setattr(mlp, "act_fn", Tanh()), "casts don't compute Tanh as a gate"),
    "another of a known name": (lambda mlp: setattr(mlp, "act_fn", SiLU()), "casts don't compute SiLU as a gate"),
    "one feature for all": (
        lambda mlp: setattr(mlp, "up_proj", nn.Linear(64, 1)),
        "gate_proj and up_proj have different numbers of features",
    ),
    "down left out": (lambda mlp: None, "down_proj is not converted"),
}


class Doubled(transformers.models.llama.modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_and_stays(case: str) -> None:
    change, reason = REFUSED[case]
    net = build("llama")
    change(net.model.layers[0].mlp)
    kind = type(net.model.layers[0].mlp)
    select = every_layer if case != "down left out" else lambda module, name: not name.endswith("0.mlp.down_proj")
    octavo.convert(net, recipes.dynamic(), select, fuse=True)
    assert fused(net) == (1, 5) and type(net.model.layers[0].mlp) is kind
    summary = octavo.summary(net)
    assert list(summary.not_fused) == ["model.layers.0.mlp"] and reason in summary.not_fused["model.layers.0.mlp"]
    others = "2 LlamaAttention, 2 LlamaDecoderLayer, 1 LlamaMLP, 5 LlamaRMSNorm, 1 causal_lm_loss"
    assert f"\nfused: {others}\n" in str(summary)
    assert f"\nnot fused: 1, first model.layers.0.mlp: {summary.not_fused['model.layers.0.mlp']}\n" in str(summary)


@pytest.mark.parametrize("part", ["mlp", "norm", "rotary positions", "loss"])
def test_what_a_library_replaces_after_a_first_model_was_fused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of kernels replace a class's forward, or a function that it calls: models fused later are looked at."""
    library = transformers.models.llama.modeling_llama
    octavo.convert(build("llama"), recipes.dynamic(), every_layer, fuse=True)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    if part == "rotary positions":
        monkeypatch.setattr(library, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
        reason, names = "its rotary positions are none that octavo knows", ["0.self_attn", "1.self_attn"]
    else:
        kind = {"mlp": library.LlamaMLP, "norm": library.LlamaRMSNorm, "loss": transformers.LlamaForCausalLM}[part]
        monkeypatch.setattr(kind, "forward", forward)
        reason, names = f"octavo does not know the forward of {kind.__name__}", ["0.mlp", "1.mlp"]
    net = octavo.convert(build("llama"), recipes.dynamic(), every_layer, fuse=True)
    summary = octavo.summary(net)
    if part == "loss":
        assert "loss_function" not in summary.fused and "lm_head" not in summary.fused
        reason = "the model's forward is tests's, which may compute the loss itself"
        assert summary.not_fused == {"loss_function": reason}
        (head,) = [row for row in summary.modules if row.name == "lm_head"]
        assert head.reason.startswith("a forward of tests reads its weight without calling it, or calls it")
    elif part == "norm":
        expected = {"model.norm": reason, "model.layers.0": "its norms, LlamaRMSNorm, are not fused"}
        assert {name: summary.not_fused.get(name) for name in expected} == expected
    else:
        assert summary.not_fused == {f"model.layers.{name}": reason for name in names}


def test_a_function_of_attention_that_was_replaced_since_another_model_was_fused_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = transformers.models.llama.modeling_llama
    octavo.convert(build("llama"), recipes.dynamic(), every_layer, fuse=True)
    called: list[str] = []

    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append("attend")
        return query.transpose(1, 2), None

    monkeypatch.setattr(library, "eager_attention_forward", attend)
    net = octavo.convert(build("llama"), recipes.dynamic(), every_layer, fuse=True)
    net.set_attn_implementation("eager")
    net(**inputs("llama"))
    assert isinstance(net.model.layers[0].self_attn, Attention) and called == ["attend"] * 2


CELLS = """
class Norm(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon){}
        return self.weight * x.to(dtype)
"""


@pytest.mark.parametrize(("head", "more"), [("import torch", ""), ("", ""), ("", " / 1.0")])
def test_a_class_of_a_notebooks_cell_is_known_wherever_torch_was_imported(head: str, more: str) -> None:
    names: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "cell"}
    exec(head + CELLS.format(more), names)
    net = nn.Sequential(nn.Linear(8, 8), names["Norm"](8))
    x = torch.randn(4, 8)
    expected = net[1](x)
    with pytest.warns(UserWarning, match="know the forward of Norm") if more else contextlib.nullcontext():
        octavo.convert(net, recipes.dynamic(), every_layer, fuse=True)
    assert isinstance(net[1], LeanRMSNorm) == (not more)
    torch.testing.assert_close(net[1](x), expected)


@pytest.mark.parametrize("part", ["attention", "attention's arguments", "rotary positions"])
def test_other_defaults_or_names_of_arguments_are_another_function(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward with the known instructions computes something else by another default, or takes a mask as mask=."""
    library = transformers.models.llama.modeling_llama
    if part.startswith("attention"):
        known = inspect.unwrap(library.LlamaAttention.forward)
        other = FunctionType(known.__code__, known.__globals__, argdefs=(None, "a mask", None))
        if "arguments" in part:
            names = tuple(name.removeprefix("attention_") for name in known.__code__.co_varnames)
            other = FunctionType(known.__code__.replace(co_varnames=names), known.__globals__, argdefs=(None,) * 3)
        monkeypatch.setattr(library.LlamaAttention, "forward", other)
        reason = "octavo does not know the forward of LlamaAttention"
    else:
        known = inspect.unwrap(library.apply_rotary_pos_emb)
        other = FunctionType(known.__code__, known.__globals__, argdefs=(2,))  # the dimension of heads
        monkeypatch.setattr(library, "apply_rotary_pos_emb", other)
        reason = "its rotary positions are none that octavo knows"
    net = octavo.convert(build("llama"), recipes.dynamic(), every_layer, fuse=True)
    assert octavo.summary(net).not_fused == {f"model.layers.{layer}.self_attn": reason for layer in range(2)}


BYPASSED = {
    "forward replaced": (
        lambda mlp: setattr(mlp, "forward", lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))),
        "its forward was replaced on the instance after octavo.convert",
    ),
    "a hook on its last layer": (
        lambda mlp: mlp.down_proj.register_forward_hook(lambda *_: None),
        "down_proj has hooks, another forward, or its output product in high precision",
    ),
    "its last layer restored": (lambda mlp: octavo.restore(mlp.down_proj), "down_proj is not converted"),
}


@pytest.mark.parametrize("case", BYPASSED)
def test_what_is_not_fused_any_more_is_named(case: str) -> None:
    """A module that is fused no more is named, as it saves what its own class's forward saves."""
    change, reason = BYPASSED[case]
    net = octavo.convert(build("llama"), recipes.dynamic(), every_layer, fuse=True)
    names = {f"model.layers.{layer}.mlp" for layer in range(2)}
    assert names <= set(octavo.summary(net).fused)
    change(net.model.layers[0].mlp)
    summary = octavo.summary(net)
    assert names & set(summary.fused) == {"model.layers.1.mlp"}
    assert summary.not_fused == {"model.layers.0.mlp": reason}


def test_layers_of_different_recipes_stay_apart() -> None:
    recipe = octavo.RecipeMap(recipes.dynamic(), {"*.0.self_attn.k_proj": recipes.mx()})
    summary = octavo.summary(octavo.convert(build("llama"), recipe, every_layer, fuse=True))
    assert summary.not_fused == {"model.layers.0.self_attn": "q_proj, k_proj, v_proj have different recipes"}


def test_arguments_by_position_and_inputs_of_another_dtype_go_to_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build("llama", recipes.mx()).eval().model.layers[0]
    x, angles = torch.randn(2, 5, 64), torch.rand(1, 5, 16)
    positions = angles.cos(), angles.sin()
    by_name, _ = layer.self_attn(x, position_embeddings=positions, attention_mask=None)
    by_position, _ = layer.self_attn(x, positions, None)
    torch.testing.assert_close(by_position, by_name, rtol=0, atol=1e-5)
    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", lambda self, x: "its own")
    assert torch.equal(layer.mlp(x=x), layer.mlp(x)) and layer.mlp(x.bfloat16()) == "its own"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.mlp(x.bfloat16()).dtype == torch.bfloat16


def test_a_decoder_layer_passes_on_arguments_that_are_left_out() -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1}
    net = new("Olmoe", "OlmoeForCausalLM", DECODER | experts | {"num_hidden_layers": 1, "eos_token_id": 0})
    plain = net.eval().model.layers[0]
    layer = octavo.convert(copy.deepcopy(plain), recipes.high_precision(), every_layer, fuse=True)
    x, angles = torch.randn(2, 5, 64), torch.rand(1, 5, 16)
    positions = angles.cos(), angles.sin()
    # its attention's attention_mask has no default
    torch.testing.assert_close(layer(x, position_embeddings=positions), plain(x, position_embeddings=positions))


def test_what_is_sharded_already_is_named(lone_mesh: Any) -> None:
    net = build("llama")
    torch.distributed.fsdp.fully_shard(net.model.layers[0].mlp, mesh=lone_mesh)
    assert refusal(net.model.layers[0].mlp) == SHARDED
    assert refusal(net.model.layers[1].mlp) == "down_proj is not converted"


def test_dropout_between_and_a_scan() -> None:
    net = new("T5", "T5ForConditionalGeneration", T5 | {"dropout_rate": 0.1})
    octavo.convert(net, recipes.dynamic(), every_layer, fuse=True)
    assert fused(net) == (0, 12)
    assert set(octavo.summary(net).not_fused.values()) == {"dropout of 0.1 lies between its activation and wo"}
    built = build("t5", recipes.dynamic())
    for module in built.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5  # set after: dropout is at work all the same
    torch.manual_seed(1)
    first = step(built, "t5")
    torch.manual_seed(2)
    assert distance(step(built, "t5"), first) > 0
    mamba = octavo.summary(build("mamba", recipes.dynamic()))
    assert set(mamba.not_fused.values()) == {"octavo does not know the forward of MambaMixer"}


def test_a_dropout_that_has_to_be_called_is_not_bypassed() -> None:
    net = build("t5", recipes.dynamic())
    expected = step(net, "t5")
    identity, hooked, replaced, active = [module for module in net.modules() if isinstance(module, FeedForward)]
    identity.dropout = nn.Identity()  # which does as little as a dropout of 0
    assert_equal(step(net, "t5"), expected)
    calls: list[Any] = []
    hooked.dropout.register_forward_hook(lambda *_: calls.append("dropout"))
    active.act.register_forward_hook(lambda *_: calls.append("act"))
    replaced.dropout = type("Doubling", (nn.Dropout,), {"forward": lambda self, x: calls.append("forward") or x})(0.0)
    step(net, "t5")
    assert calls == ["dropout", "forward", "act"] and refusal(identity) is None
    not_fused = {name for name, why in octavo.summary(net).not_fused.items() if "or dropout has hooks" in why}
    assert not_fused == {name for name, module in net.named_modules() if module in (hooked, replaced, active)}
    again = octavo.convert(octavo.restore(net), recipes.dynamic(), every_layer, fuse=True)
    assert fused(again) == (1, 12)


def test_an_activation_that_is_a_plain_function_is_not_fused() -> None:
    net = new(*FAMILIES["llama"])
    del net.model.layers[0].mlp.act_fn
    net.model.layers[0].mlp.act_fn = nn.functional.silu
    assert fused(octavo.convert(net, recipes.dynamic(), every_layer, fuse=True)) == (1, 5)
    assert [*octavo.summary(net).not_fused.values()] == ["casts don't compute function as a gate"]


def test_bad_input_and_nothing_to_fuse() -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(TypeError, match="fuse='yes': use True or False"):
        octavo.convert(net, fuse="yes")  # type: ignore[arg-type]
    assert type(net[0]) is nn.Linear
    with pytest.warns(UserWarning, match="fused nothing: the model has no module that it knows"):
        octavo.convert(net, recipes.dynamic(), every_layer, fuse=True)
    gemma = new(*MODELS["gemma"]).model
    gemma.layers = gemma.layers[:0]
    gemma.embed_out = nn.Linear(64, 8)
    with pytest.warns(UserWarning, match="not know the forward of GemmaRMSNorm .1 such, first norm"):
        octavo.convert(gemma, recipes.dynamic(), every_layer, fuse=True)
    assert refusal(nn.LayerNorm(4)) == "" and not octavo.summary(gemma).not_fused
    assert KnownForward.why_not_fused(net) is None


def test_norms_that_the_kernel_does_not_compute_run_as_they_are() -> None:
    norms = [transformers.models.llama.modeling_llama.LlamaRMSNorm(8) for _ in range(4)]
    for norm, shape in zip(norms, [(1,), (4, 8)], strict=False):
        norm.weight = nn.Parameter(torch.rand(shape))
    norms[2].variance_epsilon = nn.Parameter(torch.tensor(0.1))
    parametrize.register_parametrization(norms[3], "weight", nn.Tanh())
    net, x = nn.ModuleList([nn.Linear(8, 8), *norms]), torch.randn(4, 8)
    expected = [norm(x) for norm in norms]
    octavo.convert(net, recipes.dynamic(), every_layer, fuse=True)
    for norm, result in zip(norms, expected, strict=True):
        assert torch.equal(norm(x), result)
    assert octavo.summary(net).not_fused == {  # of the first only forward knows that its weight has too few elements
        "2": "its weight is no vector",
        "3": "its epsilon is a tensor",
        "4": "its parameters are computed from others (weight_norm or the like)",
    }


def test_the_residual_of_a_decoder_layer_stays_in_float32_under_autocast() -> None:
    streams = []
    for net in (build("llama"), build("llama", recipes.high_precision())):
        with torch.autocast("cpu", torch.bfloat16):
            streams.append(net.model(inputs("llama")["input_ids"], output_hidden_states=True).hidden_states)
    for plain, stream in zip(*streams, strict=True):
        assert stream.dtype == plain.dtype == torch.float32
        torch.testing.assert_close(stream, plain, rtol=0, atol=2e-3)


def test_a_norm_in_another_dtype_or_under_torch_func_runs_as_it_is() -> None:
    norm = build("llama", recipes.dynamic()).model.norm
    plain = functools.partial(type(norm).__mro__[3].forward, norm)
    x = torch.randn(5, 64)
    assert torch.equal(norm(x.bfloat16()), plain(x.bfloat16()))
    torch.testing.assert_close(torch.func.vmap(norm)(x), plain(x))
    assert torch.equal(*(torch.func.jvp(one, (x,), (torch.ones_like(x),))[1] for one in (norm, plain)))
    assert norm(x.requires_grad_()).grad_fn.name() != plain(x).grad_fn.name()


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, but for products, attention and views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.cast_inputs = 0  # which a Dynamic scale of a whole tensor reads twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        apart = ("empty", "detach", "matmul", "_unsafe_view", "attention", "::mm", "::linear", "prim::", "fill")
        if not views and not any(part in func._schema.name for part in apart):
            tensors = {id(x): x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)}
            self.bytes.append(sum(x.numel() * x.element_size() for x in tensors.values()))
            if func._schema.name == "octavo::cast":
                read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                self.cast_inputs += sum(x.numel() * x.element_size() for x in read)
        return result


BLOCKS = [
    ("llama", 8, "delayed", 4.77, 20),
    pytest.param("llama", 16, "delayed", 4.92, 20, marks=pytest.mark.full),
    ("llama", 16, "dynamic", 4.92, 20),
    ("llama", 16, "blockwise", 4.96, 20),
    ("qwen3", 8, "delayed", 5.93, 30),
]


@pytest.mark.parametrize(("kind", "key_heads", "recipe", "most", "launches"), BLOCKS)
def test_bytes_that_a_block_moves_on_a_gpu(
    kind: str, key_heads: int, recipe: str, most: float, launches: int, monkeypatch: Any
) -> None:
    """GB besides products and attention, of 16,384 tokens; an amax of its own reads a tensor once more.

    Scales of blocks are saved as casts wrote them and products read them: no launch converts one.
    """
    library, name = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), FAMILIES[kind][0]
    for module in (casts, layouts):
        monkeypatch.setattr(module, "needs_transposed_codes", lambda device: True)  # Hopper's
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64}
    sizes |= {"num_key_value_heads": key_heads, "attn_implementation": "sdpa"}
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        plain = nn.Sequential(getattr(library, f"{name}DecoderLayer")(config, 0)).to(torch.bfloat16).train()
    with (mode := FakeTensorMode(allow_non_fake_inputs=True)):
        block = twin_of(plain, mode)
        octavo.convert(block, getattr(recipes, recipe)(), fuse=True)
        x = torch.randn(8, 2048, 2048, dtype=torch.bfloat16, requires_grad=True)
        angles = getattr(library, f"{name}RotaryEmbedding")(config)(x, torch.arange(2048)[None])
        for _ in range(2):  # in the first step layers that are computed as one come to share their delayed state
            block.zero_grad()
            x.grad = None
            with Traffic() as traffic:
                y = block[0](x, position_embeddings=angles, attention_mask=None)
                y.backward(torch.empty_like(y))
    assert sum(traffic.bytes) <= most * 1e9
    if recipe == "dynamic":
        assert sum(traffic.bytes) + traffic.cast_inputs <= 6.86e9
    assert len(traffic.bytes) == launches


def test_a_cache_leaves_no_second_copy_of_keys_and_values() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32, use_cache=True)
    batch, attention = {"input_ids": torch.zeros(2, 64, dtype=torch.int64)}, []
    for fuse in (False, True):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        octavo.convert(model, recipes.dynamic(), fuse=fuse)
        attention.append(predicted_by_kind(model, (), batch)["attention"])
    codes_of_input = 2 * 64 * 512  # which one product for q, k and v saves itself
    assert attention[1] <= attention[0] + codes_of_input + 64


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_filled_by_each_name_that_transformers_takes(name: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32)
    model = octavo.convert(transformers.LlamaForCausalLM(config).eval(), recipes.dynamic(), lambda *_: True, fuse=True)
    x, cache = torch.randn(1, 5, 64), transformers.DynamicCache(config=config)
    angles = model.model.rotary_emb(x, torch.arange(5)[None])
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # of the old name
        model.model.layers[0](x, position_embeddings=angles, attention_mask=None, **{name: cache})
    assert cache.get_seq_length() == 5
