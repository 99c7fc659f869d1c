"""Runs whose ranks are killed and started again by torchrun's engine are the unbroken run, bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from octavo.distributed.checkpoint import checkpoints_in
from tests.support.restarts import PLACES, train_through_kills
from tests.train.test_shard import ROOT, environment, rows, wait_for

TINY = "--width 16 --layers 1 --heads 2 --context 16 --eval-windows 4 --eval-every 9 --device cpu --timeout 20".split()
STORED = "--shard fsdp --recipe delayed --weight-storage fp8 --moments fp8 --master split16".split()


def trained(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """A run's loss curve, by its log and by its checkpoint; bits of its weights, optimizer and ranks' delayed state."""
    log = [line.split(",")[:3] + line.split(",")[4:] for line in (folder / "log.csv").read_text().splitlines()]
    last = checkpoints_in(folder / "checkpoint")[0]
    dcp_to_torch_save(last, folder.parent / "whole.pt")
    found = torch.load(folder.parent / "whole.pt", weights_only=True)
    bits = {
        name: (value.dtype, value.contiguous().flatten().view(torch.uint8).tolist()) for name, value in found.items()
    }
    content = torch.load(last / "octavo.pt", weights_only=True)
    rows = [(step, loss, lr, str(val_loss)) for step, loss, lr, _, val_loss in content["extra"]["rows"]]
    assert len(bits) > 20
    return [str(log), str(rows), str(content["groups"]), str(content["delayed"]["ranks"].tolist())], bits


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "kills", "more"), [(2, 3, ["--async-save"]), (4, 20, []), (4, 20, ["--async-save"])], ids=str
)
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
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "config.json", "log.csv"]


@pytest.mark.full
def test_the_commands_of_the_page(tmp_path):
    """Word for word, but for the folder."""
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "many-gpus.md").read_text(), re.DOTALL)[:2]
    begin, kill = (command.replace("runs/many-gpus", str(tmp_path / "run")) for command in commands)
    env = environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = {"env": env, "cwd": tmp_path, "text": True}
    with subprocess.Popen(
        ["bash", "-c", f"exec {begin}"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, **shell
    ) as run:
        try:
            wait_for(tmp_path / "run" / "delayed", 12, SimpleNamespace(processes=[run]))
            subprocess.run(["bash"], input=kill, check=True, **shell)
            _, err = run.communicate(timeout=500)
        finally:
            run.terminate()
    assert run.returncode == 0 and err.count("delayed: 60 steps") == 2 and "another rank ended" in err, err
    assert rows(tmp_path / "run" / "delayed")[0] == 60
    assert len(list((tmp_path / "run" / "delayed" / "checkpoint").iterdir())) == 3
