import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.nn.candidates import features
from tests.support.helpers import FP8_RECIPES, assert_equal, gradients, sqnr, to_fp8

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D  # noqa: E402


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
    assert type(conv) is octavo.nn.conv1d.Conv1D
    assert isinstance(conv, Conv1D)
    assert 20 < sqnr(conv(x), expected) < 40
    octavo.restore(conv)
    assert type(conv) is Conv1D
    assert conv.weight is weight
    assert torch.equal(conv(x), expected)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def losses(net: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    tokens = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(5))
    found = []
    for _ in range(steps):
        loss = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_gpt2_converts_trains_and_comes_back():
    net = gpt2()
    plain = copy.deepcopy(net)
    to_fp8(net, recipes.delayed())
    names = [m.name for m in octavo.summary(net).converted]
    assert len(names) == 9  # four a block, and the head, tied to the embedding
    assert net.lm_head.weight is net.transformer.wte.weight
    assert net.load_state_dict(plain.state_dict(), strict=True) == ([], [])
    ours, theirs = losses(net, 30), losses(plain, 30)
    assert ours != theirs
    assert ours[-1] < 1.0 < 4.0 < ours[0]
    assert abs(ours[-1] - theirs[-1]) < 0.1
    octavo.restore(net)
    assert {type(m) for m in net.modules()} == {type(m) for m in plain.modules()}
    assert plain.load_state_dict(net.state_dict(), strict=True) == ([], [])
    tokens = torch.randint(61, (2, 16))
    assert torch.equal(net(tokens).logits, plain(tokens).logits)
    assert octavo.nn.delayed_state_dict(net) == {}


def test_gpt2_with_gradient_checkpointing():
    net = to_fp8(gpt2(), recipes.delayed())
    other = copy.deepcopy(net)
    enable = getattr(
        other, "activation_checkpointing_enable", other.gradient_checkpointing_enable
    )  # its name from v6 on
    enable({"use_reentrant": False})
    tokens = torch.randint(61, (4, 16))
    for model in (net.train(), other.train()):
        for _ in range(2):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert_equal(gradients(net), gradients(other))
    assert_equal(octavo.nn.delayed_state_dict(net), octavo.nn.delayed_state_dict(other))
