import errno
import fcntl
import math
import os
import signal
import subprocess
import sys
from dataclasses import astuple

import pytest
import torch
from torch import nn

import octavo
from octavo.distributed import checkpoint
from octavo.distributed.ranks import Ranks
from octavo.train import RunCheckpointError
from octavo.train.checkpoint import HEADER, LOCK, RunFolder, StepRow, locked

ROWS = [StepRow(1, 5.5, 1e-3, 1000.0), StepRow(2, 1 / 3, 2e-3, 2000.0, 4.25)]
IDENTITY = {"width": 32, "recipe": "dynamic"}


def content(identity=IDENTITY, rows=ROWS, **parts):
    return {"step": len(rows), "identity": identity, "rows": [astuple(row) for row in rows], **parts}


@pytest.fixture
def parts():
    """A model and its optimizer after a step."""
    model = octavo.nn.Linear(4, 4, recipe=octavo.recipes.delayed())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.open(resume=False)
    return folder


def everything(model, optimizer):
    moments = {f"{i}.{key}": value for i, state in enumerate(optimizer.state.values()) for key, value in state.items()}
    tensors = model.state_dict() | moments | octavo.nn.delayed_state_dict(model)
    return {name: value.clone() for name, value in tensors.items()}


def test_what_was_saved_comes_back_exactly(parts, folder):
    assert folder.load(IDENTITY) is None
    folder.save(*parts, content(schedule={"phase": 1}))
    before = everything(*parts)
    again = RunFolder(folder.path)
    state = again.load(IDENTITY)
    assert again.saved_step == state["step"] == 2 and state["identity"] == IDENTITY
    assert state["schedule"] == {"phase": 1} and not state.get("in_backward")
    assert [row.csv() for row in state["rows"]] == [row.csv() for row in ROWS] and state["rows"][1].loss == 1 / 3
    assert {*folder.path.iterdir()} == {folder.checkpoint, folder.path / LOCK}
    parts[0](torch.ones(2, 4)).sum().backward()
    parts[1].step()
    again.fill(*parts)
    after = everything(*parts)
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_log_is_written_as_it_goes_and_cut_to_its_start(folder):
    folder.start_log(ROWS[:1])
    folder.append(ROWS[1:])
    assert folder.log.read_text() == HEADER + "1,5.5,0.001,1000.0,\n" + "2,0.3333333333333333,0.002,2000.0,4.25\n"
    folder.start_log(ROWS[:1])
    assert folder.log.read_text().count("\n") == 2
    assert math.isnan(ROWS[0].val_loss)


def test_a_folder_with_a_run_is_only_opened_to_resume(folder):
    folder.start_log([])
    with pytest.raises(RunCheckpointError, match="already holds a run: add --resume"):
        RunFolder(folder.path).open(resume=False)
    leftover = folder.path / "log.csv.12345678.partial"
    leftover.touch()  # by a run that was killed
    with RunFolder(folder.path).open(resume=True):
        for resume in (True, False):
            with pytest.raises(RunCheckpointError, match=f"another run trains in .*process {os.getpid()} on .*wait"):
                RunFolder(folder.path).open(resume)
    with RunFolder(folder.path).open(resume=True):
        assert not leftover.exists()
    assert RunFolder(folder.path).load(IDENTITY) is None
    assert {*folder.path.iterdir()} == {folder.log, folder.path / LOCK}


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(RunCheckpointError, match="cannot write to"):
        RunFolder(tmp_path / "file").open(resume=False)
    with pytest.raises(RunCheckpointError, match="cannot write to"):
        RunFolder(tmp_path / "file" / "run").open(resume=False)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("octavo.train.checkpoint.locked", refuse)  # root may write anywhere
    with pytest.raises(RunCheckpointError, match="Permission denied; give a folder"):
        RunFolder(tmp_path / "other").open(resume=False)


def test_a_full_disk_keeps_the_checkpoint_before(folder, parts, monkeypatch):
    folder.save(*parts, content())
    fails = pytest.raises(RunCheckpointError, match=r"cannot write .*Full.*kept \(step 2\); add --resume")
    with monkeypatch.context() as patch, fails:
        patch.setattr(checkpoint, "_publish", lambda *args: (_ for _ in ()).throw(OSError(28, "Full")))
        folder.save(*parts, content(rows=[*ROWS, ROWS[0]]))
    assert folder.load(IDENTITY)["step"] == 2
    assert {*folder.path.iterdir()} == {folder.checkpoint, folder.path / LOCK}


@pytest.mark.parametrize("part", ["step", "rows", "identity"])
def test_a_checkpoint_without_a_part_is_another_programs(folder, parts, part):
    checkpoint.save_checkpoint(folder.checkpoint, parts[0], extra={k: v for k, v in content().items() if k != part})
    with pytest.raises(RunCheckpointError, match=f"is damaged or not a checkpoint of octavo: .*'{part}'"):
        folder.load(None)
    checkpoint.save_checkpoint(folder.checkpoint, parts[0], extra=3)
    with pytest.raises(RunCheckpointError, match="is damaged or not a checkpoint of octavo: move it away"):
        folder.load(None)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"junk" * 99])
def test_a_damaged_checkpoint_is_said_so_and_left_alone(folder, parts, damage):
    folder.save(*parts, content())
    (file,) = folder.checkpoint.glob("*/octavo.pt")
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    with pytest.raises(RunCheckpointError, match="is damaged or not a checkpoint of octavo: move it away"):
        folder.load(IDENTITY)
    assert file.read_bytes() == damaged


def test_another_runs_checkpoint_and_another_models(folder, parts):
    folder.save(*parts, content())
    with pytest.raises(RunCheckpointError, match="has width 32, not 64: resume it with the same options"):
        folder.load(IDENTITY | {"width": 64})
    with pytest.raises(RunCheckpointError, match="cannot read the checkpoint"):
        folder.fill(nn.Linear(4, 5), None)


def test_options_that_only_one_of_two_runs_names_are_compared_with_the_defaults(folder, parts):
    identity = IDENTITY | {"master": "split24"}
    folder.save(*parts, content(identity))
    assert folder.load(identity | {"moments": "fp32"})["step"] == 2
    assert folder.load(None)["step"] == 2
    with pytest.raises(RunCheckpointError, match="has master split24, not auto"):
        folder.load(IDENTITY)
    with pytest.raises(RunCheckpointError, match="has moments fp32, not fp8"):
        folder.load(identity | {"moments": "fp8"})


def test_what_fails_in_the_background_is_said_by_the_next_save_or_at_the_end(folder, parts, monkeypatch):
    monkeypatch.setattr(folder, "_background", Ranks())
    folder.save(*parts, content())
    folder.finish()
    later = content(rows=[*ROWS, ROWS[0]])
    for report in (lambda: folder.save(*parts, later), folder.finish):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_publish", lambda *args: (_ for _ in ()).throw(OSError(28, "Full")))
            folder.save(*parts, later)
            with pytest.raises(RunCheckpointError, match=r"cannot write .*Full.*kept \(step 2\)"):
                report()
        folder.finish()  # nothing is left to say
        assert folder.saved_step == folder.load(IDENTITY)["step"] == 2
        assert len(list(folder.checkpoint.iterdir())) == 1


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "lock"
    with pytest.warns(UserWarning, match=r"lock: No locks available: make sure that nothing else writes"), locked(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")


def test_a_lock_is_one_process_s_until_it_ends_however(tmp_path):
    path = tmp_path / "lock"
    code = "import fcntl, os, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
    code += "file.write(f'process {os.getpid()} on a host'); file.flush(); print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert holder.stdout.readline() == b"\n"
    with pytest.raises(BlockingIOError, match=f"process {holder.pid} on a host"), locked(path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with locked(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
