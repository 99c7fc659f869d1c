import io
import math

import pytest
import torch

from octavo.train import DataConfig, DivergedError, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from octavo.train.checkpoint import StepRow
from octavo.train.progress import Progress, StepReader, in_words

CONFIG = TrainConfig(
    ModelConfig(context=16), DataConfig(batch=4, eval_windows=6), OptimizerConfig(steps=30), RunConfig(eval_every=10)
)


def test_a_loss_that_runs_away_is_divergence():
    reader = StepReader(CONFIG, [], on_accelerator=False)
    with pytest.raises(DivergedError, match=r"ran away, to 20.0 nats a byte at step 20"):
        for step in range(30):
            reader.add(step + 1, torch.tensor(20.0), torch.tensor(1.0), 1e-3)
            reader.read()


def test_losses_are_read_in_groups_on_an_accelerator():
    reader = StepReader(CONFIG, [], on_accelerator=True)
    assert reader.every > 1
    for step in range(3):
        reader.add(step + 1, torch.tensor(float(step)), torch.tensor(1.0), 1e-3)
    assert reader.rows == []
    assert [row.loss for row in reader.read()] == [0.0, 1.0, 2.0] == [row.loss for row in reader.rows]
    assert reader.read() == []
    assert reader.validated(1.5) is reader.rows[-1] and reader.rows[-1].val_loss == 1.5
    with pytest.raises(DivergedError, match="validation loss became nan"):
        reader.validated(math.nan)


def test_time_left_follows_the_pace_and_counts_validations_but_not_the_first_step(monkeypatch):
    times = iter([10.0, 20.0, 20.5, 20.5, 22.0, 22.0])
    monkeypatch.setattr("octavo.train.progress.time.perf_counter", lambda: next(times))
    reader = StepReader(CONFIG, [], on_accelerator=False)
    reader.restart_clock()
    for seconds_left in (60.0, 3.0, 6.0):  # a first step of 10 s, one of 0.5 s, and one of 1.5 s with a validation
        reader.add(len(reader.rows) + 1, torch.tensor(1.0), torch.tensor(1.0), 1e-3)
        reader.read()
        assert reader.seconds_left(6) == pytest.approx(seconds_left)


IN_WORDS = {0.1: "5 s", 42: "40 s", 56: "1 min", 170: "3 min", 9000: "2.5 h"}


@pytest.mark.parametrize(("seconds", "text"), IN_WORDS.items())
def test_in_words(seconds, text):
    assert in_words(seconds) == text


def test_lines_come_now_and_then_and_for_each_validation():
    stream = io.StringIO()
    lines = Progress(stream, interval=1e9)
    lines.begin("dynamic", 10)
    for step in range(1, 11):
        row = StepRow(step, 2.5, 1e-3, 12345.6, 3.25 if step == 4 else float("nan"))
        lines.update(row, seconds_left=75 if step < 10 else 0)
    validated, last = stream.getvalue().splitlines()
    assert validated == "dynamic  step 4/10  loss 2.5000  validation 3.2500  12,346 tokens/s  1 min left"
    assert last == "dynamic  step 10/10  loss 2.5000  12,346 tokens/s"
    eager = Progress(stream, interval=0)
    eager.begin("dynamic", 10)
    eager.update(StepRow(1, 2.5, 1e-3, 1.0), 0)
    assert "step 1/10" in stream.getvalue()
