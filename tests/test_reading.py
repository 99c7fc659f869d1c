"""Files that somebody else may have written or damaged."""

import io
import json
import os
import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch.utils import serialization

from octavo.reading import DEEPEST, check_records, file_inside, read_json
from tests.support.damage import DEEP, damaged_json


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DEEP, "nested deeper than 64 levels"),
        ('{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1), "nested deeper than 64 levels"),
        ('{"rules": {"a": 1, "b": 2, "a": 1}}', "'a' twice in an object"),
        (b'{"a": "\xff"}', "invalid start byte"),
        ('{"a": 1'.encode("utf-16"), "utf-8"),
        ("1" * 5000, "integer"),
        ("", "Expecting value"),
    ],
)
def test_json_that_is_refused(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        read_json(text)
    (tmp_path / "x.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"x\.json is no JSON that octavo reads: .*{says}"):
        read_json(tmp_path / "x.json")


def test_json_that_is_read() -> None:
    deepest = "[" * DEEPEST + "]" * DEEPEST
    for text in ('{"a": [1, 2.5, null, true, "é"], "b": {"a": -Infinity}}', deepest, "0"):
        assert read_json(text) == read_json(text.encode()) == read_json(b"\xef\xbb\xbf" + text.encode())
        assert read_json("\ufeff" + text) == json.loads(text)
    for seed in range(300):  # Python's reader, or a ValueError
        damaged = damaged_json({"a": [1, {"b": "c"}], "d": None}, seed)
        try:
            read = read_json(damaged)
        except ValueError:
            continue
        assert repr(read) == repr(json.loads(damaged))  # NaN is not equal to itself


def test_a_name_leads_to_a_file_of_its_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "in2"  # whose name begins as the folder's
    for each in (folder / "sub", outside):
        each.mkdir(parents=True)
        (each / "x").touch()
    (folder / "link").symlink_to(outside / "x")
    (folder / "inner").symlink_to(folder / "sub" / "x")
    (tmp_path / "same").symlink_to(folder)
    for root in (folder, tmp_path / "same"):
        for name in ("sub/x", "inner", "sub/../sub/x", str(folder / "sub" / "x")):
            assert file_inside(root, name).samefile(folder / "sub" / "x")
        for name in ("link", "../in2/x", "sub/../../in2/x", str(outside / "x"), "/dev/zero", "nul\0", "\ud800"):
            with pytest.raises(ValueError, match=r"leads out of the folder|null|encode"):
                file_inside(root, name)


def test_a_snapshot_of_the_hub_has_its_files_in_the_blobs_beside_it(tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    snapshot, blobs = model / "snapshots" / "1234", model / "blobs"
    for folder in (snapshot, blobs, tmp_path / "blobs"):
        folder.mkdir(parents=True)
        (folder / "abcd").touch()
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blobs / "abcd", snapshot))
    assert file_inside(snapshot, "model.safetensors") == snapshot / "model.safetensors"
    (snapshot / "other").symlink_to(tmp_path / "blobs" / "abcd")
    with pytest.raises(ValueError, match=r"other leads out of the folder, to .*: copy that file into the folder"):
        file_inside(snapshot, "other")


def saved(value: object) -> bytes:
    torch.save(value, written := io.BytesIO())
    return written.getvalue()


def test_no_flipped_bit_of_what_torch_saved_is_read_as_another_tensor() -> None:
    """Bits of the records, of the archive's directory, and all of the tensor's entry there."""
    tensor = torch.arange(300, dtype=torch.uint8)
    data, draw = saved(tensor), random.Random(0)
    check_records(data)
    directory = data.index(b"PK\x01\x02")
    bits = [*draw.sample(range(8 * directory), 150), *draw.sample(range(8 * directory, 8 * len(data)), 150)]
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data/0"))
    bits += range(8 * entry, 8 * (entry + 60))  # where its attributes say that it is a folder, torch reads nothing
    refused = 0
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            check_records(bytes(damaged))
            read = torch.load(io.BytesIO(damaged), weights_only=True)
        except Exception:  # torch's errors of damaged archives are many
            refused += 1
            continue
        assert read.equal(tensor), bit
    assert refused > 300


def test_what_was_saved_without_checksums_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization.config.save, "compute_crc32", False)
    data = saved(torch.ones(3))
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is not None
    check_records(data)
    for damaged in (b"", data[:-1], b"PK"):
        with pytest.raises(ValueError, match=r"no whole archive of torch\.save"):
            check_records(damaged)
