import errno
import math
import os

import pytest
import torch

from octavo.train import CheckpointError
from octavo.train.checkpoint import HEADER, Row, RunFolder, State, replace_file, rows_from_tensor, rows_to_tensor

ROWS = [Row(1, 5.5, 1e-3, 1000.0), Row(2, 1 / 3, 2e-3, 2000.0, 4.25)]
IDENTITY = {"width": 32, "recipe": "dynamic"}


def make_state(step=2):
    return State(
        step=step,
        model={"w": torch.full((4,), float(step))},
        optimizer={"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        delayed={"scale": torch.ones(3)},
        identity=dict(IDENTITY),
        rows=list(ROWS),
    )


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.open(resume=False)
    yield folder
    folder.close()


def same_rows(first, second):
    return [row.csv() for row in first] == [row.csv() for row in second]


def test_a_state_comes_back_exactly(folder):
    folder.save(make_state())
    state = RunFolder(folder.path).load(IDENTITY)
    assert state.step == 2 and state.identity == IDENTITY
    assert torch.equal(state.model["w"], make_state().model["w"])
    assert state.optimizer == make_state().optimizer
    assert same_rows(state.rows, ROWS) and state.rows[1].loss == 1 / 3
    assert [path.name for path in folder.path.iterdir()] == ["checkpoint.pt"]


def test_rows_survive_as_tensors():
    assert same_rows(rows_from_tensor(rows_to_tensor(ROWS)), ROWS)
    assert rows_from_tensor(rows_to_tensor([])) == []


def test_log_is_written_as_it_goes_and_cut_to_its_start(folder):
    folder.start_log(ROWS[:1])
    folder.append(ROWS[1:])
    assert folder.log.read_text() == HEADER + "1,5.5,0.001,1000.0,\n" + "2,0.3333333333333333,0.002,2000.0,4.25\n"
    folder.start_log(ROWS[:1])
    assert folder.log.read_text().count("\n") == 2
    assert math.isnan(ROWS[0].val_loss)


def test_a_folder_with_a_run_is_only_opened_to_resume(folder):
    folder.start_log([])
    with pytest.raises(CheckpointError, match="already holds a run: add --resume"):
        RunFolder(folder.path).open(resume=False)
    RunFolder(folder.path).open(resume=True)
    assert RunFolder(folder.path).load(IDENTITY) is None


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write to"):
        RunFolder(tmp_path / "file").open(resume=False)
    with pytest.raises(CheckpointError, match="cannot write to"):
        RunFolder(tmp_path / "file" / "run").open(resume=False)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("octavo.train.checkpoint.replace_file", refuse)  # root may write anywhere
    with pytest.raises(CheckpointError, match="Permission denied; give a folder"):
        RunFolder(tmp_path / "other").open(resume=False)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("failed writing")])
def test_a_full_disk_keeps_the_checkpoint_before(folder, monkeypatch, error):
    folder.save(make_state(2))

    def write_half(content, file):
        file.write(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", write_half)
        with pytest.raises(CheckpointError, match=r"cannot write .*; step 2 is kept; make room"):
            folder.save(make_state(3))
    assert folder.load(IDENTITY).step == 2
    assert [path.name for path in folder.path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_a_log_on_a_full_disk(folder):
    folder.start_log([])
    folder._log.close()
    folder._log = open("/dev/full", "ab", buffering=0)
    with pytest.raises(CheckpointError, match=r"No space left on device; no checkpoint was written yet"):
        folder.append(ROWS)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"junk" * 99])
def test_a_damaged_checkpoint_is_said_so_and_left_alone(folder, damage):
    folder.save(make_state())
    damaged = damage(folder.checkpoint.read_bytes())
    folder.checkpoint.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="is damaged or not a checkpoint of octavo: move it away"):
        folder.load(IDENTITY)
    assert folder.checkpoint.read_bytes() == damaged


@pytest.mark.parametrize("content", [{}, [1, 2], {"octavo_checkpoint": 99}, {"octavo_checkpoint": 1, "step": 3}])
def test_another_programs_checkpoint(folder, content):
    torch.save(content, folder.checkpoint)
    with pytest.raises(CheckpointError, match="not a checkpoint of octavo"):
        folder.load(IDENTITY)


def test_another_runs_checkpoint(folder):
    folder.save(make_state())
    with pytest.raises(CheckpointError, match="has width 32, not 64: resume it with the same options"):
        folder.load(IDENTITY | {"width": 64})


def test_options_that_only_one_of_two_runs_names_are_compared_with_the_defaults(folder):
    state = make_state()
    state.identity["master"] = "split24"
    folder.save(state)
    assert folder.load(IDENTITY | {"master": "split24", "moments": "fp32"}).step == 2
    assert folder.load(None).step == 2
    with pytest.raises(CheckpointError, match="has master split24, not auto"):
        folder.load(IDENTITY)
    with pytest.raises(CheckpointError, match="has moments fp32, not fp8"):
        folder.load(state.identity | {"moments": "fp8"})


def test_a_file_is_replaced_or_left(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_file(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
