"""Transformer Engine's TransformerLayer against its definition, written out in plain torch from a state_dict."""

import itertools
import math

import pytest
import torch
from torch import nn

import octavo
from octavo.compat import transformer_engine as te

W, H, S, B = 32, 4, 7, 2


def rotated(x, angles):
    """x [S, D] turned by angles [S, D]: of pairs (i, i + D/2)."""
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def expected_layer(state, x, groups, width, interleaved, angles, look):
    """x [S, W] of one sequence; ``look`` [S, S] says which positions see which."""
    a = {name.split(".")[-1]: value for name, value in state.items() if "layernorm_qkv" in name}
    p = {name.split(".")[-1]: value for name, value in state.items() if "proj" in name}
    m = {name.split(".")[-1]: value for name, value in state.items() if "layernorm_mlp" in name}
    norm = nn.functional.layer_norm(x, (W,), a["layer_norm_weight"], a["layer_norm_bias"])
    names = ("query", "key", "value")
    weight = a["weight"] if "weight" in a else torch.cat([a[f"{name}_weight"] for name in names])
    bias = a["bias"] if "bias" in a else torch.cat([a[f"{name}_bias"] for name in names])
    features = list((norm @ weight.T + bias).split(width, -1))  # a head each
    repeats, heads = H // groups, []
    for head in range(H):
        group = head // repeats
        if interleaved:  # of each group its queries, its key, its value
            start = group * (repeats + 2)
            q, k, v = features[start + head % repeats], features[start + repeats], features[start + repeats + 1]
        else:
            q, k, v = features[head], features[H + group], features[H + groups + group]
        if angles is not None:
            q, k = rotated(q, angles), rotated(k, angles)
        scores = (q @ k.T / math.sqrt(width)).masked_fill(~look, -math.inf)
        heads.append(scores.softmax(-1) @ v)
    x = x + torch.cat(heads, -1) @ p["weight"].T + p["bias"]
    norm = nn.functional.layer_norm(x, (W,), m["layer_norm_weight"], m["layer_norm_bias"])
    hidden = nn.functional.gelu(norm @ m["fc1_weight"].T + m["fc1_bias"], approximate="tanh")
    return x + hidden @ m["fc2_weight"].T + m["fc2_bias"]


CASES = list(itertools.product([4, 2, 1], ["separate", "fused", "interleaved"], ["sbhd", "bshd"], [True, False]))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("groups", "weights", "order", "causal"), CASES)
def test_it_is_its_definition(groups, weights, order, causal):
    width = 12 if causal else W // H
    layer = te.TransformerLayer(
        W,
        48,
        H,
        groups,
        kv_channels=width if causal else None,
        fuse_qkv_params=weights != "separate",
        qkv_weight_interleaved=weights == "interleaved",
        attn_input_format=order,
        self_attn_mask_type="causal" if causal else "no_mask",
    ).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    angles = te.RotaryPositionEmbedding(width)(S) if causal else None
    x = torch.randn(B, S, W)
    found = layer(x if order == "bshd" else x.transpose(0, 1).contiguous(), rotary_pos_emb=angles)
    look = torch.ones(S, S, dtype=torch.bool).tril(0 if causal else S)
    state = {name: value.double() for name, value in layer.state_dict().items()}
    flat = None if angles is None else angles[:, 0, 0].double()
    expected = torch.stack(
        [expected_layer(state, one.double(), groups, width, weights == "interleaved", flat, look) for one in x]
    )
    found = found if order == "bshd" else found.transpose(0, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_mask_is_true_where_not_to_look():
    layer, x = te.TransformerLayer(W, 48, H, self_attn_mask_type="arbitrary").eval(), torch.randn(S, B, W)
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    torch.testing.assert_close(layer(x, future), layer(x, self_attn_mask_type="causal"))
    for mask, kind in ((None, "arbitrary"), (future, "causal"), (future, "padding")):
        with pytest.raises(octavo.UnsupportedOptionError, match="use 'causal' or 'no_mask' without one"):
            layer(x, mask, kind)
    with pytest.raises(octavo.UnsupportedOptionError, match="use one of sbhd, bshd"):
        te.TransformerLayer(W, 48, H, attn_input_format="thd")


def test_angles():
    angles = te.RotaryPositionEmbedding(8, rotary_base=100.0)(3, offset=2)
    assert angles.shape == (3, 1, 1, 8)
    expected = torch.tensor([[position * 100.0 ** (-pair / 4) for pair in range(4)] * 2 for position in (2, 3, 4)])
    torch.testing.assert_close(angles[:, 0, 0], expected)
    with pytest.raises(octavo.UnsupportedOptionError, match="scaled_dot_product_attention"):
        te.RotaryPositionEmbedding(8, interleaved=True)


def test_dropout_is_in_training_only():
    layer, x = te.TransformerLayer(W, 48, H), torch.randn(S, B, W)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer = te.TransformerLayer(W, 48, H, hidden_dropout=0.0, attention_dropout=0.0)
    assert torch.equal(layer(x), layer.eval()(x))


def test_norms():
    x = torch.randn(3, 8)
    torch.testing.assert_close(te.LayerNorm(8)(x), nn.functional.layer_norm(x, (8,)))
    torch.testing.assert_close(te.RMSNorm(8, zero_centered_gamma=True)(x), nn.functional.rms_norm(x, (8,), eps=1e-5))
    assert te.RMSNorm(8, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    with pytest.raises(octavo.UnsupportedOptionError, match="LayerNorm: sm_margin=4"):
        te.LayerNorm(8, sm_margin=4)


def test_a_small_model_learns():
    """A program for Transformer Engine: its README's pattern with layers, a recipe and an optimizer."""
    layers = [te.TransformerLayer(W, 64, H, hidden_dropout=0.0, attention_dropout=0.0) for _ in range(2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    recipe, x = te.DelayedScaling(amax_history_len=16, amax_compute_algo="max"), torch.randn(16, 4, W)
    losses = []
    for _ in range(15):
        optimizer.zero_grad(set_to_none=True)
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            loss = (model(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert {module.recipe.name for module in model.modules() if hasattr(module, "recipe")} == {"DelayedScaling"}
