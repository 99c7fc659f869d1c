import pytest
import torch

import octavo
from octavo import recipes
from octavo.nn import SelfAttention, TransformerBlock, rotary_table
from octavo.nn.transformer import rotate
from tests.support.combinations import each_pair
from tests.support.fused_cases import in_float64, results, shaken
from tests.support.helpers import FP8_RECIPES, sqnr

B, C, W, H, FFN = 2, 24, 64, 4, 96


def block(recipe: str = "dynamic", **options) -> TransformerBlock:
    return shaken(TransformerBlock(W, FFN, H, recipe=FP8_RECIPES[recipe](), **options))


def test_rotary_table():
    cos, sin = rotary_table(50, 16, base=100.0)
    assert cos.shape == sin.shape == (50, 8) and cos.dtype == torch.float32
    angles = torch.outer(torch.arange(50.0), 100.0 ** (-torch.arange(8) / 8))
    torch.testing.assert_close(cos, angles.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin(), rtol=0, atol=1e-5)


def test_a_rotation_keeps_lengths_and_leaves_the_distance_only():
    table = rotary_table(64, 16)
    q, k = (torch.randn(16).expand(64, 16) for _ in range(2))
    turned_q, turned_k = rotate(q, table), rotate(k, table)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(turned_q[0], q[0])
    scores = turned_q @ turned_k.t()  # [position of q, position of k]
    for distance in (-40, -1, 0, 3, 60):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert scores.diagonal(0)[0] != scores.diagonal(1)[0]
    assert rotate(q.bfloat16(), table).dtype == torch.bfloat16


def by_hand(attention: SelfAttention, x: torch.Tensor) -> torch.Tensor:
    """Attention with every key and value repeated for its heads, and a mask, in explicit loops over heads."""
    query, key, value = attention.qkv(x)
    width, shared = attention.head_width, attention.heads // attention.kv_heads
    table = rotary_table(x.shape[1], width)
    table = table[0].to(x.dtype), table[1].to(x.dtype)
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
    heads = []
    for h in range(attention.heads):
        rows, theirs = slice(h * width, (h + 1) * width), slice(h // shared * width, (h // shared + 1) * width)
        scores = rotate(query[..., rows], table) @ rotate(key[..., theirs], table).transpose(1, 2) / width**0.5
        heads.append((scores + mask).softmax(-1) @ value[..., theirs])
    return attention.out(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_grouped_queries_share_keys_and_values(kv_heads, norm):
    attention = SelfAttention(W, H, kv_heads, norm=norm, recipe=recipes.high_precision(), dtype=torch.float64)
    x = torch.randn(B, C, W, dtype=torch.float64, requires_grad=True)
    shared = W * (kv_heads or H) // H
    assert attention.qkv.linear.splits == {"query": W, "key": shared, "value": shared}
    grads = []
    for call in (attention, lambda x: by_hand(attention, x)):
        y = call(x)
        grads.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *attention.parameters()])])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)  # the table is float32


def test_no_position_sees_a_later_one():
    module = block("rowwise")
    x = torch.randn(B, C, W)
    changed = x.clone()
    changed[:, 10:] = torch.randn(B, C - 10, W)
    assert torch.equal(module(x)[:, :10], module(changed)[:, :10])
    assert sqnr(module(x[:, :10]), module(x)[:, :10]) > 25  # torch's attention may add up in another order


def test_a_table_to_share_is_the_one_it_makes():
    module = block("rowwise")
    x = torch.randn(B, C, W)
    assert torch.equal(module(x, rotary_table(3 * C, W // H)), module(x))
    assert not torch.equal(module(x, rotary_table(C, W // H, base=50.0)), module(x))


@pytest.mark.parametrize("recipe", ["high_precision", "dynamic"])
@pytest.mark.parametrize("shape", [(1, W // H), (C - 1, W // H), (C, 2), (C, 2 * W // H)])
def test_tables_of_fewer_positions_or_another_head_width_are_refused(recipe, shape):
    needed = f"at least {C} rows, and {W // H // 2} columns"
    with pytest.raises(ValueError, match=rf"rotary tables \[{shape[0]}, {shape[1] // 2}\].* {needed}"):
        SelfAttention(W, H, recipe=recipe)(torch.randn(B, C, W), rotary_table(*shape))


@pytest.mark.parametrize("head_width", [0, 5])
def test_an_odd_width_of_heads_is_refused(head_width):
    with pytest.raises(ValueError, match=f"head_width={head_width} is not even"):
        rotary_table(4, head_width)


@each_pair(
    recipe=[*FP8_RECIPES],
    norm=["rms_norm", "layer_norm"],
    activation=["swiglu", "gelu_tanh", "silu"],
    kv_heads=[None, 2, 1],
    bias=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)
def test_against_float64(case):
    module, dtype = block(**case), case["dtype"]
    x, grad = torch.randn(B, C, W).to(dtype), torch.randn(B, C, W).to(dtype)
    actual, truth = results(module, x, grad), results(in_float64(module), x.double(), grad.double())
    assert actual.keys() == truth.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == dtype
        if truth[name].norm() > 0.01 * grad.norm():  # a bias of keys changes nothing, but for roundings
            assert sqnr(tensor, truth[name]) > 11, name


def test_the_parts_are_fused_modules_with_their_options():
    module = TransformerBlock(W, FFN, H, norm="layer_norm", activation="relu", eps=1e-3, bias=True, device="meta")
    assert type(module.attention.qkv) is octavo.nn.LayerNormLinear and type(module.mlp) is octavo.nn.LayerNormMLP
    assert module.attention.qkv.norm.eps == module.mlp.norm.eps == 1e-3
    assert module.mlp.activation == "relu"
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert all(layer.bias is not None for layer in (module.attention.out, module.mlp.fc1, module.mlp.fc2))
    plain = TransformerBlock(W, FFN, H, dtype=torch.bfloat16)
    assert type(plain.attention.qkv) is octavo.nn.RMSNormLinear and type(plain.mlp) is octavo.nn.RMSNormMLP
    assert not [name for name, _ in plain.named_parameters() if name.endswith("bias")]
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((64, 96, 5), {}, r"hidden_size=64 is not a multiple of 2 x heads \(heads=5\)"),
        ((12, 96, 4), {}, r"hidden_size=12 is not a multiple of 2 x heads \(heads=4\)"),
        ((64, 96, 4, 3), {}, "kv_heads=3 does not divide heads=4"),
        ((64, 96, 0), {}, "heads=0"),
        ((64, 96, 4, 0), {}, "kv_heads=0"),
        ((64, 96, 4), {"norm": "batch_norm"}, "norm='batch_norm': use 'layer_norm' or 'rms_norm'"),
        ((64, 96, 4), {"activation": "swish"}, "activation='swish': use one of relu, .*swiglu"),
    ],
)
def test_wrong_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        TransformerBlock(*arguments, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    module = block("rowwise")
    x = torch.randn(B, C, W)
    seen = []
    module.attention.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=dtype):
        y = module(x)
    y.sum().backward()
    assert seen == [dtype] and y.dtype == torch.float32  # as torch adds them
    assert sqnr(y, in_float64(module)(x.double())) > 20
    assert all(p.grad is not None for p in module.parameters())


def test_an_input_of_two_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"\(24, 64\) must be \[sequences, positions, features\]"):
        block()(torch.randn(C, W))


@pytest.mark.parametrize("shape", [(0, C, W), (B, 0, W), (1, 1, W)])
def test_few_tokens_or_none(shape):
    x = torch.randn(shape, requires_grad=True)
    y = block()(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
