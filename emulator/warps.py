"""Instructions in which the lanes of a warp see each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator.machine import Mask, Run, Threads, constant, instruction, items, reader, whole_warps, wide, write
from emulator.parse import SINK, Fault, Instruction, Program
from emulator.values import TYPES, U32, extreme


def _members(one: Instruction, operand: Any) -> Any:
    """A check that the lanes that an operand names are those that are there; it gives them, bool [warps, 32]."""
    read = reader(one, operand, "u32")

    def check(threads: Threads, mask: Mask) -> np.ndarray:
        there = threads.active(mask).reshape(-1, 32)
        given = np.take_along_axis(wide(read(threads), threads.count).reshape(-1, 32), there.argmax(1)[:, None], 1)
        if (there != (given >> np.arange(32, dtype=U32) & U32(1) == 1))[there.any(1)].any():
            raise Fault(f"its members are not the lanes that are there: {one}")
        return there

    return check


@instruction("shfl.sync.(bfly|idx|up|down).b32")
def shuffle(program: Program, one: Instruction, mode: str) -> Run:
    """Another lane's value; all lanes of a warp take part."""
    targets, source, by, clamp, members = one.operands
    read, read_step, (value, inside) = reader(one, source, "b32"), reader(one, by, "u32"), [*items(targets), SINK][:2]
    segment, bound = constant(one, clamp) >> 8 & 31, constant(one, clamp) & 31
    if constant(one, members) not in (-1, 0xFFFFFFFF):
        raise one.unsupported()
    known: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by how many threads: whom each reads, and whether in range

    def others(threads: Threads) -> tuple[np.ndarray, np.ndarray]:
        lane, step = threads.lane, read_step(threads).astype(np.int64) & 31
        last = (lane & segment) | (bound & ~segment)
        other = {
            "bfly": lane ^ step,
            "up": lane - step,
            "down": lane + step,
            "idx": (lane & segment) | (step & ~segment),
        }[mode]
        is_inside = other >= last if mode == "up" else other <= last
        return np.arange(threads.count) + np.where(is_inside, other - lane, 0), is_inside

    def run(threads: Threads, mask: Mask) -> None:
        whole_warps(threads, mask, one)
        found = known.get(threads.count) or others(threads)
        if isinstance(by, int):
            known[threads.count] = found
        write(threads, mask, value, wide(read(threads), threads.count)[found[0]])
        write(threads, mask, inside, found[1])

    return run


@instruction("redux.sync.(add|min|max).([su]32|f32)")
def reduce_warp(program: Program, one: Instruction, name: str, kind: str) -> Run:
    """One number of a warp's, which all of its lanes that are there get."""
    target, source, members = one.operands
    read, check = reader(one, source, kind), _members(one, members)
    if kind == "f32" and name == "add":
        raise one.unsupported()

    def run(threads: Threads, mask: Mask) -> None:
        there = check(threads, mask)
        values = wide(read(threads), threads.count).reshape(-1, 32)
        if name == "add":
            found = np.where(there, values, 0).sum(1, dtype=TYPES[kind])
        else:  # one value more than once changes nothing
            values = np.where(there, values, np.take_along_axis(values, there.argmax(1)[:, None], 1))
            found = values[:, 0]
            for place in range(1, 32):
                if kind == "f32":
                    found = extreme(found, values[:, place], name == "min", False)
                else:
                    found = (np.minimum if name == "min" else np.maximum)(found, values[:, place])
        write(threads, mask, target, np.repeat(found, 32))

    return run


@instruction("vote.sync.ballot.b32")
def ballot(program: Program, one: Instruction) -> Run:
    """A bit for each lane whose predicate holds."""
    target, source, members = one.operands
    read, check = reader(one, source, "pred"), _members(one, members)

    def run(threads: Threads, mask: Mask) -> None:
        said = check(threads, mask) & wide(read(threads), threads.count).reshape(-1, 32)
        write(threads, mask, target, np.repeat(np.packbits(said, 1, "little").view(U32)[:, 0], 32))

    return run


@instruction("elect.sync")
def elect(program: Program, one: Instruction) -> Run:
    """The lowest lane that is there."""
    (target, is_chosen), members = one.operands
    check = _members(one, members)

    def run(threads: Threads, mask: Mask) -> None:
        first = np.repeat(check(threads, mask).argmax(1), 32)
        write(threads, mask, target, first.astype(U32))
        write(threads, mask, is_chosen, threads.lane == first)

    return run
