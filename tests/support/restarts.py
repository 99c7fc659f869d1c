"""Runs that torchrun's engine starts again, whose ranks are killed at moments that a seed chooses.

torchrun gives its agent a program, and each start takes seconds of imports; here the agent gets a function, and ranks
are forked from its process, which is forked from one that has imported octavo.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.pool import prepare

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
    module, _, names = target.partition(":")
    *owners, name = names.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    calls, function = itertools.count(), getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == nth
        if now and before:
            die()
        found = function(*args, **kwargs)
        if now:
            die()
        return found

    setattr(owner, name, called)


def _rank(folder: Path, arguments: list[str], seed: int, kills: int, places: list[str]) -> None:
    import torch

    from octavo import cli
    from octavo.train import report

    torch.set_num_threads(1)
    report.find_spec = lambda name: None  # it takes seconds to import what plots
    start, rank, ranks = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    chosen = random.Random(f"{seed} {start}")
    place = places[start % len(places)]
    alone, victim = PLACES[place][1], chosen.randrange(ranks)
    if start < kills and rank == (victim if alone is None else alone):
        _die_in(place, partial(_die, folder, f"start {start}, rank {rank}, {place}"), chosen)
    if (code := cli.main(arguments)) != 0:
        os._exit(code)  # as the command does


def _launch(folder: Path, ranks: int, kills: int, *given: Any) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    (folder / "logs").mkdir(parents=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=kills,
        monitor_interval=0.02,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(str(folder / "logs"), redirects=Std.ALL),
    )
    elastic_launch(config, _rank)(folder, *given)
    sys.exit(0)


def train_through_kills(
    folder: Path, ranks: int, arguments: list[str], kills: int, seed: int = 0, places: list[str] | None = None
) -> list[str]:
    """Run `octavo train` on ranks that are started again after each kill, and return where they were killed.

    Raises:
        AssertionError: the run did not end well; with what its ranks wrote last.
    """
    chosen = places or random.Random(seed).sample([*PLACES], len(PLACES))
    process = prepare().Process(target=_launch, args=(folder, ranks, kills, arguments, seed, kills, chosen))
    process.start()
    process.join(1800)
    process.kill()
    told = [f"{path}: {path.read_text()[-2000:]}" for path in sorted(folder.rglob("std*.log"))[-2 * ranks :]]
    assert process.exitcode == 0, "\n".join(told)
    return (folder / KILLED).read_text().splitlines() if kills else []
