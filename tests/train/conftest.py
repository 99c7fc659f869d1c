from pathlib import Path

import pytest

from octavo.train import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}  # café\n\n" for i in range(400))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def config(text_file: Path) -> TrainConfig:
    """A run of 20 steps that takes a fraction of a second."""
    return TrainConfig(
        ModelConfig(width=32, layers=1, heads=2, context=16),
        DataConfig(data=text_file, batch=4, eval_windows=6),
        OptimizerConfig(steps=20, lr=1e-2),
        RunConfig(device="cpu", dtype="bfloat16", eval_every=5, checkpoint_every=0),
    )
