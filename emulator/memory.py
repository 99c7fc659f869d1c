"""Global and shared memory: every access in bounds, aligned, of bytes that somebody wrote, and without a race."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from emulator.parse import Fault

Span = tuple[int, int, np.ndarray | None]  # address, bytes, and which of them were written; None: all


class GlobalMemory:
    """Allocations of this process, which a kernel may touch and nothing else.

    Args:
        spans: (address, bytes, bool [bytes] that says which were written, or None for all). They may overlap.
        more: finds others, asked for once, when an address is in none of these: a pointer may come from memory.
    """

    def __init__(self, spans: Iterable[Span], more: Callable[[], Iterable[Span]] = lambda: ()) -> None:
        self._more: Callable[[], Iterable[Span]] | None = more
        self._spans = list(spans)
        self._settle()

    def add(self, span: Span) -> None:
        """One more allocation."""
        self._spans.append(span)
        self._settle()

    def _settle(self) -> None:
        found: dict[int, tuple[int, np.ndarray | None]] = {}
        for address, size, written in self._spans:  # the longest at an address
            if size > found.get(address, (0, None))[0]:
                found[address] = size, written
        kept: list[Span] = []
        for address, (size, written) in sorted(found.items()):
            if kept and address + size <= kept[-1][0] + kept[-1][1]:
                continue  # inside of another
            kept.append((address, size, written))
        self._kept = kept
        self._starts = np.array([address for address, *_ in kept], np.uint64)
        self._ends = np.array([address + size for address, size, _ in kept], np.uint64)
        self._bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(a)) for a, size, _ in kept]

    def _find(self, address: np.ndarray, size: int, what: Any) -> np.ndarray:
        """Each access's allocation."""
        if (address % np.uint64(size)).any():
            raise Fault(f"misaligned access of {size} bytes at {address[address % np.uint64(size) != 0][0]:#x}: {what}")
        found = np.searchsorted(self._starts, address, "right").astype(np.int64) - 1
        outside = found < 0
        if self._starts.size:
            outside |= address + np.uint64(size) > self._ends[found]
        if not outside.any():
            return found
        if self._more is not None:
            self._spans += self._more()
            self._more = None
            self._settle()
            return self._find(address, size, what)
        at = int(address[np.argmax(outside)])
        near = self._kept[max(int(found[np.argmax(outside)]), 0)][:2] if self._kept else (0, 0)
        raise Fault(
            f"out of bounds: {size} bytes at {at:#x} by {outside.sum()} lanes; the allocation below is of {near[1]} "
            f"bytes, and this is its byte {at - near[0]}: {what}"
        )

    def _places(self, address: np.ndarray, size: int, what: Any) -> Iterable[tuple[Any, Any, int, np.ndarray]]:
        """(which accesses, their memory in units of ``size``, its allocation, their units) an allocation."""
        found = self._find(address, size, what)
        for span in [int(found[0])] if (found == found[0]).all() else np.unique(found).tolist():
            which = slice(None) if (found == span).all() else found == span
            start = self._kept[span][0]
            skipped = -start % size
            memory = self._bytes[span][skipped:]
            memory = memory[: memory.size // size * size].view(f"V{size}" if size > 8 else f"u{size}")
            yield which, memory, span, ((address[which] - np.uint64(start + skipped)).astype(np.int64) // size)

    def load(self, address: np.ndarray, size: int, what: Any, is_checked: bool = True) -> np.ndarray:
        """uint8 [lanes, size]."""
        out = np.empty((address.size, size), np.uint8)
        for which, memory, span, units in self._places(address, size, what):
            out[which] = memory[units].view(np.uint8).reshape(-1, size)
            written = self._kept[span][2]
            if is_checked and written is not None:
                at = (units * size + -self._kept[span][0] % size)[:, None] + np.arange(size)
                if not written[at].all():
                    lost = int(at[~written[at]][0])
                    raise Fault(f"nobody wrote byte {lost} of an allocation of {written.size} bytes: {what}")
        return out

    def store(self, address: np.ndarray, values: np.ndarray, what: Any) -> None:
        """values: uint8 [lanes, size]."""
        size = values.shape[1]
        for which, memory, span, units in self._places(address, size, what):
            memory[units] = np.ascontiguousarray(values[which]).view(memory.dtype).reshape(-1)
            written = self._kept[span][2]
            if written is not None:
                written[(units * size + -self._kept[span][0] % size)[:, None] + np.arange(size)] = True

    def update(self, address: np.ndarray, dtype: Any, change: Callable[[int, Any], Any], what: Any) -> np.ndarray:
        """Read, change and write one lane after another; what each lane found."""
        size = np.dtype(dtype).itemsize
        out = np.empty(address.size, dtype)
        for lane in range(address.size):
            one = address[lane : lane + 1]
            out[lane] = old = self.load(one, size, what).view(dtype)[0, 0]
            self.store(one, np.array([[change(lane, old)]], dtype).view(np.uint8), what)
        return out


BASE = 1024  # bytes of shared memory that CUDA keeps for itself, so that a kernel's begin at a multiple of it
WRITTEN, COMING = 1, 2  # of a byte: somebody wrote it; a copy of it is under way
NOBODY, MANY = -1, -2


class SharedMemory:
    """All programs' shared memory: bytes, who wrote and read each last, and when its program last met at a barrier.

    Args:
        programs: how many.
        size: bytes a program.
        races: whether to look for them: reads of what another warp wrote since the last barrier, and writes over what
            another warp wrote or read since.
    """

    def __init__(self, programs: int, size: int, races: bool) -> None:
        self.stride = BASE + -(-max(size, 16) // 16) * 16
        self.data = np.full(programs * self.stride, 0xA5, np.uint8)
        self._state = np.zeros(programs * self.stride, np.uint8)
        self._clock = 1
        self._met = np.zeros(programs, np.int64)  # the clock at a program's last barrier
        self._races = races
        if races:
            self._writer, self._reader = (np.full(self.data.size, NOBODY, np.int32) for _ in range(2))
            self._written, self._read = (np.full(self.data.size, -1) for _ in range(2))

    def places(self, address: np.ndarray, program: np.ndarray, size: int, what: Any) -> np.ndarray:
        """Where in ``data`` accesses of ``size`` bytes begin."""
        address = address.astype(np.int64)
        if (address % size).any():
            raise Fault(f"misaligned shared access of {size} bytes at {address[address % size != 0][0]}: {what}")
        if address.size and (address.min() < BASE or address.max() + size > self.stride):
            raise Fault(f"out of bounds: shared {address.min()}..{address.max() + size - 1} of {self.stride}: {what}")
        return address + program * self.stride

    def met(self, programs: Any) -> None:
        """These programs' threads are all at a barrier."""
        self._clock += 1
        self._met[programs] = self._clock

    def read(self, places: np.ndarray, warp: np.ndarray, what: Any) -> np.ndarray:
        """uint8 [lanes, bytes] at places [lanes, bytes], for warps [lanes]."""
        state = self._state[places]
        if (state != WRITTEN).any():
            why = "a copy under way writes" if (state & COMING).any() else "nobody wrote"
            raise Fault(f"{why} shared byte {int(places[state != WRITTEN][0] % self.stride)}, which is read: {what}")
        if self._races:
            warps = np.broadcast_to(warp[:, None], places.shape)
            since = self._met[places // self.stride]
            self._raise_for((self._written[places] >= since) & (self._writer[places] != warps), places, "read", what)
            again = (self._read[places] >= since) & (self._reader[places] != warps)
            self._reader[places] = np.where(again, MANY, warps)
            self._read[places] = self._clock
        return self.data[places]

    def write(self, places: np.ndarray, values: np.ndarray, warp: np.ndarray, what: Any) -> None:
        """Write values [lanes, bytes]."""
        self.touch(places, warp, what)
        self.data[places] = values
        self._state[places] = WRITTEN

    def touch(self, places: np.ndarray, warp: np.ndarray, what: Any) -> None:
        """A write that may race: now, or of a copy that begins."""
        if self._races:
            self._clock += 1
            warps = np.broadcast_to(warp[:, None], places.shape)
            since = self._met[places // self.stride]
            others = (self._written[places] >= since) & (self._writer[places] != warps)
            others |= (self._read[places] >= since) & (self._reader[places] != warps)
            self._raise_for(others, places, "written", what)
            self._writer[places], self._written[places] = warps, self._clock

    def _raise_for(self, wrong: np.ndarray, places: np.ndarray, how: str, what: Any) -> None:
        if wrong.any():
            at = places[wrong][0]
            raise Fault(
                f"race: shared byte {int(at % self.stride)}, {how} here, was written by warp {self._writer[at]} and "
                f"read by warp {self._reader[at]} (-2: several) since the last barrier: {what}"
            )

    def begin_copy(self, places: np.ndarray, warp: np.ndarray, what: Any) -> None:
        """A copy to these bytes begins: nobody may read them before it has ended."""
        self.touch(places, warp, what)
        self._state[places] |= COMING

    def snapshot(self, places: np.ndarray) -> np.ndarray:
        """When each byte was last written: of an asynchronous read that begins."""
        return self._written[places].copy() if self._races else np.zeros(0)

    def end_read(self, places: np.ndarray, before: np.ndarray, what: Any) -> None:
        """An asynchronous read ends: nobody may have written since it began."""
        if self._races:
            self._raise_for(self._written[places] != before, places, "read by a product under way", what)
