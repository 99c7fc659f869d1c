"""Execute loads, stores, atomics, and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.machine import Threads, instruction
from emulator.memory import ATOMIC, COMING
from emulator.parse import Instruction
from emulator.values import TYPES, flushed

# in names: how many elements of which type; what an atomic of global memory does
ELEMENTS = "(?:.v([24]))?.(b8|b16|b32|b64)"
GLOBAL = "(global).gpu.(?:relaxed|acq_rel).(add|exch|max(?=.[su])).([bsuf](?:32|64))"


def _reach(threads: Threads, space: str, lanes: Any, address: np.ndarray, size: int, one: Instruction) -> Any:
    """Return (the memory of a space, where lanes reach into it, their warps), and count the access if asked to."""
    launch, at, warps = threads.launch, address[lanes], threads.warp[lanes]
    counts = launch.counts[one, space] if launch.options.counts and lanes.size else None
    if space == "global":
        if counts:
            counts.sectors(warps, at, size)
        return launch.memory, at, warps
    if counts:
        counts.wavefronts(warps, threads.lane[lanes], at, size)
    return launch.shared, launch.shared.places(at, threads.program[lanes], size, one), warps


def load(threads: Threads, space: str, lanes: Any, address: np.ndarray, size: int, one: Instruction) -> np.ndarray:
    """Return words [lanes, words of an access] of global or shared memory."""
    memory, at, warps = _reach(threads, space, lanes, address, size, one)
    return memory.load(at, size, warps, one)


def store(threads: Threads, space: str, lanes: Any, address: np.ndarray, values: Any, one: Instruction) -> None:
    """Write values [lanes, elements of an access]."""
    size = values.dtype.itemsize * values.shape[1]
    memory, at, warps = _reach(threads, space, lanes, address, size, one)
    memory.store(at, size, values.view(f"u{min(size, 8)}"), warps, one)


@instruction(f"ld.(global|shared)(?:.cg)?{ELEMENTS}", "{2}*{1} []")
def load_elements(threads: Threads, space: str, count: str, kind: str, address: np.ndarray) -> np.ndarray:
    """Load one, two or four elements a lane."""
    dtype = np.dtype(TYPES[kind])
    return load(threads, space, threads.lanes(), address, dtype.itemsize * int(count or 1), threads.one).view(dtype)


@instruction(f"st.(global|shared)(?:::cta)?{ELEMENTS}", "- [] {2}*{1}")
def store_elements(threads: Threads, space: str, count: str, kind: str, address: Any, values: np.ndarray) -> None:
    """Store one, two or four elements a lane."""
    lanes = threads.lanes()
    store(threads, space, lanes, address, values[lanes].reshape(lanes.size, -1), threads.one)


@instruction("ld.param.([bsuf](?:32|64))", "{0} =")
def parameter(threads: Threads, kind: str, place: Any) -> np.ndarray:
    """Return a parameter or its low half, the same for all lanes."""
    raw, dtype = threads.launch.parameters.get(place.base, b""), np.dtype(TYPES[kind])
    if len(raw) < dtype.itemsize or place.offset:
        raise threads.one.unsupported()
    return np.frombuffer(raw, dtype)[:1]


CHANGES: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x,
    "max": max,
    "exch": lambda old, x: x,
    "cas": lambda old, x, new: new if old == x else old,
    "add.f32": lambda old, x: flushed(flushed(old) + flushed(x)),  # in global memory, by the manual
}


@instruction(f"red.{GLOBAL}", "- [] {2}", pauses=True)
@instruction(f"atom.{GLOBAL}", "{2} [] {2}", pauses=True)
@instruction("atom.(global).relaxed.gpu.(cas).(b32)", "{2} [] {2} {2}", pauses=True)
@instruction("atom(?:.relaxed.sys)?.(shared).(add).(u32)", "{2} [] {2}", pauses=True)
def atomic(threads: Threads, space: str, name: str, kind: str, address: np.ndarray, *values: np.ndarray) -> np.ndarray:
    """Read, change and write, one lane after another, in a random order unless all threads run together."""
    dtype, lanes, one = np.dtype(TYPES[kind]), threads.lanes(), threads.one
    change, size = CHANGES.get(f"{name}.{kind}", CHANGES[name]), dtype.itemsize
    if threads.launch.options.schedule != "together":
        lanes = threads.launch.random.permutation(lanes)
    memory, at, warps = _reach(threads, space, lanes, address, size, one)
    warps = np.full_like(warps, ATOMIC)
    old, places = memory.load(at, size, warps, one).view(dtype)[:, 0], at.tolist()
    now, old_values = dict(zip(places, old, strict=True)), np.zeros(threads.count, dtype)
    for lane, place in zip(lanes, places, strict=True):
        old_values[lane] = now[place]
        now[place] = change(now[place], *(each[lane] for each in values))
    new = np.array([[now[place]] for place in places], dtype).view(f"u{size}")
    memory.store(at, size, new, warps, one)
    return old_values


# --- asynchronous copies ----------------------------------------------------------------------------------------------


@instruction("cp.async.cg.shared.global", "- [] [] 16 u32?")
def copy(threads: Threads, to: np.ndarray, source: np.ndarray, taken: Any = 16) -> None:
    """Copy 16 bytes from global to shared memory, or zeros; done as late as its thread waits for its group."""
    lanes, one, size = threads.lanes(), threads.one, 16
    taken = np.broadcast_to(taken, threads.count)
    reading_lanes = lanes[taken[lanes] > 0]
    if (taken[reading_lanes] != size).any():
        raise one.unsupported("part of a copy:")
    shared, units, warps = _reach(threads, "shared", lanes, to, size, one)
    shared.touch(units, size, warps, one, after=COMING)

    def land() -> None:
        raw = np.zeros((threads.count, 2), np.uint64)
        if reading_lanes.size:
            raw[reading_lanes] = load(threads, "global", reading_lanes, source, size, one)
        shared.touch(units, size, warps, one, before=COMING)
        shared.store(units, size, raw[lanes], warps, one)

    threads.begun["cp.async"][-1].append((land, frozenset()))


for name in ("(cp.async).commit_group", "(wgmma).commit_group.sync.aligned"):  # what has begun becomes a group
    instruction(name)(lambda threads, name: threads.begun[name].append([]))


@instruction("(cp.async).wait_group", "- int")
@instruction("(wgmma).wait_group.sync.aligned", "- int")
def wait(threads: Threads, name: str, most: int) -> None:
    """End the oldest groups, until at most ``most`` are under way."""
    while len(threads.begun[name]) - 1 > most:
        for end, _ in threads.begun[name].pop(0):
            end()
    threads.under_way = frozenset().union(*(targets for each in threads.begun["wgmma"] for _, targets in each))
