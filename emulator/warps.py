"""Instructions in which the lanes of a warp see each other; all 32 take part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.machine import Mask, Run, Threads, constant, instruction, reader, whole_warps, wide, write
from emulator.parse import Instruction, Program
from emulator.values import U32, extreme


def _warps(one: Instruction, members: Any) -> Callable[[Threads, Mask], np.ndarray]:
    """Gives the lanes [warps, 32], of which the instruction has to name all."""
    read = reader(one, members, "u32")

    def lanes(threads: Threads, mask: Mask) -> np.ndarray:
        found, named = whole_warps(threads, mask, one), read(threads)
        if np.any((named[found] if np.ndim(named) else named) != U32(0xFFFFFFFF)):
            raise one.unsupported("some of a warp's lanes:")
        return found

    return lanes


@instruction("shfl.sync.(bfly|idx|up).b32")
def shuffle(program: Program, one: Instruction, mode: str) -> Run:
    """Another lane's value."""
    target, source, by, clamp, members = one.operands
    read, read_step, warps = reader(one, source, "b32"), reader(one, by, "u32"), _warps(one, members)
    if isinstance(target, list) or constant(one, clamp) != (0 if mode == "up" else 31):
        raise one.unsupported()

    def run(threads: Threads, mask: Mask) -> None:
        lanes, step = warps(threads, mask), read_step(threads) & U32(31)
        step, lane = step[lanes] if np.ndim(step) else step, np.arange(32, dtype=U32)
        other = {"bfly": lane ^ step, "idx": step + 0 * lane, "up": np.where(lane < step, lane, lane - step)}[mode]
        write(threads, mask, target, wide(read(threads), threads.count)[lanes[:, :1] + other].reshape(-1))

    return run


REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of [warps, 32]
    "add": lambda values: values.sum(1, dtype=values.dtype),
    "min": lambda values: values.min(1),
    "max": lambda values: values.max(1),
    "min.f32": lambda values: functools.reduce(lambda a, b: extreme(a, b, True, False), values.T),
    "max.f32": lambda values: functools.reduce(lambda a, b: extreme(a, b, False, False), values.T),
    "max.abs.f32": lambda values: REDUCTIONS["max.f32"](np.abs(values)),
    "ballot": lambda values: np.packbits(values, 1, "little").view(U32)[:, 0],  # a bit for each predicate that holds
}


@instruction(
    "redux.sync.(add|min|max).([su]32)", "redux.sync.(min.f32|max.f32|max.abs.f32)()", "vote.sync.(ballot).b32()"
)
def reduce_warp(program: Program, one: Instruction, name: str, kind: str) -> Run:
    """One number of a warp's, which all of its lanes get."""
    target, source, members = one.operands
    read, warps = reader(one, source, kind or {"ballot": "pred"}.get(name, "f32")), _warps(one, members)

    def run(threads: Threads, mask: Mask) -> None:
        values = wide(read(threads), threads.count)[warps(threads, mask)]
        write(threads, mask, target, np.repeat(REDUCTIONS[name](values), 32))

    return run


@instruction("elect.sync")
def elect(program: Program, one: Instruction) -> Run:
    """The lowest lane."""
    (target, is_chosen), members = one.operands
    warps = _warps(one, members)

    def run(threads: Threads, mask: Mask) -> None:
        warps(threads, mask)
        write(threads, mask, target, U32(0))
        write(threads, mask, is_chosen, threads.lane == 0)

    return run
