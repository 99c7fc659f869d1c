"""Same quality with experts: the trainer's GPT with 8 experts, 2 of them a byte, in bf16 and in every recipe.

What is asserted is that of the subject ``convergence``, whose code this is, of attention's layers and the experts'
grouped products. Smaller than the default run, so that it takes 20 minutes of one core: every expert of a batch is
a product of its own on a CPU.
"""

from __future__ import annotations

import statistics

from benchmarks.common.pages import markdown, read, signed
from benchmarks.training import convergence
from octavo.train import DataConfig, ModelConfig, OptimizerConfig, TrainConfig

TAKES = "20 minutes"
MEASURES = ("octavo/kernels/reference", "octavo/recipes.py", "octavo/autograd", "octavo/train/model.py")

STUDY = convergence.Study(
    "mixture_convergence",
    TrainConfig(
        ModelConfig(width=128, layers=2, heads=2, context=64, experts=8, top_k=2),
        DataConfig(eval_windows=512),
        OptimizerConfig(steps=300),
    ),
    baseline_limit=2.05,  # 300 steps end at 1.97 to 2.00
)


def gaps_table() -> str:
    """Of docs/study/mixture-of-experts.md: each seed's gap to bf16 in percent, and their mean."""
    found = read("mixture_convergence_summary")
    seeds = sorted({row["seed"] for row in found})
    rows = []
    for recipe in convergence.RECIPES:
        own = {row["seed"]: row for row in found if row["recipe"] == recipe}
        gaps = [float(own[seed]["gap_percent"]) for seed in seeds]
        losses = [f"{float(own[seed]['val_loss']):.4f}" for seed in seeds]
        mean = f"**{signed(statistics.mean(gaps))} %**" if any(gaps) else ""
        sqnr = [own[seeds[0]][f"{product}_max_sqnr"] for product in convergence.PRODUCTS] if any(gaps) else []
        cells = [f"{loss} ({signed(gap)} %)" if any(gaps) else loss for loss, gap in zip(losses, gaps, strict=True)]
        rows.append([recipe, *cells, mean, ", ".join(sqnr)])
    return markdown(("recipe", *(f"seed {seed}" for seed in seeds), "mean", "SQNR of products, dB"), rows)


TABLES = {"gaps": gaps_table}


def main(arguments: list[str]) -> int:
    return convergence.main(arguments, STUDY)
