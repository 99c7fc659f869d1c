"""Text as bytes: where it is read from, how it is split, and which windows of it each step reads.

The windows of a step depend on the run's seed, the step's number and the data only: so a resumed run continues exactly
where it stopped, and every recipe of a comparison reads the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.train.config import ModelConfig, TrainError

VALIDATION_SHARE = 0.1

# Folders of files that are not hand-written programs (tables, 2to3 fixtures), or not the library itself.
SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idlelib lib2to3 encodings pydoc_data turtledemo distutils ensurepip "
    "__pycache__ __phello__".split()
)


@dataclass(frozen=True)
class Corpus:
    """A text, of which the last tenth is for validation and all else for training."""

    train: Tensor  # [n] uint8
    validation: Tensor  # [m] uint8
    description: str  # where it came from, for people
    digest: str  # of the whole text

    @classmethod
    def of(cls, text: bytes | bytearray, description: str) -> Corpus:
        """Return the Corpus of a text."""
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else none
        split = len(text) - int(len(text) * VALIDATION_SHARE)
        return cls(whole[:split], whole[split:], description, hashlib.sha256(text).hexdigest())

    def require(self, model: ModelConfig) -> None:
        """Raise TrainError unless training and validation have at least one window each (context + 1 bytes)."""
        if min(len(self.train), len(self.validation)) > model.context:
            return
        needed = int((model.context + 1) / VALIDATION_SHARE) + 1
        size = len(self.train) + len(self.validation)
        raise TrainError(
            f"{self.description} is too small: {size} bytes, but context {model.context} needs {needed} "
            "(a tenth is for validation); give more text or a smaller --context"
        )


def load_corpus(data: Path | None = None) -> Corpus:
    """Return the text of a UTF-8 file, of a folder's text files but hidden ones, or of Python's standard library.

    Raise TrainError if the file or folder does not exist, is empty or has no text.
    """
    if data is None:
        return _load_folder(Path(sysconfig.get_paths()["stdlib"]), "Python's standard library", ".py", SKIPPED_FOLDERS)
    if data.is_dir():
        return _load_folder(data, str(data))
    if data.exists() and not data.is_file():
        raise TrainError(f"{data} is not a regular file: give a text file or a folder of text files")
    try:
        text = data.read_bytes()
    except OSError as error:
        raise TrainError(f"cannot read {data}: {error.strerror}") from error
    if not text:
        raise TrainError(f"{data} is empty: give a text file")
    if (fault := why_not_text(text)) is not None:
        raise TrainError(f"{data} is not text: {fault}; give UTF-8 text")
    return Corpus.of(text, str(data))


def why_not_text(text: bytes) -> str | None:
    """Return the first reason why these bytes are not UTF-8 text, or None."""
    if (position := text.find(b"\0")) >= 0:
        return f"NUL at byte {position}"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 near byte {error.start}"
    return None


def _load_folder(root: Path, corpus_name: str, suffix: str = "", skipped: Collection[str] = ()) -> Corpus:
    """Return the text files below root but hidden ones, in an order that depends only on their names."""
    pieces, left_out = [], []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        wanted = [Path(folder, name) for name in sorted(names) if not name.startswith(".") and name.endswith(suffix)]
        for path in filter(Path.is_file, wanted):
            try:
                text = path.read_bytes()
            except OSError:
                text = b"\0"
            if why_not_text(text) is not None:
                left_out.append(path)
            elif text:
                pieces.append(text)
    note = f", {len(left_out)} left out as not text, such as {left_out[0]}" if left_out else ""
    if not pieces:
        raise TrainError(f"no text in {root}{note}: give UTF-8 text files with --data")
    return Corpus.of(b"\n".join(pieces), f"{corpus_name} ({len(pieces)} files{note})")


@dataclass(frozen=True)
class Batches:
    """The windows of a corpus that a run reads, by seed and step: ``context`` bytes each (C), ``batch`` a step (B)."""

    corpus: Corpus
    context: int
    batch: int
    seed: int

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, each [B, C] uint8; targets are the inputs one byte later."""
        # torch's CPU generator keeps 32 bits of its seed, so seed and step are hashed into 32.
        mixed = hashlib.blake2b(f"{self.seed} {step}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
        starts = torch.randint(len(self.corpus.train) - self.context, (self.batch,), generator=generator, device="cpu")
        return self._windows(self.corpus.train, starts)

    def validation(self, windows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of evenly spaced windows, in batches of at most B, the same ones each time."""
        last = len(self.corpus.validation) - self.context - 1
        starts = (last * torch.arange(windows, device="cpu") // max(windows - 1, 1)).unique()
        for batch in starts.split(self.batch):
            yield self._windows(self.corpus.validation, batch)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[starts[:, None] + torch.arange(self.context + 1, device="cpu")]  # [B, C + 1]
        return windows[:, :-1], windows[:, 1:]
