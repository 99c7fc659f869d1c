"""Checkpoints of Transformer Engine (2.20) load; what docs/migrate.md writes for its names and MS-AMP's runs."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import octavo
import octavo.compat.transformer_engine
from octavo.compat.transformer_engine import octavo_state_dict

NORM = ["layer_norm_weight", "layer_norm_bias"]
W, H, S = 32, 4, 7


def named(prefix, shapes):
    return {f"{prefix}{name}": 0.3 * torch.randn(shape) for name, shape in shapes.items()}


def norm(x, state):
    return nn.functional.layer_norm(x, x.shape[-1:], state["layer_norm_weight"], state["layer_norm_bias"])


def mlp(x, state):
    hidden = nn.functional.gelu(norm(x, state) @ state["fc1_weight"].T + state["fc1_bias"], approximate="tanh")
    return hidden @ state["fc2_weight"].T + state["fc2_bias"]


def rotated(x, angles):
    """x [S, D] turned by angles [S, D]: of pairs (i, i + D/2), as Transformer Engine's apply_rotary_pos_emb."""
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def layer(x, state):
    """Transformer Engine's TransformerLayer, causal, of x [S, W], written out from its state_dict."""
    parts = {part: {k.split(".")[-1]: v for k, v in state.items() if part in k} for part in ("qkv", "proj", "mlp")}
    normed, angles = norm(x, parts["qkv"]), torch.arange(S)[:, None] * 10_000.0 ** (-torch.arange(0, W // H, 2) * H / W)
    heads, angles = [], angles.repeat(1, 2)
    split = [(normed @ parts["qkv"][f"{n}_weight"].T + parts["qkv"][f"{n}_bias"]).split(W // H, -1) for n in QKV]
    for query, key, value in zip(*split, strict=True):
        scores = rotated(query, angles) @ rotated(key, angles).T / math.sqrt(W // H)
        heads.append(scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf).softmax(-1) @ value)
    x = x + torch.cat(heads, -1) @ parts["proj"]["weight"].T + parts["proj"]["bias"]
    return x + mlp(x, parts["mlp"])


QKV = ("query", "key", "value")
OF_NORM = dict.fromkeys(NORM, (W,))
OF_MLP = {**OF_NORM, "fc1_weight": (48, W), "fc1_bias": (48,), "fc2_weight": (W, 48), "fc2_bias": (W,)}
OF_QKV = {f"{n}_weight": (W, W) for n in QKV} | {f"{n}_bias": (W,) for n in QKV}
PLAIN = octavo.recipes.high_precision()


@pytest.mark.parametrize(
    ("make", "state", "expected"),
    [
        (lambda: octavo.nn.Linear(W, 6), named("", {"weight": (6, W), "bias": (6,)}), None),
        (
            lambda: octavo.nn.Linear(W, dict.fromkeys(QKV, W)),
            named("", OF_QKV),
            lambda x, s: tuple(x @ s[f"{n}_weight"].T + s[f"{n}_bias"] for n in QKV),
        ),
        (
            lambda: octavo.nn.LayerNormLinear(W, 6),
            named("", {**OF_NORM, "weight": (6, W), "bias": (6,)}),
            lambda x, s: norm(x, s) @ s["weight"].T + s["bias"],
        ),
        (lambda: octavo.nn.LayerNormMLP(W, 48, "gelu_tanh"), named("", OF_MLP), mlp),
        (
            lambda: octavo.nn.TransformerBlock(W, 48, H, activation="gelu_tanh", norm="layer_norm", bias=True),
            named("self_attention.layernorm_qkv.", {**OF_NORM, **OF_QKV})
            | named("self_attention.proj.", {"weight": (W, W), "bias": (W,)})
            | named("layernorm_mlp.", OF_MLP),
            layer,
        ),
    ],
    ids=["Linear", "split", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"],
)
def test_checkpoints_load_and_compute_the_same(make, state, expected):
    """A checkpoint of a whole model, and one of a module within a model, load and compute the same."""
    torch.manual_seed(0)
    x = torch.randn(S, W)
    for prefix in ("", "layers.0."):
        module = octavo.set_recipe(make(), PLAIN)
        model = module if not prefix else nn.ModuleDict({"layers": nn.ModuleList([module, nn.LayerNorm(3)])})
        saved = {f"{prefix}{key}": value for key, value in state.items()} | {f"{prefix}_extra_state": torch.zeros(9)}
        others = {"layers.1.weight": torch.ones(3), "layers.1.bias": torch.zeros(3)} if prefix else {}
        model.load_state_dict(octavo_state_dict(saved | others))
        wanted = expected(x, state) if expected else x @ state["weight"].T + state["bias"]
        y = module(x[None])[0] if isinstance(module, octavo.nn.TransformerBlock) else module(x)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


def test_rows_that_lie_otherwise_are_refused():
    with pytest.raises(ValueError, match=r"self_attention\.layernorm_qkv\.weight: save it .* fuse_qkv_params=False"):
        octavo_state_dict({"0.self_attention.layernorm_qkv.weight": torch.ones(96, 32)})


# --- docs/migrate.md --------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
TABLE = re.compile(r"^\| (?:Transformer Engine|MS-AMP) [\d.]+ \| octavo \|\n((?:\|.*\n)+)", re.MULTILINE)
ROWS = [line.strip("| ").split(" | ") for table in TABLE.findall(PAGE) for line in table.splitlines()[1:]]
NAMES = """Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm TransformerLayer MultiheadAttention DotProductAttention
RotaryPositionEmbedding GroupedLinear Fp8Padding Fp8Unpadding ops autocast fp8_autocast quantized_model_init
fp8_model_init checkpoint make_graphed_callables onnx_export optimizers DelayedScaling Float8CurrentScaling
Float8BlockScaling MXFP8BlockScaling NVFP4BlockScaling CustomRecipe Format initialize LinearReplacer clip_grad_norm_
LBAdam LBAdamW""".split()


def test_each_name_has_a_row_that_runs():
    theirs = " ".join(row[0] for row in ROWS)
    assert [name for name in NAMES if not re.search(rf"\b{name}\b", theirs)] == []
    for name, ours in ROWS:
        spans = re.findall(r"`([^`]+)`", ours)
        assert spans or ours.startswith("nothing"), name
        names = {"octavo": octavo, "torch": torch, "recipe": octavo.recipes.delayed(), "x": torch.randn(4, 512)}
        names["model"] = octavo.convert(nn.Sequential(nn.Linear(512, 512)), names["recipe"])
        for span in spans:
            exec(compile(span, name, "exec"), names)
