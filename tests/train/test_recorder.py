import math

import pytest
import torch

from octavo.train import DataConfig, DivergedError, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from octavo.train.checkpoint import Row
from octavo.train.recorder import Recorder

CONFIG = TrainConfig(
    ModelConfig(context=16), DataConfig(batch=4, eval_windows=6), OptimizerConfig(steps=30), RunConfig(eval_every=10)
)


def test_a_loss_that_runs_away_is_divergence():
    recorder = Recorder(CONFIG, [], on_accelerator=False)
    with pytest.raises(DivergedError, match=r"ran away, to 20.0 nats a byte at step 20"):
        for step in range(30):
            recorder.add(step + 1, torch.tensor(20.0), torch.tensor(1.0), 1e-3)
            recorder.read()


def test_losses_are_read_in_groups_on_an_accelerator():
    recorder = Recorder(CONFIG, [], on_accelerator=True)
    assert recorder.every > 1
    for step in range(3):
        recorder.add(step + 1, torch.tensor(float(step)), torch.tensor(1.0), 1e-3)
    assert recorder.rows == []
    assert [row.loss for row in recorder.read()] == [0.0, 1.0, 2.0] == [row.loss for row in recorder.rows]
    assert recorder.read() == []
    assert recorder.validated(1.5, 0.1) is recorder.rows[-1] and recorder.rows[-1].val_loss == 1.5
    with pytest.raises(DivergedError, match="validation loss became nan"):
        recorder.validated(math.nan, 0.1)


def test_time_left_follows_the_speed_and_counts_validations():
    rows = [Row(step + 1, 1.0, 1e-3, 128.0 if step % 2 else 64.0) for step in range(10)]
    recorder = Recorder(CONFIG, [], on_accelerator=False)
    recorder.rows += [rows[0], *rows]  # not the first
    pace = (0.5 + 1.0) / 2
    assert recorder.seconds_left(20) == pytest.approx(20 * (pace + 2 * pace / 3 / 10))  # of two batches, every 10 steps
    recorder.validated(1.0, seconds=5.0)
    assert recorder.seconds_left(20) == pytest.approx(20 * pace + 2 * 5.0)


def test_a_runs_first_step_says_little_of_the_others():
    recorder = Recorder(CONFIG, [], on_accelerator=False)
    for step, speed in enumerate((6.4, 64.0, 64.0)):
        recorder.rows.append(Row(step + 1, 1.0, 1e-3, speed))
        expected = 64 / speed
        assert recorder.seconds_left(10) == pytest.approx(10 * expected * (1 + 2 / 3 / 10))
