"""Global and shared memory: every access in bounds, aligned, of bytes that somebody wrote, and without a race.

An access of 1 to 32 bytes is of words: itself, or of more than 8 bytes several of 8. What accesses cost is counted in
32-byte sectors or shared-memory wavefronts, and the fewest possible.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator.parse import BASE, Fault

Span = tuple[int, int, np.ndarray | None]  # address, bytes, and which of them were written; None: all


def words(data: np.ndarray, size: int) -> np.ndarray:
    """Return bytes as [accesses of this size, words of each]."""
    word = min(size, 8)
    return data[: data.size // size * size].view(f"u{word}").reshape(-1, size // word)


def check_alignment(address: np.ndarray, size: int, instruction: Any) -> None:
    """Raise Fault for an address that is not a multiple of the access's size."""
    if wrong := np.count_nonzero(address & (size - 1)):
        at = int(address[address & (size - 1) != 0][0])
        raise Fault(f"misaligned access of {size} bytes at {at:#x} by {wrong} lanes: {instruction}")


class GlobalMemory:
    """Allocations of this process, which a kernel may touch and nothing else.

    Args:
        spans: (address, bytes, bool [bytes] that says which were written, or None for all). One may be part of another.
        more: returns further spans; called once, for an address in none of these: a pointer may come from memory.
    """

    def __init__(self, spans: Iterable[Span], more: Callable[[], Iterable[Span]] = lambda: ()) -> None:
        self._more: Callable[[], Iterable[Span]] | None = more
        self._spans = list(spans)
        self._merge()

    def _merge(self) -> None:
        self._merged: list[Span] = []
        for span in sorted(self._spans, key=lambda span: (span[0], -span[1])):
            if not self._merged or span[0] + span[1] > sum(self._merged[-1][:2]):  # not a part of the one before
                self._merged.append(span)
        self._starts, sizes = (np.array([span[part] for span in self._merged], np.int64) for part in (0, 1))
        self._ends = self._starts + sizes
        self._bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at)) for at, size, _ in self._merged]

    def _find(self, address: np.ndarray, size: int, instruction: Any) -> np.ndarray:
        """Return the number of each access's allocation."""
        numbers = np.searchsorted(self._starts, address, "right") - 1
        outside = (
            (numbers < 0) | (address + size > self._ends[numbers]) if self._merged else np.ones(address.size, bool)
        )
        if not outside.any():
            return numbers
        if self._more is not None:
            self._spans += self._more()
            self._more = None
            self._merge()
            return self._find(address, size, instruction)
        at, below = int(address[outside][0]), numbers[outside][0]
        near = f"; of the allocation below, of {self._merged[below][1]} bytes, byte {at - self._merged[below][0]}"
        where = f"{at:#x}{near if below >= 0 else ''}"
        raise Fault(f"out of bounds: {size} bytes at {where}, by {outside.sum()} lanes: {instruction}")

    def _places(
        self, address: np.ndarray, size: int, instruction: Any
    ) -> Iterator[tuple[Any, np.ndarray, np.ndarray, Any]]:
        """Yield for each allocation (its accesses, its words, their units of these, the bytes that were written)."""
        check_alignment(address, size, instruction)
        numbers = self._find(address, size, instruction)
        several = (numbers != numbers[0]).any()
        for number in np.unique(numbers).tolist() if several else [int(numbers[0])]:
            which = numbers == number if several else slice(None)
            start, _, written = self._merged[number]
            skipped = -start % size
            written = None if written is None else words(written[skipped:].view(np.uint8), size)
            units = (address[which] - (start + skipped)) // size
            yield which, words(self._bytes[number][skipped:], size), units, written

    def load(self, address: np.ndarray, size: int, warp: Any, instruction: Any) -> np.ndarray:
        """Return words [lanes, words of an access]; warps don't matter here."""
        out = np.empty((address.size, max(size // 8, 1)), f"u{min(size, 8)}")
        for which, data, units, written in self._places(address, size, instruction):
            out[which] = data[units]
            if written is not None and (written[units].view(np.uint8) == 0).any():
                raise Fault(f"nobody wrote all of these bytes of an allocation of {written.nbytes}: {instruction}")
        return out

    def store(self, address: np.ndarray, size: int, values: np.ndarray, warp: Any, instruction: Any) -> None:
        """Write values, words [lanes, words of an access]."""
        for which, data, units, written in self._places(address, size, instruction):
            part = values[which]
            data[units] = part
            if (data[units] != part).any():
                raise Fault(f"race: lanes write different values to one place: {instruction}")
            if written is not None:
                written[units] = np.uint64(0x0101010101010101).astype(written.dtype)


WRITTEN, COMING = 1, 2  # of a byte: somebody wrote it; a copy of it is under way
# in place of a warp: also all warps' atomics, which do not race with each other; and less its number, a warpgroup
NOBODY, SEVERAL, ATOMIC, GROUP = -1, -2, -3, -10


class SharedMemory:
    """All programs' shared memory: bytes, their last writer and reader, and when each program last met at a barrier.

    A race: a warp reads bytes that another wrote since the last barrier, or writes bytes that another wrote or read.
    """

    def __init__(self, programs: int, size: int) -> None:
        self.stride, self._end = BASE + -(-size // 32) * 32, BASE + size
        self.data, self._state = (np.zeros(programs * self.stride, np.uint8) for _ in range(2))
        self._writer, self._written, self._reader, self._read = (np.zeros(self.data.size, np.int32) for _ in range(4))
        self._clock = 1
        self._met = np.ones(programs, np.int32)  # the clock at a program's last barrier

    def places(self, address: np.ndarray, program: np.ndarray, size: int, instruction: Any) -> np.ndarray:
        """Return where in ``data`` accesses begin, in units of ``size`` bytes."""
        check_alignment(address, size, instruction)
        if address.size and (address.min() < BASE or address.max() + size > self._end):
            lowest, highest = address.min() - BASE, address.max() + size - 1 - BASE
            raise Fault(f"out of bounds: shared bytes {lowest}..{highest} of {self._end - BASE}: {instruction}")
        return (address + program * self.stride) // size

    def met(self, programs: Any) -> None:
        """Note that these programs' threads are all at a barrier."""
        self._clock += 1
        self._met[programs] = self._clock

    def load(
        self, units: np.ndarray, size: int, warp: np.ndarray, instruction: Any, reader: int | None = None
    ) -> np.ndarray:
        """Return words [lanes, words of an access] of units [lanes], for warps [lanes] or, if given, ``reader``."""
        states = self._state.reshape(-1, size)[units]
        if (unread := states != WRITTEN).any():
            self._refuse(
                "a copy under way writes shared bytes that are read", states == COMING, units, size, instruction
            )
            self._refuse("nobody wrote shared bytes that are read", unread, units, size, instruction)
        others, since = self._others(units, size, warp[:, None])
        self._refuse("race: another warp wrote shared bytes that are read", others, units, size, instruction)
        if reader != NOBODY:
            now = warp[:, None] if reader is None else reader
            readers, read = self._reader.reshape(-1, size), self._read.reshape(-1, size)
            readers[units] = noted = np.where((read[units] >= since) & (readers[units] != now), SEVERAL, now)
            readers[units[(readers[units] != noted).any(1)]] = SEVERAL  # in one access
            read[units] = self._clock
        return words(self.data, size)[units]

    def store(self, units: np.ndarray, size: int, values: np.ndarray, warp: np.ndarray, instruction: Any) -> None:
        """Write words [lanes, words of an access]; a write of the value that is there already races with nobody."""
        data = words(self.data, size)
        changes = (data[units] != values).any(1) | (self._state.reshape(-1, size)[units] != WRITTEN).any(1)
        self.touch(units[changes], size, warp[changes], instruction)
        data[units] = values
        if (data[units] != values).any():
            raise Fault(f"race: lanes write different values to one place in shared memory: {instruction}")

    def touch(
        self,
        units: np.ndarray,
        size: int,
        warp: np.ndarray,
        instruction: Any,
        before: int = WRITTEN,
        after: int = WRITTEN,
    ) -> None:
        """Note a write that may race: now, or (``after`` COMING) of a copy that begins, or (``before``) that ends."""
        states, warps = self._state.reshape(-1, size), warp[:, None]
        if before != COMING:
            coming = states[units] == COMING
            self._refuse(
                "race: a copy under way writes shared bytes that are written", coming, units, size, instruction
            )
        states[units] = after
        others, since = self._others(units, size, warps)
        reader, read = self._reader.reshape(-1, size)[units], self._read.reshape(-1, size)[units]
        others |= (read >= since) & (reader != warps) & (reader != GROUP - warps // 4)
        self._refuse("race: another warp wrote or read shared bytes that are written", others, units, size, instruction)
        self._clock += 1
        self._writer.reshape(-1, size)[units], self._written.reshape(-1, size)[units] = warps, self._clock

    def _others(self, units: np.ndarray, size: int, warps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (bytes that other warps wrote since the last barrier, when that barrier was)."""
        since = self._met[units * size // self.stride][:, None]
        written = self._written.reshape(-1, size)[units] >= since
        return written & (self._writer.reshape(-1, size)[units] != warps), since

    def _refuse(self, fault: str, wrong: np.ndarray, units: np.ndarray, size: int, instruction: Any) -> None:
        if wrong.any():
            at = int(units[wrong.any(1)][0] * size % self.stride) - BASE
            raise Fault(f"{fault}, of the {size} at {at}: {instruction}")


SECTOR, BANKS = 32, 32


@dataclass(slots=True)
class Count:
    """Costs of an instruction, or a sum: ``got`` sectors or wavefronts where ``least`` would do for the same bytes."""

    got: int = 0
    least: int = 0

    def sectors(self, warp: np.ndarray, address: np.ndarray, size: int) -> None:
        """Note global accesses: the distinct sectors of each warp, and as many as its distinct bytes would fill."""
        key = np.unique((warp << 48) | (address & ((1 << 48) - 1)))
        counts = np.unique(key >> 48, return_counts=True)[1]
        self.got += np.unique(np.concatenate([key, key + size - 1]) // SECTOR).size
        self.least += int((-(-counts * size // SECTOR)).sum())

    def wavefronts(self, warp: np.ndarray, lane: np.ndarray, address: np.ndarray, size: int) -> None:
        """Note shared accesses: 8 bytes by half warps, 16 by quarters, each as often as its worst bank's words."""
        phases = max(size // 4, 1)
        group = warp * phases + lane // (BANKS // phases)
        word = (address >> 2)[:, None] + np.arange(phases)
        key = np.unique((group[:, None] << 24) + word)
        bank, depth = np.unique((key >> 24) * BANKS + key % BANKS, return_counts=True)
        first = np.flatnonzero(np.diff(bank // BANKS, prepend=-1))
        words = np.unique(key >> 24, return_counts=True)[1]
        self.got += int(np.maximum.reduceat(depth, first).sum())
        self.least += int((-(-words // BANKS)).sum())

    def __add__(self, other: Count) -> Count:
        return Count(self.got + other.got, self.least + other.least)
