import io
import math
import sys

import pytest
import torch

from octavo.train import DataConfig, DivergedError, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from octavo.train.checkpoint import StepRow
from octavo.train.progress import Bar, Lines, Progress, RunRecorder, choose_progress, clock, in_words

CONFIG = TrainConfig(
    ModelConfig(context=16), DataConfig(batch=4, eval_windows=6), OptimizerConfig(steps=30), RunConfig(eval_every=10)
)


def test_a_loss_that_runs_away_is_divergence():
    recorder = RunRecorder(CONFIG, [], on_accelerator=False)
    with pytest.raises(DivergedError, match=r"ran away, to 20.0 nats a byte at step 20"):
        for step in range(30):
            recorder.add(step + 1, torch.tensor(20.0), torch.tensor(1.0), 1e-3)
            recorder.read()


def test_losses_are_read_in_groups_on_an_accelerator():
    recorder = RunRecorder(CONFIG, [], on_accelerator=True)
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
    rows = [StepRow(step + 1, 1.0, 1e-3, 128.0 if step % 2 else 64.0) for step in range(10)]
    recorder = RunRecorder(CONFIG, [], on_accelerator=False)
    recorder.rows += [rows[0], *rows]  # not the first
    pace = (0.5 + 1.0) / 2
    assert recorder.seconds_left(20) == pytest.approx(20 * (pace + 2 * pace / 3 / 10))  # of two batches, every 10 steps
    recorder.validated(1.0, seconds=5.0)
    assert recorder.seconds_left(20) == pytest.approx(20 * pace + 2 * 5.0)


def test_a_runs_first_step_says_little_of_the_others():
    recorder = RunRecorder(CONFIG, [], on_accelerator=False)
    for step, speed in enumerate((6.4, 64.0, 64.0)):
        recorder.rows.append(StepRow(step + 1, 1.0, 1e-3, speed))
        expected = 64 / speed
        assert recorder.seconds_left(10) == pytest.approx(10 * expected * (1 + 2 / 3 / 10))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (-1, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1, "5 s"), (42, "40 s"), (56, "1 min"), (170, "3 min"), (9000, "2.5 h")]
)
def test_in_words(seconds, text):
    assert in_words(seconds) == text


def test_lines_come_now_and_then_and_for_each_validation():
    stream = io.StringIO()
    lines = Lines(stream, interval=1e9)
    lines.begin("dynamic", 0, 10)
    for step in range(1, 11):
        lines.update(StepRow(step, 2.5, 1e-3, 12345.6, 3.25 if step == 4 else float("nan")), seconds_left=75)
    lines.end()
    assert stream.getvalue().splitlines() == [
        "dynamic  step 4/10  loss 2.5000  validation 3.2500  12,346 tokens/s  1:15 left",
        "dynamic  step 10/10  loss 2.5000  12,346 tokens/s  1:15 left",
    ]
    eager = Lines(stream, interval=0)
    eager.begin("dynamic", 0, 10)
    eager.update(StepRow(1, 2.5, 1e-3, 1.0), 0)
    assert "step 1/10" in stream.getvalue()


def test_a_bar_shows_loss_speed_and_time_left(monkeypatch):
    pytest.importorskip("rich")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    bar = choose_progress()
    assert isinstance(bar, Bar)
    bar.message("before [brackets]")
    bar.begin("delayed", 3, 10)
    bar.update(StepRow(10, 2.5, 1e-3, 12345.6, 3.25), seconds_left=75)
    bar.end()
    bar.end()  # once more is harmless
    for part in ("before [brackets]", "delayed", "10/10", "loss 2.5000", "validation 3.2500", "12,346", "1:15 left"):
        assert part in stream.getvalue()


def test_lines_where_there_is_no_terminal_or_no_rich(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(choose_progress(), Lines)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("octavo.train.progress.find_spec", lambda name: None)
    assert isinstance(choose_progress(), Lines)


def test_progress_itself_says_nothing(capsys):
    silent = Progress()
    silent.begin("x", 0, 1)
    silent.update(StepRow(1, 1.0, 1.0, 1.0), 0)
    silent.message("x")
    silent.end()
    assert capsys.readouterr() == ("", "")
