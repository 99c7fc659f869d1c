"""transformers' mixtures of experts, tiny, train in FP8 as in bf16; tests/integrations has its Trainer."""

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo import recipes
from octavo.nn.experts import ConvertedExperts
from tests.support.helpers import FP8_RECIPES, assert_equal, every_layer
from tests.support.tiny_models import POSITIONS, VOCABULARY, decoder

transformers = pytest.importorskip("transformers")

FEW_OF_EIGHT = {"moe_intermediate_size": 96, "num_experts_per_tok": 2}
HEADS_OF_16 = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 8, "head_dim": 16, **FEW_OF_EIGHT},
    # the first layer is dense, the second has shared experts too
    "DeepseekV3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
                   "kv_lora_rank": 32, **FEW_OF_EIGHT, **HEADS_OF_16},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}  # fmt: skip
BATCH = 4
QUICK = ("Mixtral", "GptOss")  # experts of each kind: joined gate and up, and their transposes with biases


def built(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        transformers.utils.logging.set_verbosity_error()
        return decoder(name, **MODELS[name]).train()


def batches(count: int, seed: int) -> Tensor:
    """[count, BATCH, POSITIONS] tokens of a language in which each word depends on the one before."""
    likely = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(123)).mul(2).softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(VOCABULARY, (count * BATCH, 1), generator=generator)]
    while len(words) < POSITIONS:
        words.append(torch.multinomial(likely[words[-1][:, 0]], 1, generator=generator))
    return torch.cat(words, 1).view(count, BATCH, POSITIONS)


def trained(name: str, recipe: octavo.Recipe | None, steps: int, seed: int = 0) -> tuple[Any, list[float]]:
    model, losses = built(name, seed), []
    if recipe is not None:
        octavo.convert(model, recipe, every_layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for tokens in batches(steps, seed):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in MODELS])
def test_most_of_the_work_is_in_fp8_and_checkpoints_fit_both_ways(name: str, tmp_path: Path) -> None:
    model, losses = trained(name, recipes.delayed(), 2)
    assert losses == pytest.approx(trained(name, None, 2)[1], rel=0.01)
    experts = [module for module in model.modules() if isinstance(module, ConvertedExperts)]
    assert experts and all(module.gate_up.delayed_scale.all() for module in experts)
    tokens = batches(1, 7)[0]
    found = octavo.summary(model, input_ids=tokens)
    assert found.flops[0] > 0.9 * found.flops[1]
    assert {row.kind for row in found.left_alone} == {"Embedding", f"{name}Top{'k' if 'Deep' in name else 'K'}Router"}
    plain = built(name, seed=1)
    plain.load_state_dict(model.state_dict())
    assert_equal(plain.state_dict(), model.state_dict())
    octavo.convert(built(name, seed=1), recipes.mx(), every_layer).load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path)
    read = type(plain).from_pretrained(tmp_path)
    assert_equal(read.state_dict(), plain.state_dict())
    octavo.restore(model)
    assert torch.equal(model.eval()(input_ids=tokens).logits, read.eval()(input_ids=tokens).logits)


@functools.cache
def end_of(name: str, recipe: str | None) -> float:
    """Of 3 seeds, the mean loss of the last 10 of 40 steps."""
    runs = [trained(name, None if recipe is None else FP8_RECIPES[recipe](), 40, seed)[1] for seed in range(3)]
    assert all(sum(losses[-10:]) < 8 * losses[0] for losses in runs)  # 20 % below the first
    return sum(sum(losses[-10:]) for losses in runs) / 30


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "recipe"), [(n, r) for n in MODELS for r in FP8_RECIPES if n == "Mixtral" or r == "delayed"]
)
def test_losses_are_those_of_bf16(name: str, recipe: str) -> None:
    assert end_of(name, recipe) == pytest.approx(end_of(name, None), rel=0.005)
