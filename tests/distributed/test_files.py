import errno
import os
import stat
import threading

import pytest

from octavo.distributed.files import reason_of, replacing


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


def test_the_new_file_has_the_mode_of_the_old_one(tmp_path):
    private, new = tmp_path / "private", tmp_path / "new"
    private.touch(0o600)
    for path in (private, new):
        with replacing(path) as file:
            assert {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.glob("private*")} == {0o600}
            file.write(b"new")
    new.with_name("other").touch()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600 and private.read_bytes() == b"new"
    assert new.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_no_file_can_take_the_place_of_is_written_into(tmp_path, capfd):
    target, link, pipe, link_to_output = (tmp_path / name for name in ("target", "link", "pipe", "own"))
    target.write_bytes(b"old")
    link.symlink_to(target)
    write(link, b"by a link")
    assert link.is_symlink() and target.read_bytes() == b"by a link"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe, b"into a pipe")
    reader.join()
    assert read == [b"into a pipe"] and pipe.is_fifo()
    link_to_output.symlink_to("/dev/fd/1")
    print("before", flush=True)
    write(link_to_output, b"output\n")
    assert capfd.readouterr().out == "before\noutput\n" and link_to_output.is_symlink()
    assert len(list(tmp_path.iterdir())) == 4


def test_two_writers_of_a_file_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second, longer")
        assert path.read_bytes() == b"second, longer"
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_place_without_a_folder_is_named_as_it_was_given(tmp_path):
    for path, named in ((tmp_path, tmp_path), (tmp_path / "no" / "file", tmp_path / "no")):
        with pytest.raises(OSError) as fault:
            write(path, b"")
        assert fault.value.filename in (str(named), str(path))


def test_the_reason_is_the_one_below():
    try:
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")
    except RuntimeError as error:
        assert reason_of(error) == "No space left on device"
    assert reason_of(ValueError("first\nsecond")) == "first"
