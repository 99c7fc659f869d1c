"""The trainer behind the CLI: a byte-level GPT, trained the same way with any recipe."""

from octavo.train.config import (
    BASELINE,
    RECIPES,
    DataConfig,
    DivergedError,
    InspectConfig,
    ModelConfig,
    OptimizerConfig,
    RanksConfig,
    RunCheckpointError,
    RunConfig,
    StateConfig,
    TrainConfig,
    TrainError,
)
from octavo.train.data import Batches, Corpus, load_corpus
from octavo.train.loop import Hooks, RunResult, compare, run
from octavo.train.model import GPT, next_byte_loss

__all__ = ["BASELINE", "RECIPES", "ModelConfig", "DataConfig", "OptimizerConfig", "RunConfig", "StateConfig"]
__all__ += ["RanksConfig", "InspectConfig", "TrainConfig", "Corpus", "Batches", "load_corpus", "GPT", "next_byte_loss"]
__all__ += ["Hooks", "RunResult", "run", "compare", "TrainError", "RunCheckpointError", "DivergedError"]
