"""Same quality with experts: the trainer's GPT with 8 experts, 2 of them a byte, in bf16 and in every recipe.

What is asserted is that of the subject ``convergence``, whose code this is, of attention's layers and the experts'
grouped products. Smaller than the default run, so that it takes half an hour of one core: every expert of a batch is
a product of its own on a CPU.
"""

from __future__ import annotations

from benchmarks.training import convergence
from octavo.train import DataConfig, ModelConfig, OptimizerConfig, TrainConfig

TAKES = "15 minutes"
MEASURES = ("octavo/kernels/reference", "octavo/recipes.py", "octavo/autograd", "octavo/train/mixture.py")

STUDY = convergence.Study(
    "mixture_convergence",
    TrainConfig(
        ModelConfig(width=128, layers=2, heads=2, context=64, experts=8, top_k=2),
        DataConfig(eval_windows=1024),
        OptimizerConfig(steps=360),
    ),
    baseline_limit=2.0,
)


def main(arguments: list[str]) -> int:
    return convergence.main(arguments, STUDY)
