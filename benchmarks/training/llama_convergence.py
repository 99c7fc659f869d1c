"""Same quality in a model as it comes: transformers' Llama, in bf16, converted, with fuse=True, and with its head.

A seed fixes the initial weights and the order of the data, so that runs pair up. Asserted: for each variant the mean
over seeds of (final validation loss / bf16's - 1) is within 0.5 %. Weights are in float32, what computes in bf16 does
so by autocast. The same model in float32 shows how far a change of rounding alone moves a loss. Written to
results/llama_convergence-<device>.csv.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import markdown, read, signed
from octavo import recipes
from octavo.train import Batches, load_corpus

TAKES = "15 minutes"
MEASURES = ("octavo/nn/known_forwards.py", "octavo/autograd", "octavo/kernels/reference", "octavo/recipes.py")

BASELINE, CONTROL = "bf16", "float32"
# all but the first two leave the head in high precision, or say what it takes
HEADS = {f"dynamic, head {name}": name for name in ("dynamic_with_output_hp", "rowwise", "dynamic")}
VARIANTS = (BASELINE, CONTROL, *(f"{recipe}{fused}" for recipe in ("dynamic", "delayed") for fused in ("", ", fused")))
VARIANTS += (*HEADS,)
LIMIT = 0.5  # %
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 2}
CONTEXT, BATCH, STEPS, WARM_UP, RATE, WINDOWS = 64, 4, 250, 25, 1e-3, 256


def build(variant: str, seed: int) -> nn.Module:
    """Return the model of a variant."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **SIZES)).train()
    if variant not in (BASELINE, CONTROL):
        recipe, fused, head = variant.partition(", ")[0], variant.endswith("fused"), HEADS.get(variant)
        by_layer = recipes.as_recipe({"default": recipe, "rules": {"lm_head": head}})
        octavo.convert(model, by_layer, lambda module, name: name != "lm_head" or head is not None, fuse=fused)
        assert bool(octavo.summary(model).fused) == fused
    return model


def loss_of(model: nn.Module, windows: tuple[Tensor, Tensor], autocast: bool) -> Tensor:
    """Return the loss, nats a byte."""
    x, y = (one.long() for one in windows)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=x).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def one_run(variant: str, seed: int, steps: int) -> float:
    """Train, and return the final validation loss."""
    model, autocast = build(variant, seed), variant != CONTROL
    batches = Batches(load_corpus(None), CONTEXT, BATCH, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 - step / max(steps, 1))
    )
    for step in range(steps):
        loss_of(model, batches.training(step), autocast).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    model.eval()
    with torch.no_grad():
        return statistics.fmean(float(loss_of(model, windows, autocast)) for windows in batches.validation(WINDOWS))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks llama_convergence", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="transformers")
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        base = 0.0
        for variant in VARIANTS:
            loss = one_run(variant, seed, options.steps)
            base = base or loss
            gap = 100 * (loss / base - 1)
            print(f"seed {seed} {variant}: {loss:.4f} nats/byte, {gap:+.3f} %", flush=True)
            rows.append({"seed": seed, "variant": variant, "val_loss": f"{loss:.5f}", "gap_percent": f"{gap:.4f}"})
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('llama_convergence', rows)}")
    means = {each: _mean(rows, each) for each in VARIANTS}
    del means[CONTROL]
    for variant, gap in means.items():
        print(f"{'ok' if abs(gap) <= LIMIT else 'MISSED'}: {variant} {gap:+.3f} % of bf16 (aim {LIMIT})")
    return int(any(abs(gap) > LIMIT for gap in means.values()))


def _mean(rows: list[Any], variant: str) -> float:
    return statistics.fmean(float(row["gap_percent"]) for row in rows if row["variant"] == variant)


def gaps_table() -> str:
    """Return a table of final validation losses, and their gaps to bf16's of the same seed in percent."""
    rows, cells = read("llama_convergence"), []
    for variant in VARIANTS:
        variant_rows = [row for row in rows if row["variant"] == variant]
        gaps = [f" ({signed(float(row['gap_percent']))} %)" if variant != BASELINE else "" for row in variant_rows]
        losses = [f"{float(row['val_loss']):.4f}{gap}" for row, gap in zip(variant_rows, gaps, strict=True)]
        cells.append([variant, *losses, "" if variant == BASELINE else f"{signed(_mean(variant_rows, variant))} %"])
    return markdown(["", *(f"seed {seed}" for seed in dict.fromkeys(row["seed"] for row in rows)), "mean"], cells)


TABLES = {"Llama's losses": gaps_table}
