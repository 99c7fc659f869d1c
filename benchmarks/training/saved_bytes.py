"""Bytes that a forward saves for backward, by kind: transformers' models unconverted, converted and fused.

"delayed, saved" also keeps in FP8 what a fused feed-forward's activation reads, by the recipe's ``saved`` cast.

Nothing is computed: forwards run on tensors without data, and tests hold them to what a real forward saves. Models have
4 layers, 512 features and 8 sequences of 512 tokens in bfloat16, without dropout; the vocabulary is an eighth of a real
one, as the number of layers is.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import markdown, read
from octavo import E4M3, Cast, Dynamic, PerBlock, recipes
from octavo.nn.saved import SAVED_KINDS, predicted_by_kind

TAKES = "5 minutes"
MEASURES = (
    "octavo/nn/saved.py",
    "octavo/nn/known_forwards.py",
    "octavo/autograd/chain.py",
    "octavo/autograd/norm.py",
    "octavo/autograd/products.py",
)

WIDTH, LAYERS, HEADS, VOCABULARY = 512, 4, 8, 4096
RECIPES = {name: getattr(recipes, name)() for name in ("dynamic", "delayed", "blockwise")}
_SAVED = Cast(E4M3, PerBlock(1, 128), Dynamic())
RECIPES["delayed, saved"] = dataclasses.replace(RECIPES["delayed"], saved=_SAVED)
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
_DECODER = _SIZES | {"intermediate_size": 1408, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
_T5 = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 1024, "num_layers": LAYERS, "num_heads": HEADS}
_T5 |= {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}
_VIT = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 2048}
_VIT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "image_size": 352, "num_labels": 1000}
# transformers' names of the configuration and of the model
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _DECODER | {"head_dim": WIDTH // HEADS, "num_key_value_heads": 2}),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", _DECODER | {"num_local_experts": 8, "num_key_value_heads": 2}),
    "ViT": ("ViTConfig", "ViTForImageClassification", _VIT),
    "T5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "Mamba": ("MambaConfig", "MambaForCausalLM", _SIZES),
}


def build(name: str, sequences: int = 8, tokens: int = 512, **changes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model in training, and a batch for it; images are as large as the model's."""
    import transformers

    config, model, sizes = MODELS[name]
    built = getattr(transformers, model)(getattr(transformers, config)(**(sizes | changes))).to(torch.bfloat16)
    if name == "ViT":
        side = built.config.image_size
        images = torch.randn(sequences, 3, side, side, dtype=torch.bfloat16)
        return built.train(), {"pixel_values": images, "labels": torch.zeros(sequences, dtype=torch.int64)}
    batch = torch.zeros(sequences, tokens, dtype=torch.int64)
    return built.train(), {"input_ids": batch, "labels": batch}


def rows(name: str, names: Iterable[str] = RECIPES, **options: Any) -> Iterator[dict[str, object]]:
    """Yield a row for each recipe and kind, bytes."""
    model, batch = build(name, **options)
    plain = predicted_by_kind(model, (), batch)
    for each in names:
        by_fusion = []
        for fuse in (False, True):
            net = copy.deepcopy(model)
            octavo.convert(net, RECIPES[each], fuse=fuse)
            by_fusion.append(predicted_by_kind(net, (), batch))
        for kind in SAVED_KINDS:
            sizes = {"bf16": plain[kind], "converted": by_fusion[0][kind], "fused": by_fusion[1][kind]}
            if any(sizes.values()):
                yield {"model": name, "recipe": each, "kind": kind} | sizes


def saved_table() -> str:
    """Return a table of MiB by kind under ``delayed``: unconverted, converted, fused; sums without weights' codes."""
    every = read("saved_bytes")
    delayed_rows = [row for row in every if row["recipe"] == "delayed"]
    cells: list[list[str]] = []
    for kind in SAVED_KINDS:
        cells.append([kind])
        for name in MODELS:
            cell_rows = [row for row in delayed_rows if (row["model"], row["kind"]) == (name, kind)]
            sizes = [float(cell_rows[0][how]) / 2**20 if cell_rows else 0.0 for how in ("bf16", "converted", "fused")]
            cells[-1].append(" · ".join(f"{size:,.0f}" for size in sizes) if any(sizes) else "")
    for recipe, how in {"delayed": "", "delayed, saved": ", with `saved=`"}.items():
        cells.append([f"of bf16's, weights apart{how}"])
        for name in MODELS:
            recipe_rows = [
                row for row in every if (row["model"], row["recipe"]) == (name, recipe) and row["kind"] != "weights"
            ]
            sums = [sum(float(row[how]) for row in recipe_rows) for how in ("bf16", "converted", "fused")]
            cells[-1].append(" · ".join(f"{size / sums[0]:.3f}" for size in sums[1:]))
    return markdown(["MiB", *MODELS], cells)


def floor(kind: str, fuse: bool) -> int:
    """Return the least bytes of a kind that Llama's forward saves: read in backward by operations of this kind."""
    wide, norm, joined = _DECODER["intermediate_size"], (2 if fuse else 6) * WIDTH + 4, WIDTH if fuse else 0
    a_layer = {
        # codes of what q, k and v read, what o does, gate and up, down; fused, the first and third are their modules',
        # and the last are cast again
        "inputs of layers": 3 * WIDTH - 2 * joined + (0 if fuse else wide),
        "attention": 4 * 2 * WIDTH + 4 * HEADS + joined,  # q, k, v and the output in bf16, a number a head
        "norms": 2 * norm,  # the input in bf16, or what torch's operations keep: 6 bytes an element
        "activations": (2 if fuse else 3) * 2 * wide + joined,  # what gate and up return, and the activation of gate
    }
    once = {"inputs of layers": WIDTH, "norms": norm, "logits and loss": (2 if fuse else 4) * VOCABULARY}  # the head's
    return 8 * 512 * (LAYERS * a_layer.get(kind, 0) + once.get(kind, 0))


def floor_table() -> str:
    """Return a table of Llama's MiB under the delayed recipe, and of its ratio to the floor."""
    cells, sums = [], [0.0] * 5
    for row in read("saved_bytes"):
        if (row["model"], row["recipe"]) == ("Llama", "delayed") and row["kind"] != "weights":
            least = [floor(row["kind"], fuse) for fuse in (False, True)]
            sizes = [float(row["bf16"]), least[0], float(row["converted"]), least[1], float(row["fused"])]
            cells.append([row["kind"], *(f"{size / 2**20:.1f}" for size in sizes)])
            sums = [one + size for one, size in zip(sums, sizes, strict=True)]
    cells.append(["of bf16's", *(f"{size / sums[0]:.3f}" for size in sums)])
    return markdown(["MiB", "bf16", "floor", "converted", "floor, fused", "fused"], cells)


TABLES = {"saved": saved_table, "floor": floor_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks saved_bytes", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    new_rows = [row for name in options.models for row in rows(name)]
    print(table(new_rows))
    if not options.no_write:
        print(f"written to {write_results('saved_bytes', new_rows)}")
    return 0
