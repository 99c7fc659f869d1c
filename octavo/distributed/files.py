"""Files that are replaced as a whole or not at all, and why one could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from octavo.errors import first_line


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write: a reader of ``path`` finds the old contents or the new, also when writing fails halfway."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(partial):
            error.filename = str(path)  # what the caller knows it by
        raise


def require_place(path: Path) -> None:
    """Raise OSError where a path can't become a file: before what is to be written there takes minutes."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))


def reason_of(error: BaseException) -> str:
    """An error's first line; where torch hides an OSError behind it, that one's."""
    # torch's zip writer raises a RuntimeError about its file position instead
    cause = error if isinstance(error, OSError) else error.__context__
    return cause.strerror or first_line(cause) if isinstance(cause, OSError) else first_line(error)
