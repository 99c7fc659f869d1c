"""Runs whose ranks are killed and started again by torchrun's engine are the unbroken run, bit for bit."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from octavo.distributed.checkpoint import checkpoints_in
from tests.support.torchrun import on_ranks
from tests.train.test_shard import ROOT, environment, rows, wait_for

TINY = "--width 16 --layers 1 --heads 2 --context 16 --eval-windows 4 --eval-every 9 --device cpu --timeout 20".split()
STORED = "--shard fsdp --recipe delayed --weight-storage fp8 --moments fp8 --master split16".split()


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
        result = function(*args, **kwargs)
        if now:
            die()
        return result

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


def trained(folder: Path) -> tuple[str, dict[str, Any]]:
    """A run's loss curve, by its log and by its checkpoint; bits of its weights, optimizer and ranks' delayed state."""
    last = checkpoints_in(folder / "checkpoint")[0]
    dcp_to_torch_save(last, folder.parent / "whole.pt")
    state = torch.load(folder.parent / "whole.pt", weights_only=True)
    bits = {name: (x.dtype, x.contiguous().flatten().view(torch.uint8).tolist()) for name, x in state.items()}
    content = torch.load(last / "octavo.pt", weights_only=True)
    of_checkpoint = [(step, loss, lr, str(val_loss)) for step, loss, lr, _, val_loss in content["extra"]["rows"]]
    assert len(bits) > 20
    return str((rows(folder), of_checkpoint, content["groups"], content["delayed"]["ranks"].tolist())), bits


LATER = ["--async-save"]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "kills", "more"), [(2, 3, LATER), (4, 20, []), (4, 20, LATER)], ids=str)
def test_a_run_whose_ranks_are_killed_is_the_unbroken_one(ranks, kills, more, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(400)))
    steps = str(6 + 4 * kills)
    run = ["train", *TINY, *STORED, *more, "--batch", str(ranks), "--data", str(text), "--steps", steps]
    run += ["--checkpoint-every", "2", "--keep", "2", "--resume", "auto", "--out"]
    places = ["as tensors are written", "in a gather", "before it is published"] if kills < len(PLACES) else None
    train_through_kills(tmp_path / "w", ranks, [*run, str(tmp_path / "whole")], 0)
    killed = train_through_kills(tmp_path / "k", ranks, [*run, str(tmp_path / "parts")], kills, places=places)
    assert len(killed) == kills, killed
    whole, parts = (tmp_path / name / "delayed" for name in ("whole", "parts"))
    assert trained(parts) == trained(whole)
    for folder in (whole, parts):
        assert len(list((folder / "checkpoint").iterdir())) == 2
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "checkpoint", "config.json", "log.csv"]


@pytest.mark.full
def test_the_commands_of_the_page(tmp_path):
    """Word for word, but for the folder."""
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "many-gpus.md").read_text(), re.DOTALL)
    begin, kill = (it.replace("runs/many-gpus", str(tmp_path / "run")) for it in commands if "runs/many-gpus" in it)
    env = environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = {"env": env, "cwd": tmp_path, "text": True}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["bash", "-c", f"exec {begin}"], **pipes, **shell) as run:
        try:
            wait_for(tmp_path / "run" / "delayed", 12, SimpleNamespace(processes=[run]))
            subprocess.run(["bash"], input=kill, check=True, **shell)
            _, err = run.communicate(timeout=500)
        finally:
            run.terminate()
    assert run.returncode == 0 and err.count("delayed: 60 steps") == 2 and "another rank ended" in err, err
    assert rows(tmp_path / "run" / "delayed")[0] == 60
    assert len(list((tmp_path / "run" / "delayed" / "checkpoint").iterdir())) == 3
