"""What torch.distributed.checkpoint (DCP) writes and reads, without code to run and with the cause of what fails."""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from octavo.distributed.errors import CheckpointError
from octavo.errors import first_line

METADATA = ".metadata"  # DCP's name


def reason_of(error: BaseException) -> str:
    """One line; of what hides an OSError, that one's."""
    # torch's zip writer hides the cause behind a RuntimeError about its file position
    cause = error if isinstance(error, OSError) else error.__context__
    return cause.strerror or first_line(cause) if isinstance(cause, OSError) else first_line(error)


class Writer(dcp.FileSystemWriter):
    """Says why it failed: what travels to other ranks has lost its cause."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise CheckpointError(reason_of(error)) from error


class _Unpickler(pickle.Unpickler):
    """Knows what DCP's metadata is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.partition(".")[0] == "torch" else None
        if module.partition(".")[0] == "pathlib":
            return PurePath
        known = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if known and isinstance(found, type) and found.__module__ == module:
            return found
        if isinstance(found, torch.dtype) or (module, name) in _KNOWN:
            return found
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs")


_KNOWN = {("torch", "Size"), ("torch.serialization", "_get_layout")}


class Reader(dcp.FileSystemReader):
    """Reads the metadata by that unpickler, at once."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        path = Path(folder) / METADATA
        try:
            with open(path, "rb") as file:
                self._metadata = _Unpickler(file).load()
            self._metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # whatever a damaged file makes pickle raise
            raise CheckpointError(f"{path} is damaged ({reason_of(error)}): load another checkpoint") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._metadata


class TensorPlanner(dcp.DefaultLoadPlanner):
    """Reads tensors only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor in this checkpoint: it was not saved by octavo")
