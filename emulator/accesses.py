"""Loads, stores, atomics, and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.machine import Mask, Run, Threads, check_target, constant, instruction, items, reader, wide, write
from emulator.memory import COMING
from emulator.parse import SINK, Instruction, Program
from emulator.values import TYPES, flushed

PAUSE = "pause"  # what a closure returns where other warps may run first


def _reach(threads: Threads, space: str, lanes: Any, address: np.ndarray, size: int, one: Instruction) -> Any:
    """(the memory of a space, where lanes reach into it, their warps); counted where accesses are."""
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
    """Words [lanes, words of an access] of global or shared memory."""
    memory, at, warps = _reach(threads, space, lanes, address, size, one)
    return memory.load(at, size, warps, one)


def store(threads: Threads, space: str, lanes: Any, address: np.ndarray, values: Any, one: Instruction) -> None:
    """Write values [lanes, elements of an access]."""
    size = values.dtype.itemsize * values.shape[1]
    memory, at, warps = _reach(threads, space, lanes, address, size, one)
    memory.store(at, size, values.view(f"u{min(size, 8)}"), warps, one)


ELEMENTS = "(?:.v([248]))?.([bsuf](?:8|16|32|64))"


@instruction(f"(ld).(global|shared)(?:.nc|.cg|.volatile)?{ELEMENTS}", f"(st).(global|shared)(?:::cta)?{ELEMENTS}")
def access(program: Program, one: Instruction, name: str, space: str, count: str | None, kind: str) -> Run:
    """A load or a store of one to eight elements."""
    memory, values = one.operands if name == "st" else one.operands[::-1]
    address, values, dtype = reader(one, memory, "[]"), items(values), TYPES[kind]
    size = np.dtype(dtype).itemsize * len(values)
    if len(values) != int(count or 1) or size > 32:
        raise one.unsupported()
    if name == "ld":
        check_target(one, values, kind)
    read = reader(one, values, kind) if name == "st" else None

    def run(threads: Threads, mask: Mask) -> None:
        lanes, at = threads.lanes(mask), address(threads)
        if read:
            store(threads, space, lanes, at, read(threads)[lanes], one)
        else:
            write(threads, mask, values, load(threads, space, lanes, at, size, one).view(dtype))

    return run


@instruction("ld.param.([bsuf](?:32|64))")
def parameter(program: Program, one: Instruction, kind: str) -> Run:
    """A parameter or its low half, the same for all lanes."""
    target, (name, offset) = one.operands
    if program.parameters.get(name, 0) < np.dtype(TYPES[kind]).itemsize or offset:
        raise one.unsupported()
    check_target(one, target, kind)
    return lambda threads, mask: write(
        threads, mask, target, np.frombuffer(threads.launch.parameters[name], TYPES[kind])[:1]
    )


CHANGES: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x,
    "max": max,
    "exch": lambda old, x: x,
    "cas": lambda old, x, new: new if old == x else old,
    "add.f32": lambda old, x: flushed(flushed(old) + flushed(x)),  # in global memory, by the manual
}
ATOMIC = -3  # for all warps' atomics, which do not race with each other


@instruction(
    "(atom|red).(global).gpu.(?:relaxed|acq_rel).(add|max|exch).([bsuf](?:32|64))",
    "(atom).(global).relaxed.gpu.(cas).(b32)",
    "(atom)(?:.relaxed.sys)?.(shared).(add).(u32)",
)
def atomic(program: Program, one: Instruction, base: str, space: str, name: str, kind: str) -> Run:
    """Read, change and write, one lane after another, in a random order where warps run in one."""
    target, memory, *given = one.operands if base == "atom" else (SINK, *one.operands)
    reads, address, dtype = [reader(one, item, kind) for item in given], reader(one, memory, "[]"), TYPES[kind]
    if len(reads) != 1 + (name == "cas") or (name == "max" and kind[0] not in "su"):
        raise one.unsupported()
    change, size = CHANGES.get(f"{name}.{kind}", CHANGES[name]), np.dtype(dtype).itemsize

    def run(threads: Threads, mask: Mask) -> Any:
        lanes = threads.lanes(mask)
        if threads.launch.options.schedule != "together":
            lanes = threads.launch.random.permutation(lanes)
        memory, at, warps = _reach(threads, space, lanes, address(threads), size, one)
        warps = np.full_like(warps, ATOMIC)
        old, places = memory.load(at, size, warps, one).view(dtype)[:, 0], at.tolist()
        now, found = dict(zip(places, old, strict=True)), np.zeros(threads.count, dtype)
        values = [wide(read(threads), threads.count) for read in reads]
        for lane, place in zip(lanes, places, strict=True):
            found[lane] = now[place]
            now[place] = change(now[place], *(each[lane] for each in values))
        new = np.array([[now[place]] for place in places], dtype).view(f"u{size}")
        memory.store(at, size, new, warps, one)
        write(threads, mask, items(target)[0], found)
        return PAUSE

    return run


# --- asynchronous copies ----------------------------------------------------------------------------------------------


@instruction("cp.async.cg.shared.global")
def copy(program: Program, one: Instruction) -> Run:
    """16 bytes from global to shared memory, or zeros there; done as late as its thread waits for its group."""
    to, source, *sizes = one.operands
    into, at, size = reader(one, to, "[]"), reader(one, source, "[]"), constant(one, sizes[0])
    read_size = reader(one, sizes[-1], "u32")
    if size != 16:
        raise one.unsupported()

    def run(threads: Threads, mask: Mask) -> None:
        lanes, taken, addresses = threads.lanes(mask), wide(read_size(threads), threads.count), at(threads)
        some = lanes[taken[lanes] > 0]
        if (taken[some] != size).any():
            raise one.unsupported("part of a copy:")
        shared, units, warps = _reach(threads, "shared", lanes, into(threads), size, one)
        shared.touch(units, size, warps, one, after=COMING)

        def land() -> None:
            raw = np.zeros((threads.count, 2), np.uint64)
            if some.size:
                raw[some] = load(threads, "global", some, addresses, size, one)
            shared.touch(units, size, warps, one, before=COMING)
            shared.store(units, size, raw[lanes], warps, one)

        threads.copies[-1].append((land, frozenset()))

    return run


@instruction("(cp).async.(commit|wait)_group", "(wgmma).(commit|wait)_group.sync.aligned")
def group(program: Program, one: Instruction, name: str, what: str) -> Run:
    """What has begun becomes a group; waiting ends the oldest until as many as said are under way."""
    most = constant(one, one.operands[0]) if what == "wait" else 0

    def run(threads: Threads, mask: Mask) -> None:
        begun = threads.copies if name == "cp" else threads.products
        if what == "commit":
            begun.append([])
        while what == "wait" and len(begun) - 1 > most:
            for end, _ in begun.pop(0):
                end()
        threads.under_way = frozenset().union(*(registers for each in threads.products for _, registers in each))

    return run
