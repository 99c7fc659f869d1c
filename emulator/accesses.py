"""Loads, stores, atomics, asynchronous copies, and matrices between shared memory and registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.machine import (
    Mask,
    Run,
    Threads,
    address_of,
    check_target,
    constant,
    instruction,
    items,
    reader,
    whole_warps,
    wide,
    write,
)
from emulator.parse import SINK, Instruction, Program
from emulator.values import TYPES, flushed

PAUSE = "pause"  # what a closure returns where other warps may run first


def _shared_units(threads: Threads, lanes: Any, address: np.ndarray, size: int, one: Instruction) -> np.ndarray:
    at = address[lanes]
    if threads.launch.options.counts:
        threads.launch.counts[one, "shared"].wavefronts(threads.warp[lanes], threads.lane[lanes], at, size)
    return threads.launch.shared.places(at, threads.program[lanes], size, one)


def read_shared(
    threads: Threads, lanes: Any, address: np.ndarray, size: int, one: Instruction, warp: int | None = None
) -> np.ndarray:
    """Words [lanes, words of an access] of shared memory."""
    units, warps = _shared_units(threads, lanes, address, size, one), threads.warp[lanes]
    return threads.launch.shared.read(units, size, warps if warp is None else np.full_like(warps, warp), one)


def write_shared(
    threads: Threads, lanes: Any, address: np.ndarray, values: np.ndarray, one: Instruction, warp: int | None = None
) -> None:
    """Write values [lanes, elements of an access]."""
    size, warps = values.dtype.itemsize * values.shape[1], threads.warp[lanes]
    units, warps = (
        _shared_units(threads, lanes, address, size, one),
        warps if warp is None else np.full_like(warps, warp),
    )
    threads.launch.shared.write(units, size, values.view(f"u{min(size, 8)}"), warps, one)


def _count_sectors(threads: Threads, lanes: Any, address: np.ndarray, size: int, one: Instruction) -> None:
    if threads.launch.options.counts and lanes.size:
        threads.launch.counts[one, "global"].sectors(threads.warp[lanes], address[lanes], size)


ELEMENTS = "(?:.v([248]))?.([bsuf](?:8|16|32|64))"


@instruction(f"(ld).(global|shared)(?:.nc|.cg|.volatile)?{ELEMENTS}", f"(st).(global|shared)(?:::cta)?{ELEMENTS}")
def access(program: Program, one: Instruction, name: str, space: str, count: str | None, kind: str) -> Run:
    """A load or a store of one to eight elements."""
    memory, values = one.operands if name == "st" else one.operands[::-1]
    address, values, dtype = address_of(one, memory), items(values), TYPES[kind]
    size = np.dtype(dtype).itemsize * len(values)
    if len(values) != int(count or 1) or size > 32:
        raise one.unsupported()
    reads = [reader(one, item, kind) for item in values] if name == "st" else []
    for target in values if name == "ld" else ():
        check_target(one, target, np.dtype(dtype).itemsize * 8)

    def load(threads: Threads, mask: Mask) -> None:
        lanes, at = threads.lanes(mask), address(threads)
        if space == "shared":
            raw = read_shared(threads, lanes, at, size, one)
        else:
            _count_sectors(threads, lanes, at, size, one)
            raw = threads.launch.memory.load(at[lanes], size, one)
        raw = raw.view(dtype)
        for place, target in enumerate(values):
            part = np.ascontiguousarray(raw[:, place])
            if mask is not None:
                part = np.zeros(threads.count, dtype)
                part[lanes] = raw[:, place]
            write(threads, mask, target, part)

    def store(threads: Threads, mask: Mask) -> None:
        lanes, at = threads.lanes(mask), address(threads)
        raw = np.stack([wide(read(threads), threads.count)[lanes] for read in reads], 1)
        if space == "shared":
            write_shared(threads, lanes, at, raw, one)
        else:
            _count_sectors(threads, lanes, at, size, one)
            threads.launch.memory.store(at[lanes], raw.view(f"u{min(size, 8)}"), size, one)

    return load if name == "ld" else store


@instruction("ld.param.([bsuf](?:32|64))")
def parameter(program: Program, one: Instruction, kind: str) -> Run:
    """A parameter, the same for all lanes."""
    target, (base, offset) = one.operands
    if program.parameters.get(getattr(base, "name", "")) != np.dtype(TYPES[kind]).itemsize or offset:
        raise one.unsupported()
    check_target(one, target, int(kind[1:]))
    return lambda threads, mask: write(
        threads, mask, target, np.frombuffer(threads.launch.parameters[base.name], TYPES[kind])[0]
    )


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "max": max,
    "exch": lambda old, x: x,
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
    reads, address, dtype = [reader(one, item, kind) for item in given], address_of(one, memory), TYPES[kind]
    if len(reads) != 1 + (name == "cas") or (name == "max" and kind[0] not in "su"):
        raise one.unsupported()
    function, size = CHANGES.get(f"{name}.{kind}", CHANGES.get(name)), np.dtype(dtype).itemsize

    def run(threads: Threads, mask: Mask) -> Any:
        lanes, at, launch = threads.lanes(mask), address(threads), threads.launch
        if launch.options.schedule != "together":
            lanes = launch.random.permutation(lanes)
        if space == "shared":
            old = read_shared(threads, lanes, at, size, one, ATOMIC)
        else:
            _count_sectors(threads, lanes, at, size, one)
            old = launch.memory.load(at[lanes], size, one)
        first, *rest = (wide(read(threads), threads.count)[lanes] for read in reads)
        owner = threads.program[lanes] if space == "shared" else np.zeros_like(lanes)
        places = [*zip(owner.tolist(), at[lanes].tolist(), strict=True)]
        now = dict(zip(places, old.view(dtype)[:, 0], strict=True))
        found = np.zeros(threads.count, dtype)
        for place, (lane, where) in enumerate(zip(lanes, places, strict=True)):
            found[lane] = before = now[where]
            if function is None:
                now[where] = rest[0][place] if before == first[place] else before
            else:
                now[where] = function(before, first[place])
        new = np.array([[now[where]] for where in places], dtype)
        if space == "shared":
            write_shared(threads, lanes, at, new, one, ATOMIC)
        else:
            launch.memory.store(at[lanes], new.view(f"u{size}"), size, one)
        write(threads, mask, items(target)[0], found)
        return PAUSE

    return run


# --- asynchronous copies ----------------------------------------------------------------------------------------------


@instruction("cp.async.cg.shared.global")
def copy(program: Program, one: Instruction) -> Run:
    """From global to shared memory, or zeros there; done at the latest when its thread waits for its group."""
    to, source, size = (
        address_of(one, one.operands[0]),
        address_of(one, one.operands[1]),
        constant(one, one.operands[2]),
    )
    read_size = reader(one, one.operands[3], "u32") if len(one.operands) > 3 else lambda threads: np.uint32(size)
    if size != 16:
        raise one.unsupported()

    def run(threads: Threads, mask: Mask) -> None:
        lanes, into, at, shared = threads.lanes(mask), to(threads), source(threads), threads.launch.shared
        taken = wide(read_size(threads), threads.count)[lanes]
        if ((taken != 0) & (taken != size)).any():
            raise one.unsupported("part of a copy:")
        units, warps, some = _shared_units(threads, lanes, into, size, one), threads.warp[lanes], taken > 0
        _count_sectors(threads, lanes[some], at, size, one)
        shared.touch(units, size, warps, one, state=2)

        def land() -> None:
            raw = np.zeros((lanes.size, 2), np.uint64)
            if some.any():
                raw[some] = threads.launch.memory.load(at[lanes[some]], size, one)
            shared.touch(units, size, warps, one, state=0)
            shared.write(units, size, raw, warps, one)

        if threads.launch.options.late:
            threads.copies[-1].append((land, frozenset()))
        else:
            land()

    return run


@instruction("(cp).async.(commit|wait)_group", "(wgmma).(commit|wait)_group.sync.aligned")
def group(program: Program, one: Instruction, name: str, what: str) -> Run:
    """What has begun becomes a group; waiting ends the oldest until as many as said are under way."""
    most = constant(one, one.operands[0]) if what == "wait" else 0

    def commit(threads: Threads, mask: Mask) -> None:
        (threads.copies if name == "cp" else threads.products).append([])

    def wait(threads: Threads, mask: Mask) -> None:
        begun = threads.copies if name == "cp" else threads.products
        while len(begun) - 1 > most:
            for end, _ in begun.pop(0):
                end()
        threads.under_way = frozenset().union(*(registers for each in threads.products for _, registers in each))

    return commit if what == "commit" else wait


# --- matrices ---------------------------------------------------------------------------------------------------------


@instruction("(ldmatrix|stmatrix).sync.aligned.m8n8.x([124])(.trans)?.shared.b16")
def matrix(program: Program, one: Instruction, name: str, count: str, transposes: str | None) -> Run:
    """8 x 8 matrices of 16 bits, each row at the address of one lane; a lane has two neighbours of a row."""
    memory, values = one.operands if name == "stmatrix" else one.operands[::-1]
    address, values = address_of(one, memory), items(values)
    reads = [reader(one, item, "b32") for item in values] if name == "stmatrix" else []
    if len(values) != int(count):
        raise one.unsupported()

    def run(threads: Threads, mask: Mask) -> None:
        lanes = np.flatnonzero(np.repeat(whole_warps(threads, mask, one), 32))
        rows, at, shape = lanes[lanes % 32 < 8 * len(values)], address(threads), (-1, len(values), 8, 8)
        if name == "ldmatrix":
            found = read_shared(threads, rows, at, 16, one).view(np.uint16).reshape(shape)
            found = np.ascontiguousarray(found.swapaxes(2, 3) if transposes else found).view(np.uint32)
            for place, value in enumerate(values):
                part = np.zeros(threads.count, np.uint32)
                part[lanes] = found[:, place].reshape(-1)
                write(threads, mask, value, part)
        else:
            given = np.stack([wide(read(threads), threads.count)[lanes].reshape(-1, 32) for read in reads], 1)
            halves = given.view(np.uint16).reshape(shape)
            halves = np.ascontiguousarray(halves.swapaxes(2, 3) if transposes else halves)
            write_shared(threads, rows, at, halves.reshape(rows.size, 8), one)

    return run
