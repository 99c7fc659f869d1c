import errno
import os
from pathlib import Path

import pytest
import torch

from octavo.train import Batches, Corpus, ModelConfig, TrainError, load_corpus


def as_bytes(tensor):
    return bytes(tensor.tolist())


def numbered(count):
    """Text in which each four bytes occur once, so that a window's bytes say where it came from."""
    return b"".join(b"%04x" % i for i in range(count))


def test_split_parts_share_no_byte_and_lose_none():
    text = numbered(500)
    corpus = Corpus.of(text, "numbers")
    assert as_bytes(corpus.train) + as_bytes(corpus.validation) == text
    assert len(corpus.validation) == len(text) // 10
    corpus.validation.zero_()
    assert as_bytes(corpus.train) == text[: len(corpus.train)]


def test_every_start_can_be_drawn_and_none_beyond():
    # 18 to train: starts 0 to 13 for windows of 4 + 1
    batches = Batches(Corpus.of(bytes(range(65, 85)), "letters"), context=4, batch=16, seed=3)
    assert {int(x[0]) - 65 for step in range(40) for x in batches.training(step)[0]} == {*range(14)}


def test_targets_are_the_next_bytes():
    batches = Batches(Corpus.of(numbered(500), "numbers"), context=12, batch=4, seed=0)
    for inputs, targets in [batches.training(0), *batches.validation(9)]:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert inputs.dtype == torch.uint8


def test_order_depends_on_seed_and_step_only():
    corpus = Corpus.of(numbered(500), "numbers")
    forward = [Batches(corpus, 8, 4, seed=1).training(step)[0] for step in range(5)]
    torch.manual_seed(99)
    again = Batches(corpus, 8, 4, seed=1)
    backward = [again.training(step)[0] for step in reversed(range(5))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert not torch.equal(forward[0], forward[1])
    assert not torch.equal(forward[0], Batches(corpus, 8, 4, seed=2).training(0)[0])
    # A generator keeps 32 bits of its seed: seeds that agree in those are still different.
    assert not torch.equal(forward[0], Batches(corpus, 8, 4, seed=1 + 2**30).training(0)[0])


@pytest.mark.parametrize(("windows", "taken"), [(1, 1), (3, 3), (10**4, 192)])
def test_validation_windows_are_fixed_and_each_taken_once(windows, taken):
    batches = Batches(Corpus.of(numbered(500), "numbers"), context=8, batch=4, seed=0)
    first, second = ([x for x, _ in batches.validation(windows)] for _ in range(2))
    assert all(as_bytes(window) in as_bytes(batches.corpus.validation) for x in first for window in x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert sum(len(x) for x in first) == taken


def test_standard_library_is_there_and_always_the_same():
    first, second = load_corpus(), load_corpus()
    assert first.digest == second.digest
    assert 3e6 < len(first.train) < 3e7
    assert "Python's standard library" in first.description
    first.require(ModelConfig())


def test_folder_is_read_in_sorted_order_and_says_what_it_leaves_out(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("third")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x01")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("secret")
    os.mkfifo(tmp_path / "pipe")
    corpus = load_corpus(tmp_path)
    assert as_bytes(torch.cat((corpus.train, corpus.validation))) == b"first\nsecond\nthird"
    assert "3 files" in corpus.description and "1 left out" in corpus.description
    assert "picture.png" in corpus.description


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"text\0text", "NUL at byte 4"),
        ("naïve".encode("latin-1"), "not UTF-8 near byte 2"),
        ("é".encode() * 10 + b"\xc3", "not UTF-8"),  # cut in the middle of a character
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, says):
    path = tmp_path / "junk"
    path.write_bytes(content)
    with pytest.raises(TrainError, match=says):
        load_corpus(path)
    if content:
        with pytest.raises(TrainError, match="no text in"):
            load_corpus(tmp_path)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(TrainError, match=r"cannot read .*nothing: No such file"):
        load_corpus(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TrainError, match="not a regular file"):
        load_corpus(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainError, match="no text in"):
        load_corpus(tmp_path / "empty")


def test_a_file_that_can_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    read_bytes = Path.read_bytes

    def refuse(path):  # root may read anything
        if path.name == "b.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TrainError, match=r"cannot read .*b\.txt: Permission denied"):
        load_corpus(tmp_path / "b.txt")
    corpus = load_corpus(tmp_path)
    assert as_bytes(torch.cat((corpus.train, corpus.validation))) == b"first"
    assert "1 left out as not text, such as " in corpus.description and "b.txt" in corpus.description


def test_too_little_text_says_how_much_is_needed():
    model = ModelConfig(width=32, layers=1, heads=2, context=16)
    with pytest.raises(TrainError, match="100 bytes, but context 16 needs 171") as fault:
        Corpus.of(b"x" * 100, "this").require(model)
    assert "--context" in str(fault.value)
    with pytest.raises(TrainError):
        Corpus.of(b"x" * 169, "this").require(model)
    enough = Corpus.of(b"x" * 171, "this")
    enough.require(model)
    assert len(list(Batches(enough, 16, 4, seed=0).validation(5))) == 1
