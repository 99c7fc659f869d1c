"""Files that are replaced as a whole or not at all, a folder locked for one process, and why a file was not written."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from octavo.errors import first_line

PARTIAL = "partial"  # the end of the name of a file whose writer is not done, or was killed


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write: a reader of ``path`` reads the old contents or the new, even if writing fails halfway.

    If ``path`` is a symbolic link, the file that it leads to is replaced. A device, a pipe and this process's own
    output can't be replaced: they are written to directly.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.{PARTIAL}")  # other writers have their own
    straight = _straight(path)
    try:
        with straight or open(partial, "xb") as file:
            yield file
            file.flush()
            if straight is None:
                os.fsync(file.fileno())
        if straight is None:
            os.replace(partial, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(path)  # the name that the caller gave
        raise


def _straight(path: Path) -> BinaryIO | None:
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


def require_place(path: Path) -> None:
    """Raise OSError if a path can't become a file; to be called before minutes of work for that file."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that a process loses however it ends: a file that names the process, and is removed at the end.

    BlockingIOError if another process has it, which ``strerror`` names.
    """
    with _locked(path) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _locked(path: Path) -> IO[str]:
    while True:
        file = open(path, "a+")
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read()
            file.close()
            raise BlockingIOError(error.errno, holder, str(path)) from error
        except (ImportError, OSError) as error:  # a system, or a file system, without locks
            warnings.warn(f"{path}: {reason_of(error)}: make sure that nothing else writes to its folder", stacklevel=2)
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # the process that had it has removed it meanwhile: try again


def reason_of(error: BaseException) -> str:
    """Return an error's first line; if torch hides an OSError behind it, the OSError's."""
    # torch's zip writer raises a RuntimeError about its file position instead
    cause = error if isinstance(error, OSError) else error.__context__
    return cause.strerror or first_line(cause) if isinstance(cause, OSError) else first_line(error)
