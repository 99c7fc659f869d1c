"""Instructions in which the lanes of a warp see each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator.machine import Mask, Threads, instruction, items, operand_type, reader, whole_warps, wide, write
from emulator.parse import SINK, Fault, Instruction, Program
from emulator.values import U32, extreme

ALL = (-1, 0xFFFFFFFF)


@instruction("shfl")
def shuffle(program: Program, one: Instruction) -> Any:
    """Another lane's value; all lanes of a warp take part."""
    one.allow("sync", "bfly", "idx", "up", "down")
    mode, (target, source, by, clamp, members) = one.parts[2], one.operands
    if getattr(members, "value", None) not in ALL:
        raise one.unsupported()
    read, read_by, read_clamp = reader(one, source, "b", 32), reader(one, by, "u", 32), reader(one, clamp, "u", 32)
    value, inside = (*items(target), SINK)[:2]

    def run(threads: Threads, mask: Mask) -> None:
        whole_warps(threads, mask, one)
        lane, step = threads.lane, np.asarray(read_by(threads)).astype(np.int64) & 31
        bound = np.asarray(read_clamp(threads)).astype(np.int64)
        segment = (bound >> 8) & 31
        last = (lane & segment) | (bound & 31 & ~segment)
        if mode == "idx":
            other = (lane & segment) | (step & ~segment)
        else:
            other = lane ^ step if mode == "bfly" else lane - step if mode == "up" else lane + step
        is_inside = other >= last if mode == "up" else other <= last
        other = np.where(is_inside, other, lane)
        write(threads, mask, value, wide(read(threads), threads.count)[np.arange(threads.count) - lane + other])
        write(threads, mask, inside, is_inside)

    return run


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux")
def reduce_warp(program: Program, one: Instruction) -> Any:
    """One number of a warp's, which all of its lanes get."""
    one.allow("sync", "abs", "NaN", *REDUCTIONS)
    (kind, bits), name = operand_type(one), one.parts[2]
    read = reader(one, one.operands[1], kind if kind in "sf" else "u", bits)
    read_members = reader(one, one.operands[2], "u", 32)

    def run(threads: Threads, mask: Mask) -> None:
        there = threads.active(mask).reshape(-1, 32)
        members = wide(read_members(threads), threads.count).reshape(-1, 32) >> np.arange(32, dtype=U32) & U32(1) == 1
        if (there != members)[there.any(1)].any():
            raise Fault(f"its members are not the lanes that are there: {one}")
        values = wide(read(threads), threads.count).reshape(-1, 32)
        values = np.abs(values) if one.has("abs") else values
        first = np.take_along_axis(values, there.argmax(1)[:, None], 1)
        if name in ("min", "max", "and", "or"):  # one value more than once changes nothing
            values = np.where(there, values, first)
        elif not there[there.any(1)].all():
            raise one.unsupported("some lanes only")
        found = values[:, 0]
        for place in range(1, 32):
            if kind == "f":
                found = extreme(found, values[:, place], name == "min", one.has("NaN"))
            else:
                found = REDUCTIONS[name](found, values[:, place])
        write(threads, mask, one.operands[0], np.repeat(found, 32))

    return run


@instruction("vote", "activemask", "elect")
def vote(program: Program, one: Instruction) -> Any:
    """What the lanes of a warp that are there say."""
    one.allow("sync", "any", "all", "ballot")
    base, targets = one.parts[0], items(one.operands[0])
    read = reader(one, one.operands[1], "p", 1) if base == "vote" else None

    def run(threads: Threads, mask: Mask) -> None:
        there = threads.active(mask).reshape(-1, 32)
        said = there if read is None else there & wide(read(threads), threads.count).reshape(-1, 32)
        if base == "elect":
            first = np.repeat(there.argmax(1), 32)
            write(threads, mask, targets[0], first.astype(U32))
            write(threads, mask, targets[1], threads.lane == first)
        elif one.has("any", "all"):
            found = said.any(1) if one.has("any") else (said | ~there).all(1)
            write(threads, mask, targets[0], np.repeat(found, 32))
        else:
            bits = (said.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(U32)
            write(threads, mask, targets[0], np.repeat(bits, 32))

    return run
