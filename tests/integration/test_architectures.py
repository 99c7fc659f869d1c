"""transformers' causal language models, tiny and as they come: sharing the casts of inputs changes no bit of any."""

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo import recipes
from octavo.autograd.shared_casts import casts_to_share
from octavo.nn import recipe_module
from tests.support.helpers import CountOps, assert_equal, gradients, to_fp8
from tests.support.tiny_models import DECODER, GPT2, LAYERS, NO_DROPOUT, T5, decoder

NAMES = """
    afmoe apertus arcee bailing_hybrid bert biogpt bitnet bloom cohere cohere2 cwm deepseek_v2 diffllama doge electra
    ernie4_5 ernie4_5_moe exaone4 falcon falcon_mamba flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2
    gpt_bigcode gpt_neox gpt_oss granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense
    hunyuan_v1_moe jamba jetmoe lfm2 llama llama4_text mamba mimo_v2_flash minicpm3 minimax ministral mistral mixtral
    modernbert-decoder moshi mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe
    qwen3
""".split()
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
EXPERTS |= {"num_experts_per_tok": 2, "moe_topk": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "state_size": 8, "head_dim": 16, "ffn_dim": 96}
DROPOUTS = dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "activation_dropout"), 0.0)
SIZES = DECODER | GPT2 | T5 | NO_DROPOUT | EXPERTS | LATENT | GROUPS | DROPOUTS


def tiny(name):
    """Return a model whose configuration takes those of SIZES that it has."""
    config = CONFIG_MAPPING[name]
    option_names = {*config().to_dict(), *getattr(config, "attribute_map", ())}
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key in option_names}
    return transformers.AutoModelForCausalLM.from_config(config(**sizes, use_cache=False)).float().train()


def trace(model, tokens):
    model.zero_grad()
    torch.manual_seed(0)
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    return {"logits": result.logits.detach(), **gradients(model)}


def test_a_block_casts_four_inputs_for_seven_layers():
    model = to_fp8(decoder("Llama", use_cache=False), recipes.dynamic())
    with CountOps() as ops:
        model(input_ids=torch.ones(2, 16, dtype=torch.int64))
    assert ops.casts == LAYERS * (4 + 7) + 2  # and the head


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_sharing_changes_no_bit(name, monkeypatch):
    model = to_fp8(tiny(name), recipes.dynamic())
    tokens = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    shared = []
    monkeypatch.setattr(
        recipe_module, "casts_to_share", lambda *read: shared.append(casts_to_share(*read)) or shared[-1]
    )
    with_sharing = trace(model, tokens)
    assert shared
    monkeypatch.setattr(recipe_module, "casts_to_share", lambda x, layer: None)
    assert_equal(with_sharing, trace(model, tokens))
