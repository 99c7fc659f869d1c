"""transformers' mixtures of experts, tiny, train in FP8 as in bf16; tests/integrations has its Trainer."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo import recipes
from octavo.nn.experts import ConvertedExperts
from tests.support.helpers import assert_equal, every_layer
from tests.support.tiny_models import POSITIONS, VOCABULARY, decoder, train

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
QUICK = ("GptOss",)  # transposed, with biases; tests/nn/test_experts.py has a Mixtral's experts


def built(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        transformers.utils.logging.set_verbosity_error()
        return decoder(name, **MODELS[name]).train()


def batches(count: int, seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (count, 4, POSITIONS), generator=torch.Generator().manual_seed(seed))


def trained(name: str, recipe: octavo.Recipe | None) -> tuple[Any, list[float]]:
    """Return a model after two steps, and their losses."""
    model = built(name)
    if recipe is not None:
        octavo.convert(model, recipe, every_layer)
    return model, train(model, batches(2, 0))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in MODELS])
def test_most_of_the_work_is_in_fp8_and_checkpoints_fit_both_ways(name: str, tmp_path: Path) -> None:
    model, losses = trained(name, recipes.delayed())
    assert losses == pytest.approx(trained(name, None)[1], rel=0.01)
    experts = [module for module in model.modules() if isinstance(module, ConvertedExperts)]
    assert experts and all(module.gate_up.delayed_scale.all() for module in experts)
    tokens = batches(1, 7)[0]
    table = octavo.summary(model, input_ids=tokens)
    assert table.flops[0] > 0.9 * table.flops[1]
    assert {row.kind for row in table.left_alone} == {"Embedding", f"{name}Top{'k' if 'Deep' in name else 'K'}Router"}
    plain = built(name, seed=1)
    plain.load_state_dict(model.state_dict())
    assert_equal(plain.state_dict(), model.state_dict())
    octavo.convert(built(name, seed=1), recipes.mx(), every_layer).load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path)
    read = type(plain).from_pretrained(tmp_path)
    assert_equal(read.state_dict(), plain.state_dict())
    octavo.restore(model)
    assert torch.equal(model.eval()(input_ids=tokens).logits, read.eval()(input_ids=tokens).logits)
