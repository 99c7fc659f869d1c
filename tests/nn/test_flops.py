"""The share of a forward pass's FLOPs that is in FP8, against counts made by hand."""

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from tests.support.helpers import to_fp8

TOKENS = 24


@pytest.mark.parametrize("name", ["dynamic", "rowwise", "blockwise", "mx", "high_precision"])
def test_linear_layers(name):
    recipe = getattr(recipes, name)()
    model = nn.Sequential(to_fp8(nn.Linear(48, 80), recipe), nn.Dropout(), nn.Linear(80, 16))
    found = octavo.summary(model, torch.randn(2, TOKENS // 2, 48))
    inside, outside = 2 * TOKENS * 48 * 80, 2 * TOKENS * 80 * 16
    assert found.flops == ((0, inside + outside) if recipe.is_high_precision else (inside, inside + outside))
    assert all(module.training for module in model.modules())


def test_the_table_says_it_and_only_where_a_forward_ran():
    model = nn.Sequential(to_fp8(nn.Linear(32, 96), recipes.dynamic()), nn.Linear(96, 32))
    assert "50.0 % of the forward pass's 9.83e+04 FLOPs in FP8" in str(octavo.summary(model, input=torch.randn(8, 32)))
    found = octavo.summary(model)
    assert found.flops is None and "FLOPs" not in str(found)


def test_a_forward_that_fails_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).train()
    model[1].eval()
    with pytest.raises(RuntimeError, match="shapes"):
        octavo.summary(model, torch.randn(3, 7))
    assert [module.training for module in model.modules()] == [True, True, False]


def test_attention_is_counted():
    block = octavo.nn.TransformerBlock(64, 96, heads=4, kv_heads=2, recipe=recipes.dynamic())
    linear = 2 * TOKENS * 64 * (64 + 32 + 32 + 64 + 3 * 96)
    scores_and_values = 2 * 2 * TOKENS * TOKENS * 64
    assert octavo.summary(block, torch.randn(1, TOKENS, 64)).flops == (linear, linear + scores_and_values)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_experts_are_counted(implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.config._experts_implementation = implementation
    octavo.convert(model, recipes.dynamic(), lambda module, name: "self_attn" in name)
    fp8, total = octavo.summary(model, torch.randint(50, (1, TOKENS))).flops
    attention = 2 * TOKENS * 64 * (64 + 32 + 32 + 64)
    scores = 2 * 2 * TOKENS * TOKENS * 64
    experts = 2 * (2 * TOKENS) * 64 * 3 * 96
    router_and_head = 2 * TOKENS * 64 * (4 + 50)
    assert fp8 == attention
    octavo.convert(model, recipes.dynamic(), lambda module, name: name.endswith("experts"))
    assert octavo.summary(model, torch.randint(50, (1, TOKENS))).flops == (attention + experts, total)
    assert total == pytest.approx(attention + scores + experts + router_and_head, rel=0.01)  # rotary positions
