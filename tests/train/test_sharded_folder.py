import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from octavo.distributed import checkpoint
from octavo.distributed.ranks import Ranks
from octavo.tensor.stored_weight import StoredWeight
from octavo.train import CheckpointError, run
from octavo.train.checkpoint import HEADER, Row
from octavo.train.config import StateConfig
from octavo.train.sharded_folder import ShardedFolder
from octavo.train.trained import trained_model
from tests.support.sharded_runs import changed, curve, nearly, train_on

ROWS = [Row(1, 5.5, 1e-3, 1000.0), Row(2, 1 / 3, 2e-3, 2000.0, 4.25)]
IDENTITY = {"width": 4, "recipe": "dynamic"}


@pytest.fixture
def parts():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path):
    folder = ShardedFolder(tmp_path / "deep" / "run", Ranks())
    folder.open(resume=False)
    yield folder
    folder.close()


def test_what_was_saved_comes_back(folder, parts):
    assert folder.load(IDENTITY) is None
    folder.save_parts(*parts, IDENTITY, ROWS)
    before = {name: value.clone() for name, value in parts[0].state_dict().items()}
    again = ShardedFolder(folder.path, Ranks())
    state = again.load(IDENTITY)
    assert state.step == again.saved_step == 2 and [row.csv() for row in state.rows] == [row.csv() for row in ROWS]
    nn.init.zeros_(parts[0].weight)
    again.load_parts(*parts)
    assert all(torch.equal(value, before[name]) for name, value in parts[0].state_dict().items())


def test_the_log_is_a_run_folders(folder):
    folder.start_log(ROWS[:1])
    folder.append(ROWS[1:])
    assert folder.log.read_text() == HEADER + "".join(row.csv() for row in ROWS)
    with pytest.raises(CheckpointError, match="already holds a run"):
        ShardedFolder(folder.path, Ranks()).open(resume=False)


def test_another_run_another_kind_and_damage(folder, parts, tmp_path):
    folder.save_parts(*parts, IDENTITY, ROWS)
    with pytest.raises(CheckpointError, match="has width 4, not 8"):
        folder.load({"width": 8})
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        folder.load_parts(nn.Linear(4, 5), None)
    checkpoint.save_checkpoint(folder.checkpoint, parts[0], extra=3)
    with pytest.raises(CheckpointError, match="to start this run again"):
        folder.load(IDENTITY)
    (folder.path / "checkpoint.pt").touch()
    with pytest.raises(CheckpointError, match="trained by one process: resume it without --shard"):
        folder.load(IDENTITY)


def test_a_full_disk_keeps_the_checkpoint_before(folder, parts, monkeypatch):
    folder.save_parts(*parts, IDENTITY, ROWS)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"cannot write .*Full.*kept \(step 2\)"):
        patch.setattr(checkpoint, "_finish", lambda *args: (_ for _ in ()).throw(OSError(28, "Full")))
        folder.save_parts(*parts, IDENTITY, [*ROWS, ROWS[0]])
    assert folder.load(IDENTITY).step == 2


PHASES = {"schedule": "fp8-then-bf16@0.3-then-fp8@0.6"}  # the run is stopped in the second


OPTIONS = {"after": {}, "in backward": {"update_in_backward": "4KB"}, "phases": PHASES}


@pytest.mark.parametrize("how", [pytest.param("after", marks=pytest.mark.full), "in backward", "phases"])
def test_a_run_whose_weights_live_in_fp8(pool, config, how, tmp_path):
    """Sharded: stopped and gone on with on as many ranks, exactly, and on another number; read by one process."""
    state = StateConfig("fp8", "split16", "fp8", **OPTIONS[how])
    config = replace(changed(config, optimizer={"steps": 6}, model={"layers": 1}), state=state)
    alone = curve(run(config, "delayed"))
    config = changed(config, ranks={"shard": "fsdp"}, run={"out": tmp_path / "whole"})
    ((whole, *_), *_) = pool.run(train_on, (2,), config, "delayed", seconds=100)
    assert nearly(whole, alone, 0.05) and len(whole) == 6
    config = changed(config, run={"out": tmp_path / "parts"})
    pool.run(train_on, (2,), config, "delayed", 3, seconds=100)
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    config = changed(config, run={"resume": True})
    for again, interrupted, _ in pool.run(train_on, (2,), config, "delayed", seconds=100):
        assert not interrupted and again == whole
    config = changed(config, run={"out": tmp_path / "other"})
    for again, interrupted, _ in pool.run(train_on, (1,), config, "delayed", seconds=100):
        assert not interrupted and again[:3] == whole[:3] and nearly(again, whole, 0.05)
    model = trained_model(tmp_path / "other" / "delayed")
    assert isinstance(model.blocks[0].mlp.fc2.weight, StoredWeight)
    assert model(torch.zeros(1, 4, dtype=torch.uint8)).isfinite().all()
