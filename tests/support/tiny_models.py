"""Tiny random models of transformers, built offline, each with a data set for its Trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.support.helpers import stepped

VOCABULARY, POSITIONS, WIDTH, FEEDFORWARD = 64, 32, 64, 176
LAYERS, HEADS = 2, 4
CLASSES, IMAGE, PATCH = 4, 16, 4
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FEEDFORWARD}
SIZES |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": POSITIONS}
DECODER = SIZES | {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": FEEDFORWARD, "num_layers": LAYERS}
T5 |= {"num_heads": HEADS, "dropout_rate": 0.0, "decoder_start_token_id": 0}
IMAGES = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
IMAGES |= {"image_size": IMAGE, "patch_size": PATCH, "num_labels": CLASSES}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # transformers' names of the configuration and of the model
    "llama": ("Llama", "LlamaForCausalLM", DECODER),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", DECODER),
    "gpt2": ("GPT2", "GPT2LMHeadModel", GPT2),
    "bert": ("Bert", "BertForMaskedLM", SIZES | NO_DROPOUT),
    "t5": ("T5", "T5ForConditionalGeneration", T5),
    "vit": ("ViT", "ViTForImageClassification", IMAGES | NO_DROPOUT),
    "mixtral": ("Mixtral", "MixtralForCausalLM", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", "GemmaForCausalLM", DECODER | {"head_dim": WIDTH // HEADS}),
}


def new(config: str, model: str, sizes: dict[str, Any]) -> nn.Module:
    """Return a model by the names of MODELS."""
    return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**sizes))


def decoder(name: str, **changes: Any) -> nn.Module:
    """Return a causal language model of transformers' names for its sizes: "Llama", "Qwen2", "Mixtral", "Gemma"."""
    return new(name, f"{name}ForCausalLM", DECODER | changes)


def build(kind: str) -> nn.Module:
    """Return the model of a seed."""
    torch.manual_seed(0)
    return new(*MODELS[kind]).train()


def train(net: nn.Module, batches: Iterable[Tensor]) -> list[float]:
    """Return the losses of AdamW's steps under autocast, one on each batch of tokens."""
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=3e-3), []
    for tokens in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(input_ids=tokens, labels=tokens, use_cache=False).loss
        losses.append(stepped(optimizer, loss))
    return losses


def data(kind: str, count: int = 16) -> list[dict[str, Tensor]]:
    """Return examples for a Trainer, of another seed; few enough to be learnt by heart."""
    generator = torch.Generator().manual_seed(5)
    if kind == "vit":
        images = torch.randn(count, 3, IMAGE, IMAGE, generator=generator)
        return [{"pixel_values": x, "labels": torch.tensor(i % CLASSES)} for i, x in enumerate(images)]
    tokens = torch.randint(1, VOCABULARY, (count, POSITIONS), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]
