"""A tiny training by `octavo train`, signals in one of its steps, and the line of a fault."""

import itertools
import os

from octavo import cli
from octavo.train.trainer import Trainer

TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(400))
TINY = "--width 16 --layers 1 --heads 2 --context 16 --batch 2 --steps 6 --eval-windows 2 --device cpu".split()


def train(*arguments):
    return cli.main(["train", *TINY, "--data", "text.py", *arguments])


def signals_in_step(monkeypatch, number, *stops):
    """Sends signals to this process within the step of this number, counted from 0 over all runs."""
    step, count = Trainer.step, itertools.count()

    def send(trainer, index):
        result = step(trainer, index)
        for stop in stops if next(count) == number else ():
            os.kill(os.getpid(), stop)
        return result

    monkeypatch.setattr(Trainer, "step", send)


def one_line(capsys):
    """Return the one line of a fault."""
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 1 and lines[0].startswith("octavo: error: "), (out, err)
    return lines[0]
