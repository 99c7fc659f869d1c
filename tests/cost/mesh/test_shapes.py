"""A transformer's matrices, read from models."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

from octavo.cost.from_flags import tokens_of
from octavo.cost.mesh import shapes
from octavo.cost.mesh.shapes import Weight
from octavo.cost.rates import PlanError
from octavo.cost.work import on_meta, work_of
from octavo.train import GPT, ModelConfig
from tests.support.meshes import LLAMA


def meta(model_class: type, config: object) -> torch.nn.Module:
    with torch.device("meta"):
        return model_class(config).bfloat16()  # type: ignore[no-any-return]


def test_shapes_are_the_models() -> None:
    model = meta(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA, num_hidden_layers=2))
    work = work_of(model, tokens_of(64, 64))
    counted = shapes.shapes_of(model, work, 64, None)
    assert counted.block[:4] == (
        Weight(64 + 2 * 32, 64, True, "out"), Weight(64, 64, True, "in"), Weight(2 * 176, 64, True, "out"),
        Weight(64, 176, True, "in"),
    )  # fmt: skip
    assert (counted.layers, counted.width, counted.heads, counted.attention_features) == (2, 64, (4, 2), 64)
    assert counted.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), abs=64)
    ideal = 10 * 64 + 2 * (64 + 2 * 32) + 3 * 176  # read and written by kernels that are fused by hand
    assert ideal < counted.elementwise_elements < 2 * ideal
    whole = shapes.shapes_of(model, work, 64, {"norms": 6400})
    # asking for a device is no launch
    assert whole.block == counted.block and 20 < whole.launches < 150 and counted.launches == 0
    assert whole.elementwise_elements > 2 * counted.elementwise_elements and whole.saved_bytes == 6400 / 64 / 2


def test_shapes_of_the_trainers_models_with_and_without_experts() -> None:
    for experts, splits in ((0, ["out", "in", "out", "in"]), (4, ["out", "in", None, "experts", "experts"])):
        model = meta(GPT, ModelConfig(64, 2, 2, 32, experts=experts, top_k=2 if experts else 1))
        work = work_of(model, tokens_of(32, 32))
        block = shapes.shapes_of(model, work, 32, {"inputs of layers": 6400}).block
        assert [weight.split for weight in block[:-1]] == splits
        assert [(w.held, w.used) for w in block if w.split == "experts"] == [(4, 2), (4, 2)] * bool(experts)


class OfBlocks(torch.nn.Module):
    """A model of linear blocks alone."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        layers = (torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(layer) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_models_without_a_list_of_blocks_or_a_head() -> None:
    for model, message in ((torch.nn.Linear(8, 8), "no list of blocks"), (OfBlocks(8, 8, 8), "no linear layer after")):
        work = work_of(on_meta(model), (torch.zeros(4, 8, device="meta"),))
        with pytest.raises(PlanError, match=f"--gpus: the model has {message}"):
            shapes.shapes_of(model, work, 4, None)
