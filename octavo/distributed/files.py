"""Files that are replaced as a whole or not at all, and why a file was not written."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from octavo.errors import first_line

PARTIAL = "partial"  # the end of the name of a file whose writer is not done, or was killed


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write: a reader of ``path`` reads the old contents or the new, even if writing fails halfway.

    If ``path`` is a symbolic link, the file that it leads to is replaced. The new file has the mode of the old one. A
    device, a pipe and this process's own output can't be replaced: they are written to directly.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.{PARTIAL}")  # other writers have their own
    in_place = _open_in_place(path)
    try:
        with in_place or open(partial, "xb") as file:
            if in_place is None:
                with contextlib.suppress(OSError):  # there is none yet, or a file system without modes
                    os.chmod(partial, stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            if in_place is None:
                os.fsync(file.fileno())
        if in_place is None:
            os.replace(partial, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(path)  # the name that the caller gave
        raise


def _open_in_place(path: Path) -> BinaryIO | None:
    """Return the opened file if it can't be replaced; None for a regular file, or if there is none yet."""
    try:
        status = path.stat()
    except OSError:
        return None
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(stream), status):
                return open(os.dup(stream), "wb")
    return None if stat.S_ISREG(status.st_mode) else open(path, "wb")


def reason_of(error: BaseException) -> str:
    """Return an error's first line; if torch hides an OSError behind it, the OSError's."""
    # torch's zip writer raises a RuntimeError about its file position instead
    cause = error if isinstance(error, OSError) else error.__context__
    return cause.strerror or first_line(cause) if isinstance(cause, OSError) else first_line(error)
