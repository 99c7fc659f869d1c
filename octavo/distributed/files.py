"""Files that are replaced as a whole or not at all, and why one could not be written."""

from __future__ import annotations

import contextlib
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
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def reason_of(error: BaseException) -> str:
    """An error's first line; where torch hides an OSError behind it, that one's."""
    # torch's zip writer raises a RuntimeError about its file position instead
    cause = error if isinstance(error, OSError) else error.__context__
    return cause.strerror or first_line(cause) if isinstance(cause, OSError) else first_line(error)
