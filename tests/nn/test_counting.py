"""What counts operations knows products that torch's own counter does not."""

import torch

import octavo


def test_attention_is_counted():
    tokens, block = 24, octavo.nn.TransformerBlock(64, 96, heads=4, kv_heads=2, recipe=octavo.recipes.dynamic())
    linear = 2 * tokens * 64 * (64 + 32 + 32 + 64 + 3 * 96)
    scores_and_values = 2 * 2 * tokens * tokens * 64
    assert octavo.summary(block, torch.randn(1, tokens, 64)).flops == (linear, linear + scores_and_values)
