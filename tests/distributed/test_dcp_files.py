import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from octavo.distributed.dcp_files import METADATA, Reader, TensorPlanner, Writer
from octavo.distributed.ranks import CheckpointError


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_tensors_come_back_and_nothing_else_does(tmp_path):
    options = {"no_dist": True}
    dcp.save({"w": torch.arange(6.0), "text": "a"}, storage_writer=Writer(tmp_path), **options)
    found = {"w": torch.zeros(6)}
    dcp.load(found, storage_reader=Reader(str(tmp_path)), planner=TensorPlanner(), **options)
    assert found["w"].tolist() == list(range(6))
    with pytest.raises(BaseException, match="is no tensor in this checkpoint"):
        dcp.load({"text": "b"}, storage_reader=Reader(str(tmp_path)), planner=TensorPlanner(), **options)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_metadata_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="mkdir, which no checkpoint needs"):
        Reader(str(tmp_path))
    assert not (tmp_path / "evil").exists()
