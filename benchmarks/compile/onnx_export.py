"""Exported models in onnxruntime: every recipe and opset, the fused modules and the trained demo.

For each recipe the least SQNR, over octavo's modules and sizes that differ from the example's, of onnxruntime's output
against octavo's evaluation in float32, in each opset; then the demo, trained as `octavo train` does, with its SQNR, the
change of its loss, and its file's size beside the same model's in bf16. Written to results/onnx_export-<device>.csv.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import Row, listed, signed
from octavo import recipes
from octavo.errors import ExportError
from octavo.export import run_onnx, sqnr_in_onnxruntime, to_onnx
from octavo.train import (
    GPT,
    Batches,
    Hooks,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    load_corpus,
    next_byte_loss,
    run,
)

TAKES = "20 minutes"
MEASURES = ("octavo/export",)

RECIPES = ("dynamic", "delayed", "rowwise", "blockwise", "mx", "high_precision")
OPSETS = (21, 22, 23, 24)
WIDTH = 192
MODULES_AIM, DEMO_AIM, LOSS_AIM, SIZE_AIM = 40.0, 30.0, 0.1, 0.6  # dB, dB, %, of bf16's file


def modules(recipe: octavo.Recipe) -> dict[str, nn.Module]:
    return {
        "Linear": octavo.nn.Linear(WIDTH, 80, recipe=recipe),
        "LayerNormLinear": octavo.nn.LayerNormLinear(WIDTH, {"a": 64, "b": 32}, recipe=recipe),
        "RMSNormLinear": octavo.nn.RMSNormLinear(WIDTH, 80, recipe=recipe),
        "LayerNormMLP": octavo.nn.LayerNormMLP(WIDTH, 320, "gelu", recipe=recipe),
        "RMSNormMLP": octavo.nn.RMSNormMLP(WIDTH, 320, "swiglu", recipe=recipe),
        "TransformerBlock": octavo.nn.TransformerBlock(WIDTH, 320, 6, 2, recipe=recipe),
    }


def of_modules(recipe: str, opset: int, folder: Path) -> str:
    """Return the least SQNR in dB, or the reason for which there is none."""
    least = float("inf")
    for name, module in modules(getattr(recipes, recipe)()).items():
        outputs = module(torch.randn(2, 9, WIDTH))  # gives delayed scaling its history
        sum(y.square().mean() for y in torch.utils._pytree.tree_leaves(outputs)).backward()
        try:
            path = to_onnx(module, torch.randn(2, 5, WIDTH), folder / f"{name}.onnx", opset=opset)
            for shape in ((2, 5, WIDTH), (1, 1, WIDTH), (3, 40, WIDTH)):
                least = min(least, sqnr_in_onnxruntime(module, torch.randn(shape), path))
        except ExportError as error:
            return f"refused ({name}): {error}"
    return f"{least:.1f}"


def of_demo(recipe: str, steps: int, folder: Path) -> dict[str, str]:
    """Return the columns of the trained demo."""
    trained: list[GPT] = []
    corpus = load_corpus()
    config = TrainConfig(optimizer=OptimizerConfig(steps=steps), run=RunConfig(dtype="bfloat16"))
    run(config, recipe, corpus=corpus, hooks=Hooks(on_model=trained.append))
    model = trained[0].eval()
    tokens, targets = next(Batches(corpus, config.model.context, 16, 0).validation(16))
    path = to_onnx(model, tokens.int(), folder / "demo.onnx", weights=torch.bfloat16)
    in_bf16 = to_onnx(GPT(ModelConfig()).bfloat16(), tokens.int(), folder / "demo_in_bf16.onnx")
    with torch.no_grad():
        ours = float(next_byte_loss(model(tokens), targets))
    theirs = float(next_byte_loss(run_onnx(path, tokens.int())[0], targets))
    return {
        "demo_sqnr": f"{sqnr_in_onnxruntime(model, tokens[:5, :77].int(), path):.1f}",
        "demo_loss_change_percent": f"{100 * (theirs / ours - 1):.4f}",
        "demo_size_by_bf16": f"{path.stat().st_size / in_bf16.stat().st_size:.3f}",
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks onnx_export", description=__doc__)
    parser.add_argument("--steps", type=int, default=240, help="that the demo trains")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--opsets", nargs="+", type=int, default=OPSETS)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    rows, missed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in options.recipes:
            sqnr_by_opset = {f"opset_{opset}": of_modules(recipe, opset, Path(folder)) for opset in options.opsets}
            row = {"recipe": recipe} | sqnr_by_opset | of_demo(recipe, options.steps, Path(folder))
            rows.append(row)
            print(row, flush=True)
            worst = min(float(value) for value in sqnr_by_opset.values() if not value.startswith("refused"))
            fp8 = recipe != "high_precision"
            for what, ok in {
                f"modules {worst:.1f} dB, aim {MODULES_AIM}": worst >= MODULES_AIM,
                f"demo {row['demo_sqnr']} dB, aim {DEMO_AIM}": float(row["demo_sqnr"]) >= DEMO_AIM,
                f"loss {row['demo_loss_change_percent']} %": abs(float(row["demo_loss_change_percent"])) <= LOSS_AIM,
                f"size {row['demo_size_by_bf16']} of bf16": not fp8 or float(row["demo_size_by_bf16"]) <= SIZE_AIM,
            }.items():
                missed += [] if ok else [f"{recipe}: {what}"]
    print(table([{name: value[:9] for name, value in row.items()} for row in rows]))
    if not options.no_write:
        print(f"written to {write_results('onnx_export', rows)}")
    print("\n".join(f"MISSED: {line}" for line in missed) or "ok: every aim")
    return int(bool(missed))


def export_table() -> str:
    """Return the table of docs/export.md: the least SQNR by opset, and the demo's."""

    def least(row: Row) -> str:
        values = [row[f"opset_{opset}"] for opset in OPSETS]
        refused = any(value.startswith("refused") for value in values)
        return "refused" if refused else f"{min(map(float, values)):.0f} dB"

    cells: dict[str, Callable[[Row], str]] = {
        "recipe": lambda row: f"`{row['recipe']}`",
        "opset 21 to 24": least,
        "demo": lambda row: f"{float(row['demo_sqnr']):.0f} dB",
        "its loss": lambda row: f"{signed(float(row['demo_loss_change_percent']), 3)} %",
        "its bytes, by bf16's": lambda row: row["demo_size_by_bf16"],
    }
    return listed("onnx_export", cells)


TABLES = {"onnxruntime": export_table}
