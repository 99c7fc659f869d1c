"""A tiny Llama with PEFT's LoRA over a base that is frozen, in FP8 perhaps."""

from __future__ import annotations

from typing import Any, Literal

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import recipes

# Weights are stored with powers of two, so a plain twin casts with such scales too.
RECIPES = {"dynamic": recipes.dynamic(power_of_two=True), "blockwise": recipes.blockwise()}
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def llama(hidden: int = 128, inner: int = 256, layers: int = 2, vocabulary: int = 64) -> nn.Module:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16()


def base_layers(module: nn.Module, name: str) -> bool:
    """As the default select chooses of larger models: neither the head nor adapters."""
    return "_proj" in name and "lora_" not in name


def adapted(
    recipe: octavo.Recipe | None,
    storage: Literal["fp8"] | None = "fp8",
    after: bool = False,
    base: tuple[int, int] = (128, 256),
    float32: bool = True,
    **options: Any,
) -> Any:
    """A Llama with LoRA, its base of these sizes converted before or after; adapters as PEFT keeps them, or in bf16."""
    torch.manual_seed(0)
    model: Any = llama(*base)
    if not after and recipe is not None:
        octavo.convert(model, recipe, base_layers, storage)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA | options), autocast_adapter_dtype=float32)
    return octavo.convert(model, recipe, base_layers, storage) if after and recipe is not None else model


def tokens(seed: int, shape: tuple[int, int] = (2, 16)) -> Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def train(model: Any, steps: int = 3, lr: float = 1e-2, micro_batches: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        for part in range(micro_batches):
            batch = tokens(10 * step + part)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


def compare_sharded(mesh: Any, recipe: str) -> tuple[list[float], list[float], int]:
    """The losses of a model under FSDP2 and of the whole one, and how many FP8 weights it sends to a server."""
    whole, model = [adapted(RECIPES[recipe], base=(256, 512), float32=False) for _ in range(2)]
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model), train(whole)
    layout: Any = "fine-grained" if recipe == "blockwise" else "per-tensor"
    return *losses, len(list(octavo.export.iterate_fp8(model, layout, fp8_only=True)))
