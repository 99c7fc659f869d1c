"""Which layers stay in high precision: those that octavo.inspect.compare finds, or the first, the last and the head.

Three small models train in float32, and with every linear layer in FP8 (dynamic), but for no layer, for three by the
usual rule, and for three that are chosen by two batches after 40 steps in high precision: a GPT of the trainer, and
transformers' Llama (both on Python's standard library, as bytes) and ViT (on patterns with noise). Each as it is, and
with an outlier token: before a layer in the middle a sequence's first token is multiplied by 2^17, and divided by it
behind, so that in high precision next to nothing changes, and one scale a tensor flushes the other tokens. A seed
fixes weights and data, so that runs pair up. Columns: final validation loss, how much higher it is than float32's, what
was predicted for that, and the layers. Asserted: over the seeds of a model the gap of the chosen layers is no larger
than the rule's by more than two standard errors of the paired differences, and with the outlier it is smaller.
Written to results/what_if-<device>.csv.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from benchmarks.common.measure import table, write_results
from octavo import RecipeMap, recipes
from octavo.train import Batches, ModelConfig, load_corpus, next_byte_loss
from octavo.train.trainer import build_model

TAKES = "15 minutes"
MEASURES = ("octavo/inspect/what_if.py", "octavo/autograd", "octavo/recipes.py")

WIDTH, CONTEXT, BATCH, STEPS, WARM, LR = 64, 64, 16, 200, 40, 1e-3
KEEP, OUTLIER = 3, 2.0**17
FLOAT32, ALL, RULE, CHOSEN = "float32", "all in FP8", "first, last, head", "chosen"


class Subject(NamedTuple):
    """A model and its data: ``batch(seed, step)``, of step -1 for validation.

    ``layers``: the first, the last, the head, and one that an outlier token may come to.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    layers: tuple[str, str, str, str]


@functools.cache
def text_batches(seed: int) -> Batches:
    return Batches(load_corpus(None), CONTEXT, BATCH, seed)


def text(seed: int, step: int) -> Any:
    return next(iter(text_batches(seed).validation(256))) if step < 0 else text_batches(seed).training(step)


def images(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Ten patterns in 16x16 pixels, shifted, under eight times their power in noise, and which they are."""
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(10_000 * seed + step + 1)
    labels = torch.randint(10, (2048 if step < 0 else 4 * BATCH,), generator=generator)
    shift = int(torch.randint(3, (), generator=generator))
    clean = patterns[labels].roll(shift, -1)
    return clean + 8**0.5 * torch.randn(clean.shape, generator=generator), labels


def make_gpt() -> nn.Module:
    return build_model(ModelConfig(WIDTH, 2, 2, CONTEXT), FLOAT32, torch.initial_seed())


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"initializer_range": 0.1}
    config = LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=CONTEXT, use_cache=False)
    return LlamaForCausalLM(config)


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"initializer_range": 0.1}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **dropout, image_size=16, patch_size=4, num_labels=10))


def llama_loss(model: nn.Module, batch: Any) -> Tensor:
    return next_byte_loss(model(batch[0].long()).logits, batch[1])


SUBJECTS = {
    "gpt": Subject(
        make_gpt,
        text,
        lambda model, batch: next_byte_loss(model(batch[0]), batch[1]),
        ("blocks.0.attention.qkv.linear", "blocks.1.mlp.fc2", "head", "blocks.0.mlp.fc2"),
    ),
    "llama": Subject(
        make_llama,
        text,
        llama_loss,
        ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head", "model.layers.0.mlp.up_proj"),
    ),
    "vit": Subject(
        make_vit,
        images,
        lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),
        ("vit.layers.0.attention.q_proj", "vit.layers.1.mlp.fc2", "classifier", "vit.layers.0.mlp.fc2"),
    ),
}


def with_outlier(model: nn.Module, layer: str) -> None:
    """A first token that is OUTLIER times as large for this layer, and for nothing else."""
    found: Any = model.get_submodule(layer)

    def scaled(x: Tensor, by: float) -> Tensor:
        factor = torch.ones(x.shape[-2], 1)
        factor[0] = by
        return x * factor

    def divided(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        bias = 0.0 if found.bias is None else found.bias
        return scaled(output - bias, 1 / OUTLIER) + bias

    found.register_forward_pre_hook(lambda _, arguments: (scaled(arguments[0], OUTLIER),))
    found.register_forward_hook(divided)


def every(module: nn.Module, name: str) -> bool:
    return True


def train(subject: Subject, model: nn.Module, seed: int, steps: int, total: int) -> nn.Module:
    """The first steps of so many in all; the learning rate rises for ten and falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, (total - step) / total))
    for step in range(steps):
        loss = subject.loss(model, subject.batch(seed, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def one_subject(task: tuple[str, bool, int, int]) -> list[dict[str, Any]]:
    """Train a model of a seed in all ways: rows."""
    name, outlier, seed, steps = task
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    subject = SUBJECTS[name]
    plain = subject.make()
    *rule, hostile = subject.layers
    if outlier:
        with_outlier(plain, hostile)
    warm = train(subject, copy.deepcopy(plain), seed, min(WARM, steps), steps)
    batches = [subject.batch(seed, steps + i) for i in range(2)]
    found = octavo.inspect.compare(warm, subject.loss, batches, [recipes.dynamic()], select=every)
    maps = {
        FLOAT32: None,
        ALL: RecipeMap(recipes.dynamic()),
        RULE: RecipeMap(recipes.dynamic(), dict.fromkeys(rule)),
        CHOSEN: found.recipe_map(keep=KEEP),
    }
    rows: list[dict[str, Any]] = []
    for scheme, recipe in maps.items():
        model = copy.deepcopy(plain)
        if recipe is not None:
            octavo.convert(model, recipe, every)
        train(subject, model, seed, steps, steps)
        with torch.no_grad():
            loss = float(subject.loss(model, subject.batch(seed, -1)))
        row = {"model": name, "outlier": hostile if outlier else "", "seed": seed, "scheme": scheme}
        predicted = 0.0 if recipe is None else found.predicted(recipe)
        gap = 100 * (loss / float(rows[0]["val_loss"]) - 1) if rows else 0.0
        row |= {"val_loss": f"{loss:.6f}", "gap_percent": f"{gap:+.4f}", "predicted_percent": f"{100 * predicted:.4f}"}
        rows.append(row | {"in_float32": " ".join(recipe.rules) if recipe is not None else ""})
    return rows


def verdicts(rows: list[dict[str, Any]]) -> tuple[list[dict[str, str]], bool]:
    """A line a model and scheme: mean gap and what was predicted; whether all aims are met, which are printed."""
    lines, good = [], True
    kinds = dict.fromkeys((row["model"], row["outlier"]) for row in rows)
    for model, outlier in kinds:
        gaps: dict[str, list[float]] = {}
        predicted: dict[str, list[float]] = {}
        for row in rows:
            if (row["model"], row["outlier"]) == (model, outlier):
                gaps.setdefault(row["scheme"], []).append(float(row["gap_percent"]))
                predicted.setdefault(row["scheme"], []).append(float(row["predicted_percent"]))
        for scheme in gaps:
            line = {"model": model, "outlier": outlier, "scheme": scheme, "seeds": str(len(gaps[scheme]))}
            mean, expected = statistics.mean(gaps[scheme]), statistics.mean(predicted[scheme])
            lines.append(line | {"gap_percent": f"{mean:+.3f}", "predicted_percent": f"{expected:.3f}"})
        differences = [a - b for a, b in zip(gaps[CHOSEN], gaps[RULE], strict=True)]
        mean = statistics.mean(differences)
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
        met = mean < 0 if outlier else mean <= 2 * error
        good &= met
        text = f"{model}{' with an outlier' if outlier else ''}: chosen minus rule {mean:+.3f} % (± {error:.3f})"
        print(f"{'ok' if met else 'MISSED'}: {text}")
    return lines, good


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks what_if", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--toy", action="store_true", help="a GPT for three steps; no aim counts")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--output", type=Path, help="another file to write")
    options = parser.parse_args(arguments)
    models, steps = (["gpt"], 3) if options.toy else (options.models, options.steps)
    tasks = [(m, outlier, seed, steps) for m in models for outlier in (False, True) for seed in options.seeds]
    rows = []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for found in pool.map(one_subject, tasks):
            rows += found
            for row in found:
                print(*row.values(), flush=True)
    lines, good = verdicts(rows)
    print(table(lines))
    if not options.no_write:
        print(f"written to {write_results('what_if', rows, options.output)}")
    return 0 if good or options.toy else 1
