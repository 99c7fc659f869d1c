"""Which steps a plan compares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.cost import steps
from octavo.cost.estimate import Estimate, estimate
from octavo.cost.from_flags import tokens_of
from octavo.cost.rates import PUBLISHED, PlanError
from octavo.cost.work import work_of
from octavo.train import GPT, ModelConfig
from tests.support.helpers import every_layer

H200 = PUBLISHED["H200"]


def test_which_steps_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are of bf16, with fuse also of bf16 with the same fusions, and of each recipe, the head by another."""
    asked: list[tuple[Any, Any, Any]] = []
    model = GPT(ModelConfig(width=64, layers=1, heads=2, context=16)).bfloat16()
    layer, x = nn.Linear(64, 64, device="meta"), (torch.empty(64, 64, device="meta"),)
    bf16, fp8 = (estimate(layer, x, recipe, H200) for recipe in (None, recipes.delayed()))

    def note(*arguments: Any, **how: Any) -> Estimate:
        asked.append((arguments[2], how["fuse"], how.get("chunked_loss", False)))
        return bf16 if arguments[2] is None else fp8

    monkeypatch.setattr(steps, "estimate", note)
    tokens = (torch.empty(4, 16, dtype=torch.int64, device="meta"),)
    plans = steps.estimates(model, tokens, H200, head="dynamic_with_output_hp", chunked_loss=True, fuse=True)
    assert [each.name for each in plans[2:]] == list(steps.COMPARED)
    assert asked[:2] == [(None, False, False), (None, True, False)]
    for name, (recipe, fuse, chunked) in zip(steps.COMPARED, asked[2:], strict=True):
        assert fuse and chunked and recipe.default.name == name
        assert [recipe.of(layer).name for layer in ("head", "blocks.0.mlp.fc1")] == ["dynamic_with_output_hp", name]
    assert len(steps.estimates(model, tokens, H200, fuse=False)) == 1 + len(steps.COMPARED)
    stored = steps.estimates(model, tokens, H200, weight_storage="fp8", fuse=False)
    assert [each.name for each in stored[1:]] == ["dynamic", "delayed", "blockwise"]
    with pytest.raises(PlanError, match="--head dynamic: no layer of this model computes logits"):
        steps.estimates(nn.Linear(8, 8), (torch.ones(2, 8),), H200, head="dynamic")


def test_a_head_whose_weight_cannot_be_stored_is_an_error() -> None:
    model = GPT(ModelConfig(width=64, layers=1, heads=2, context=16)).bfloat16()
    x = tokens_of(64, 16)
    how = {"weight_storage": "fp8", "optimizer": octavo.optim.AdamW, "work": work_of(model, x), "select": every_layer}
    assert steps.step_in("dynamic", model, x, H200, head="high_precision", **how).name == "dynamic"
    with pytest.raises(PlanError, match="under --head dynamic_with_output_hp that layer's weight can't be stored"):
        steps.step_in("dynamic", model, x, H200, head="dynamic_with_output_hp", **how)
