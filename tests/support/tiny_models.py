"""Tiny random models of transformers, built offline, each with a data set for its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, POSITIONS, WIDTH, FEEDFORWARD = 64, 32, 64, 176
LAYERS, HEADS = 2, 4
CLASSES, IMAGE, PATCH = 4, 16, 4


def decoder(name: str, **changes: Any) -> nn.Module:
    """A causal language model of transformers' names for its sizes: "Llama", "Qwen2", "Mixtral", "Gemma"."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": FEEDFORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
    }
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def gpt2(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, **tokens, **changes))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=FEEDFORWARD,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=POSITIONS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=WIDTH // HEADS,
            d_ff=FEEDFORWARD,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=IMAGE,
            patch_size=PATCH,
            hidden_size=WIDTH,
            intermediate_size=FEEDFORWARD,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: decoder("Llama"),
    "qwen2": lambda: decoder("Qwen2"),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": lambda: decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gemma": lambda: decoder("Gemma", head_dim=WIDTH // HEADS),
}


def build(kind: str) -> nn.Module:
    """The model of a seed."""
    torch.manual_seed(0)
    return MODELS[kind]().train()


def data(kind: str, count: int = 16) -> list[dict[str, Tensor]]:
    """Examples for a Trainer, of another seed; few enough to be learnt by heart."""
    generator = torch.Generator().manual_seed(5)
    if kind == "vit":
        images = torch.randn(count, 3, IMAGE, IMAGE, generator=generator)
        return [{"pixel_values": x, "labels": torch.tensor(i % CLASSES)} for i, x in enumerate(images)]
    tokens = torch.randint(1, VOCABULARY, (count, POSITIONS), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]
