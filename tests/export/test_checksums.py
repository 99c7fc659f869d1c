"""CRC-32s of tensors in a safetensors file's header: of what is read, by blocks of rows."""

from pathlib import Path

import pytest
import torch

from octavo.export import checksums
from octavo.export.checksums import KEY, CheckedFile, checksums_of
from tests.support.definitions import same_bits

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import save_file  # noqa: E402

TENSORS = {
    "codes": torch.arange(90, dtype=torch.uint8).view(9, 10).view(torch.float8_e4m3fn),
    "exponents": torch.arange(1, 7, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "experts": torch.arange(60.0).view(5, 3, 4).bfloat16(),
    "number": torch.tensor(3.0),
    "nothing": torch.empty(0, 4),
    "counts": torch.arange(7),
}
PARTS = {
    "codes": (slice(4, 7), slice(2, 9)),
    "exponents": (slice(5, 6),),
    "experts": (slice(1, 3), slice(0, 3), slice(2, 4)),
    "nothing": (slice(0, 0), slice(0, 4)),
    "counts": (slice(7, 7),),
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of these tensors, whose blocks have three rows of the codes."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 30)
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "pt"} | checksums_of(TENSORS))
    return tmp_path / "x.safetensors"


def opened(file: Path) -> CheckedFile:
    return CheckedFile(file, safetensors.safe_open(file, "pt"))


def test_parts_and_wholes_come_as_they_were_written(file: Path) -> None:
    read = opened(file)
    assert {*read.keys()} == {*TENSORS} and read.header("codes") == ((9, 10), "F8_E4M3")
    assert all(same_bits(read.read(name), tensor) for name, tensor in TENSORS.items())
    assert all(same_bits(read.read(name, part), TENSORS[name][part]) for name, part in PARTS.items())
    save_file(TENSORS, file, {"format": "pt"})  # as others write it
    assert all(same_bits(opened(file).read(name, part), TENSORS[name][part]) for name, part in PARTS.items())


def test_a_flipped_bit_is_found_where_its_block_is_read_and_nowhere_else(file: Path) -> None:
    data, codes = bytearray(file.read_bytes()), bytes(range(90))
    data[bytes(data).index(codes) + 54] ^= 4  # of row 5: the block of rows 3 to 5
    file.write_bytes(data)
    read = opened(file)
    for part in ((), (slice(0, 9), slice(0, 10)), (slice(3, 4), slice(0, 1)), (slice(2, 5), slice(0, 10))):
        with pytest.raises(ValueError, match=r"x\.safetensors: codes is not what was written, by its CRC-32: copy"):
            read.read("codes", part)
    for part in ((slice(0, 3), slice(0, 10)), (slice(6, 9), slice(0, 10))):
        assert same_bits(read.read("codes", part), TENSORS["codes"][part])
    assert same_bits(read.read("experts"), TENSORS["experts"])


UNREADABLE = "", "{}", "[]", '{"block_bytes": 1e400, "tensors": {}}', '{"block_bytes": 3, "tensors": 4}'


@pytest.mark.parametrize("text", UNREADABLE)
def test_checksums_that_cannot_be_read(file: Path, text: str) -> None:
    save_file(TENSORS, file, {KEY: text})
    with pytest.raises(ValueError, match=r"x\.safetensors has no CRC-32s that can be read"):
        opened(file)
    save_file(TENSORS, file, {KEY: '{"block_bytes": -7, "tensors": {"codes": 5}}'})
    with pytest.raises(ValueError, match="codes is not what was written"):
        opened(file).read("codes")
