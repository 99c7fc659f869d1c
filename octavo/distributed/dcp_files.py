"""What torch.distributed.checkpoint (DCP) writes and reads, without code to run and with the cause of what fails."""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from octavo.distributed.files import reason_of
from octavo.distributed.ranks import CheckpointError

METADATA = ".metadata"  # DCP's name


class Writer(dcp.FileSystemWriter):
    """Says why it failed: an error that travels to other ranks loses its cause."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise CheckpointError(reason_of(error)) from error


class _Unpickler(pickle.Unpickler):
    """Loads the classes that DCP's metadata is made of, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return PurePath
        found = super().find_class(module, name) if module.partition(".")[0] == "torch" else None
        known = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if known and isinstance(found, type) and found.__module__ == module:
            return found
        if isinstance(found, torch.dtype) or (module, name) in _KNOWN:
            return found
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs")


_KNOWN = {("torch", "Size"), ("torch.serialization", "_get_layout")}


class Reader(dcp.FileSystemReader):
    """Reads the metadata at once, by the unpickler above."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        path = Path(folder) / METADATA
        try:
            with open(path, "rb") as file:
                self._metadata = _Unpickler(file).load()
            self._metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # whatever a damaged file makes pickle raise
            raise CheckpointError(f"{path} is damaged ({reason_of(error)}): load another checkpoint") from error

    def size(self, name: str) -> torch.Size:
        """A saved tensor's; of anything else none."""
        return getattr(self._metadata.state_dict_metadata.get(name), "size", torch.Size())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._metadata


class TensorPlanner(dcp.DefaultLoadPlanner):
    """Reads tensors only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor in this checkpoint: it was not saved by octavo")
