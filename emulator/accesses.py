"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.integers import PAUSE
from emulator.machine import (
    Mask,
    Threads,
    address_of,
    instruction,
    items,
    operand_type,
    reader,
    whole_warps,
    wide,
    write,
)
from emulator.parse import Address, Instruction, Program, Symbol
from emulator.values import UNSIGNED, dtype_of

CACHE = (
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "volatile",
    "weak",
    "gpu",
    "cta",
    "sys",
    "nc",
    "ca",
    "cg",
    "cs",
    "cv",
)
HINTS = ("L1::evict_last", "L1::evict_first", "L1::no_allocate", "L2::cache_hint", "L2::128B", "L2::256B", "wb", "wt")


def lanes_of(threads: Threads, mask: Mask) -> np.ndarray:
    """The numbers of those that take part."""
    return np.arange(threads.count) if mask is None else np.flatnonzero(mask)


def shared_places(threads: Threads, lanes: Any, address: np.ndarray, size: int, what: Any) -> np.ndarray:
    """Each byte's place [lanes, size] in shared memory."""
    first = threads.launch.shared.places(address[lanes], threads.program[lanes], size, what)
    return first[:, None] + np.arange(size)


def count_wavefronts(threads: Threads, key: Any, lanes: Any, address: np.ndarray, size: int) -> None:
    """Count a shared access, where accesses are counted."""
    if threads.launch.options.counts and lanes.size:
        count = threads.launch.counts[key]
        count.wavefronts(threads.warp[lanes], threads.lane[lanes], address[lanes], size)


def count_sectors(threads: Threads, key: Any, lanes: Any, address: np.ndarray, size: int) -> None:
    """Count a global access, where accesses are counted."""
    if threads.launch.options.counts and lanes.size:
        threads.launch.counts[key].sectors(threads.warp[lanes], address[lanes], size)


def space_of(one: Instruction) -> str:
    """global, shared or param."""
    spaces = [part.split("::")[0] for part in one.parts[1:]]
    found = [space for space in spaces if space in ("global", "shared", "param", "local", "const")]
    if len(found) != 1 or found[0] in ("local", "const"):
        raise one.unsupported()
    return found[0]


@instruction("ld", "st")
def access(program: Program, one: Instruction) -> Any:
    """A load or a store of one to four elements, 16 bytes at most."""
    one.allow("global", "shared", "shared::cta", "param", "v2", "v4", "v8", "b128", *CACHE, *HINTS)
    space, (kind, bits), is_load = space_of(one), operand_type(one), one.parts[0] == "ld"
    memory, values = one.operands[:2] if not is_load else one.operands[1::-1]
    values = items(values)
    size = bits // 8 * len(values)
    if space == "param":
        return _parameter(one, memory, values, kind, bits)
    if size not in (1, 2, 4, 8, 16, 32):
        raise one.unsupported()
    address = address_of(one, memory)
    reads = [] if is_load else [reader(one, item, "b", bits) for item in values]

    def load(threads: Threads, mask: Mask) -> None:
        lanes, at = lanes_of(threads, mask), address(threads)
        if not lanes.size:
            return
        if space == "shared":
            count_wavefronts(threads, one, lanes, at, size)
            places = shared_places(threads, lanes, at, size, one)
            raw = threads.launch.shared.read(places, threads.warp[lanes], one)
        else:
            count_sectors(threads, one, lanes, at, size)
            raw = threads.launch.memory.load(at[lanes], size, one)
        parts = np.zeros((threads.count, len(values)), UNSIGNED[bits])
        parts[lanes] = np.ascontiguousarray(raw).view(UNSIGNED[bits])
        for place, target in enumerate(values):
            write(threads, mask, target, np.ascontiguousarray(parts[:, place]), kind)

    def store(threads: Threads, mask: Mask) -> None:
        lanes, at = lanes_of(threads, mask), address(threads)
        if not lanes.size:
            return
        raw = np.stack([wide(read(threads), threads.count)[lanes] for read in reads], 1).view(np.uint8)
        if space == "shared":
            count_wavefronts(threads, one, lanes, at, size)
            places = shared_places(threads, lanes, at, size, one)
            threads.launch.shared.write(places, raw, threads.warp[lanes], one)
        else:
            count_sectors(threads, one, lanes, at, size)
            threads.launch.memory.store(at[lanes], raw, one)

    return load if is_load else store


def _parameter(one: Instruction, memory: Address, values: Any, kind: str, bits: int) -> Any:
    if not isinstance(memory.base, Symbol):
        raise one.unsupported()

    def parameter(threads: Threads, mask: Mask) -> None:
        raw = threads.launch.parameters[memory.base.name]
        for place, target in enumerate(values):
            first = memory.offset + place * bits // 8
            write(threads, mask, target, np.frombuffer(raw[first : first + bits // 8], UNSIGNED[bits])[0], kind)

    return parameter


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "exch": lambda old, x: x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
}


@instruction("atom", "red")
def atomic(program: Program, one: Instruction) -> Any:
    """Read, change and write, one lane after another, in a random order where warps run in one."""
    one.allow("global", "shared", "shared::cta", "cas", "noftz", *CHANGES, *CACHE)
    (kind, bits), space, name = operand_type(one), space_of(one), one.one_of((*CHANGES, "cas"))
    target, memory, *given = one.operands if one.parts[0] == "atom" else (None, *one.operands)
    reads = [reader(one, item, kind, bits) for operand in given for item in items(operand)]
    if len(reads) != 1 + (name == "cas"):
        raise one.unsupported()
    address, dtype = address_of(one, memory), dtype_of(kind, bits)

    def run(threads: Threads, mask: Mask) -> Any:
        lanes, at = lanes_of(threads, mask), address(threads)
        if threads.launch.options.schedule == "warps":
            lanes = threads.launch.random.permutation(lanes)
        first, *rest = (wide(read(threads), threads.count)[lanes] for read in reads)

        def change(lane: int, old: Any) -> Any:
            if name == "cas":
                return rest[0][lane] if old == first[lane] else old
            return CHANGES[name](old, first[lane])

        if space == "shared":
            found = _shared_atomic(threads, lanes, at, dtype, change, one)
        else:
            count_sectors(threads, one, lanes, at, bits // 8)
            found = threads.launch.memory.update(at[lanes], dtype, change, one)
        if target is not None:
            values = np.zeros(threads.count, dtype)
            values[lanes] = found
            write(threads, mask, items(target)[0], values)
        return PAUSE

    return run


def _shared_atomic(threads: Threads, lanes: Any, address: Any, dtype: Any, change: Any, what: Any) -> np.ndarray:
    """Atomics do not race with each other: they are not noted as a warp's reads and writes."""
    places = shared_places(threads, lanes, address, np.dtype(dtype).itemsize, what)
    out, data = np.empty(lanes.size, dtype), threads.launch.shared.data
    for lane in range(lanes.size):
        out[lane] = old = np.ascontiguousarray(data[places[lane]]).view(dtype)[0]
        data[places[lane]] = np.array([change(lane, old)], dtype).view(np.uint8)
    return out


@instruction("cp")
def copy(program: Program, one: Instruction) -> Any:
    """cp.async: from global to shared memory, done at the latest when its thread waits for its group."""
    one.allow("async", "ca", "cg", "shared", "shared::cta", "global", "commit_group", "wait_group", "wait_all", *HINTS)
    if one.has("commit_group", "wait_group", "wait_all"):
        return groups(one, "copies", "copy_groups")
    to, source, size = address_of(one, one.operands[0]), address_of(one, one.operands[1]), one.operands[2].value
    read_size = reader(one, one.operands[3], "u", 32) if len(one.operands) > 3 else None

    def run(threads: Threads, mask: Mask) -> None:
        lanes, into, at = lanes_of(threads, mask), to(threads), source(threads)
        if not lanes.size:
            return
        taken = wide(size if read_size is None else read_size(threads), threads.count).astype(np.int64)
        if not np.isin(taken[lanes], (0, size)).all():
            raise one.unsupported("part of a copy")
        count_wavefronts(threads, (one, "shared"), lanes, into, size)
        some = lanes[taken[lanes] > 0]
        count_sectors(threads, one, some, at, size)
        places = shared_places(threads, lanes, into, size, one)
        threads.launch.shared.begin_copy(places, threads.warp[lanes], one)

        def land() -> None:
            raw = np.zeros((threads.count, size), np.uint8)
            if some.size:
                raw[some] = threads.launch.memory.load(at[some], size, one)
            threads.launch.shared.write(places, raw[lanes], threads.warp[lanes], one)

        threads.copies.append(land)
        if not threads.launch.options.late:
            threads.copies.pop()()

    return run


def groups(one: Instruction, begun: str, kept: str) -> Any:
    """commit_group and wait_group of asynchronous work: what has begun becomes a group, and waiting ends the oldest."""
    if one.has("commit_group"):

        def commit(threads: Threads, mask: Mask) -> None:
            getattr(threads, kept).append(getattr(threads, begun))
            setattr(threads, begun, [])

        return commit
    most = one.operands[0].value if one.operands else 0

    def wait(threads: Threads, mask: Mask) -> None:
        under_way = getattr(threads, kept)
        while len(under_way) > most:
            for end in under_way.pop(0):
                end()
        if not under_way and kept == "product_groups":
            threads.under_way = frozenset()

    return wait


@instruction("ldmatrix", "stmatrix")
def matrix(program: Program, one: Instruction) -> Any:
    """8 x 8 matrices of 16-bit elements, each row at the address of one lane."""
    one.allow("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    if one.parts[-1] != "b16" or not one.has("m8n8"):
        raise one.unsupported()
    is_load, count = one.parts[0] == "ldmatrix", int(one.one_of(("x1", "x2", "x4"))[1:])
    memory, values = one.operands if not is_load else one.operands[::-1]
    address, values = address_of(one, memory), items(values)
    reads = [] if is_load else [reader(one, item, "b", 32) for item in values]
    lane = np.arange(32)

    def run(threads: Threads, mask: Mask) -> None:
        warps = whole_warps(threads, mask, one)
        lanes = np.flatnonzero(np.repeat(warps, 32))
        rows = lanes[lanes % 32 < 8 * count]
        at = address(threads)
        count_wavefronts(threads, one, rows, at, 16)
        starts = shared_places(threads, rows, at, 16, one)[:, 0].reshape(-1, count, 8)
        for place, value in enumerate(values):
            if one.has("trans"):
                pair = [starts[:, place, lane % 4 * 2 + half] + lane // 4 * 2 for half in (0, 1)]
                places = np.stack([pair[0], pair[0] + 1, pair[1], pair[1] + 1], -1).reshape(-1, 4)
            else:
                places = ((starts[:, place, lane // 4] + lane % 4 * 4)[..., None] + np.arange(4)).reshape(-1, 4)
            if is_load:
                found = np.zeros((threads.count, 4), np.uint8)
                found[lanes] = threads.launch.shared.read(places, threads.warp[lanes], one)
                write(threads, mask, value, found.view(np.uint32).reshape(-1))
            else:
                raw = wide(reads[place](threads), threads.count)[lanes].view(np.uint8).reshape(-1, 4)
                threads.launch.shared.write(places, raw, threads.warp[lanes], one)

    return run
