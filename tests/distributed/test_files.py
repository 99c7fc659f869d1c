import errno
import os

import pytest

from octavo.distributed.files import reason_of, replacing, require_place


def write(path, data):
    with replacing(path) as file:
        file.write(data)


def test_a_file_is_replaced_or_left(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        write(path, b"new")
    with pytest.raises(ZeroDivisionError), replacing(path):
        _ = 1 / 0
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_without_a_folder_is_named_as_it_was_given(tmp_path):
    for refuse in (require_place, lambda path: write(path, b"")):
        for path, named in ((tmp_path, tmp_path), (tmp_path / "no" / "file", tmp_path / "no")):
            with pytest.raises(OSError) as fault:
                refuse(path)
            assert fault.value.filename in (str(named), str(path))
    require_place(tmp_path / "file")


def test_the_reason_is_the_one_below():
    try:
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")
    except RuntimeError as error:
        assert reason_of(error) == "No space left on device"
    assert reason_of(ValueError("first\nsecond")) == "first"
