"""Readers of files that may be damaged, or that a stranger wrote: a fault in one is a ValueError that says so.

JSON has limits that Python's reader lacks, names in a file lead to files of its own folder, and the CRC-32s that
torch.save writes, one a record of its zip archive, are checked, which torch.load does not do.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

from octavo.errors import first_line

_FOLDER = 0x10  # in the external attributes of a zip archive's record
DEEPEST = 64  # levels of lists and objects in a JSON document; octavo's own have fewer than 10


def read_json(source: str | bytes | Path) -> Any:
    """Return the value of a JSON document, which may begin with a byte order mark: of its text, or its file's path.

    Raises:
        OSError: as ``open`` does.
        ValueError: for what is not JSON in UTF-8, has a name twice in an object, or is nested deeper than DEEPEST; of
            a file with its path. NaN and Infinity, which Python writes and octavo's records hold, are read as such.
    """
    if isinstance(source, Path):
        try:
            return read_json(source.read_bytes())
        except ValueError as error:
            raise ValueError(f"{source} is no JSON that octavo reads: {first_line(error)}") from error
    text = source.decode("utf-8-sig") if isinstance(source, bytes) else source.removeprefix("\ufeff")
    too_deep = f"it is nested deeper than {DEEPEST} levels"
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(DEEPEST + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    if level:
        raise ValueError(too_deep)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice in an object")
    return values


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that another file of the folder names.

    Links count as what they lead to, which may also be a file of the Hugging Face hub's cache, if the folder is a
    snapshot there.

    Raises:
        ValueError: ``name`` leads out of the folder, or can't be a file's name.
    """
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    if not target.is_relative_to(root) and target.parent != blobs:
        raise ValueError(f"{folder}: {name} leads out of the folder, to {target}: copy that file into the folder")
    return folder / name


def check_records(saved: bytes) -> None:
    """Raise ValueError if a record of what torch.save wrote does not have the CRC-32 that it was written with.

    An archive without CRC-32s passes: ``torch.serialization.set_crc32_options(False)`` leaves them out.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(saved)) as archive:
            records = archive.infolist()
            # torch reads nothing where a record's attributes say that it is a folder, and leaves the memory as it was
            damaged = next((record.filename for record in records if record.external_attr & _FOLDER), None)
            if damaged is None and any(record.CRC for record in records):
                damaged = archive.testzip()
    except Exception as error:  # whatever a damaged archive makes zipfile raise
        raise ValueError(f"it is no whole archive of torch.save: {first_line(error)}") from error
    if damaged is not None:
        raise ValueError(f"its record {damaged} is not what was written, by its CRC-32")
