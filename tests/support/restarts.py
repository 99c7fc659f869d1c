"""Runs whose ranks are killed at moments that a seed chooses, and which torchrun's engine starts again."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from tests.support.torchrun import on_ranks

TIMED = "at any time"
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
# what is called at that moment; by which rank alone; up to how often before
PLACES: dict[str, tuple[str, int | None, int]] = {
    "in a forward": ("octavo.train.trainer:Trainer.loss", None, 6),
    "in a gather": (f"{FSDP2}:foreach_all_gather", None, 12),
    "in a reduction of gradients": (f"{FSDP2}:foreach_reduce", None, 8),
    "in an update": ("octavo.optim:AdamW.step", None, 6),
    "as tensors are written": ("torch:save", None, 150),
    "before the metadata": ("octavo.distributed.checkpoint:Writer.finish", 0, 2),
    "before it is published": ("octavo.distributed.checkpoint:_publish", 0, 2),
    "as an older one is removed": ("shutil:rmtree", 0, 1),
    "as it is loaded": ("octavo.distributed.checkpoint:MetadataReader.read_data", None, 1),
    TIMED: ("", None, 0),
}
KILLED = "killed"  # a line for each kill, in the folder of all


def _die(folder: Path, text: str) -> None:
    with open(folder / KILLED, "a") as file:
        file.write(f"{text}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in(place: str, die: Callable[[], None], chosen: random.Random) -> None:
    """Let this process die at a place, or after some time."""
    target, _, most = PLACES[place]
    nth, before, seconds = chosen.randrange(max(most, 1)), chosen.random() < 0.5, chosen.uniform(0, 2)
    if place == TIMED:
        threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()
        return
    calls, function = itertools.count(), resolve_name(target)

    def called(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == nth
        if now and before:
            die()
        found = function(*args, **kwargs)
        if now:
            die()
        return found

    mock.patch(target.replace(":", "."), called).start()


def _rank(folder: Path, arguments: list[str], seed: int, kills: int, places: list[str]) -> None:
    from octavo import cli
    from octavo.train import report

    report.find_spec = lambda name: None  # it takes seconds to import what plots
    start, rank, ranks = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    chosen = random.Random(f"{seed} {start}")
    place = places[start % len(places)]
    alone, victim = PLACES[place][1], chosen.randrange(ranks)
    if start < kills and rank == (victim if alone is None else alone):
        _die_in(place, partial(_die, folder, f"start {start}, rank {rank}, {place}"), chosen)
    if (code := cli.main(arguments)) != 0:
        os._exit(code)  # as the command does


def train_through_kills(
    folder: Path, ranks: int, arguments: list[str], kills: int, seed: int = 0, places: list[str] | None = None
) -> list[str]:
    """Run `octavo train` on ranks that are started again after each kill, and return where they were killed."""
    chosen = places or random.Random(seed).sample([*PLACES], len(PLACES))
    on_ranks(_rank, folder, arguments, seed, kills, chosen, ranks=ranks, restarts=kills)
    return (folder / KILLED).read_text().splitlines() if kills else []
