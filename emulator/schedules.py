"""Which threads run next: all together, the least advanced first, or programs or warps alone in a random order."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from emulator.accesses import PAUSE
from emulator.machine import Launch, Mask, Options, Run, Threads, constant, instruction, prepare
from emulator.memory import GlobalMemory
from emulator.parse import Fault, Instruction, Program, Unsupported, parse

AT_ONCE = 4  # programs under way where they run in a random order
END, BARRIER = "end", "barrier"  # what a closure returns besides None, PAUSE, or a place to go on at


@instruction("bra(?:.uni)?")
def branch(program: Program, one: Instruction) -> Run:
    """A jump."""
    place = program.labels[one.operands[0]]
    return lambda threads, mask: place


@instruction("(bar|barrier).sync")
def barrier(program: Program, one: Instruction, name: str) -> Run:
    """All of a program's threads meet."""
    if [constant(one, operand) for operand in one.operands] not in ([0], [0, program.threads]):
        raise one.unsupported()
    return lambda threads, mask: BARRIER


@instruction("ret")
def leave(program: Program, one: Instruction) -> Run:
    """The end of a thread."""
    return lambda threads, mask: END


@instruction("bar.warp.sync", "fence.proxy.async.shared::cta")
def fence(program: Program, one: Instruction) -> Run:
    """Nothing: memory is in order."""
    return lambda threads, mask: None


def run(
    text: str, grid: tuple[int, int, int], values: list[bytes], shared: int, memory: GlobalMemory, options: Options
) -> Launch:
    """Execute a launch.

    Args:
        text: PTX of one kernel.
        grid: programs in each dimension; of the second and third 1.
        values: each parameter's bytes.
        shared: bytes of shared memory a program.
        memory: what the kernel may touch; it is changed in place.
        options: how.

    Returns:
        the launch, with what was counted.

    Raises:
        Fault: what a GPU would fault at or leave undefined.
        Unsupported: an instruction that is not modelled.
    """
    program = parse(text)
    if grid[1:] != (1, 1):
        raise Unsupported(f"a grid of {grid}")
    with np.errstate(all="ignore"):
        prepare(program)
        launch = Launch(program, grid[0], values, shared, memory, options)
        if options.schedule == "together":
            count = program.threads
            threads = Threads(launch, np.repeat(np.arange(grid[0]), count), np.tile(np.arange(count), grid[0]))
            for _ in _steps(threads, all_of_them=True):
                pass
        else:
            _in_random_order(launch)
    return launch


def _in_random_order(launch: Launch) -> None:
    """Some programs at once, in a random order; of them one warp at a time until it waits."""
    program, random = launch.program, launch.random
    size = program.threads if launch.options.schedule == "programs" else 32
    if any(one.name.startswith("wgmma") for one in program.instructions):
        size = max(size, 128)
    left = random.permutation(launch.programs).tolist()
    under_way: dict[int, list[Any]] = {}  # by program: of each warp its steps, and what it told last
    while left or under_way:
        while left and len(under_way) < AT_ONCE:
            number = left.pop()
            threads = [np.arange(first, first + size) for first in range(0, program.threads, size)]
            made = [Threads(launch, np.full(size, number), part) for part in threads]
            under_way[number] = [[_steps(part, all_of_them=False), PAUSE] for part in made]
        number = list(under_way)[random.integers(len(under_way))]
        warps = under_way[number]
        ready = [warp for warp in warps if warp[1] == PAUSE]
        warp = ready[random.integers(len(ready))]
        warp[1] = next(warp[0], END)
        told = {warp[1] for warp in warps}
        if told == {END}:
            del under_way[number]
        elif PAUSE not in told:
            if len(told) > 1:
                raise Fault(f"a barrier that not all reach: {program.instructions[min(told - {END}) - 1]}")
            launch.shared.met(number)
            for warp in warps:
                warp[1] = PAUSE


def _steps(threads: Threads, all_of_them: bool) -> Generator[Any, None, None]:
    """Run to the end. Without ``all_of_them`` these stop at barriers, telling which, and after atomics, for others.

    While all lanes are at one place, nothing is kept of where each is.
    """
    launch, instructions, every = threads.launch, threads.launch.program.instructions, threads.count
    places, alive, blocked = np.zeros(every, np.int64), np.ones(every, bool), np.zeros(every, bool)
    size = launch.program.threads if all_of_them else every  # of those that meet at a barrier
    together, place, executed = True, 0, launch.executed
    for _ in range(launch.options.most):
        here: Mask = None
        if not together:
            running = alive & ~blocked
            if not running.any():
                if not alive.any():
                    return
                raise Fault(f"a barrier that not all reach: {instructions[int(places[blocked][0]) - 1]}")
            place = int(places[running].min())
            here = running & (places == place)
            if here.all():
                together, here = True, None
        one, mask = instructions[place], here
        if one.guard is not None:
            mask = threads.registers[one.guard.number]
            mask = ~mask if one.negated else mask
            mask = mask if here is None else here & mask
        count = every if mask is None else int(np.count_nonzero(mask))
        if here is not None:
            places[here] = place + 1
        place += 1
        if count == 0:
            continue
        executed[place - 1] += count
        if threads.under_way and one.registers() & threads.under_way - getattr(one.run, "writes", frozenset()):
            raise Fault(f"a register that a product under way will write is used before a wait: {one}")
        found = one.run(threads, None if count == every else mask)  # type: ignore[misc]
        if found is None:
            continue
        if found is PAUSE:
            if not all_of_them:
                yield PAUSE
            continue
        if count == every and found is not BARRIER:
            if found is END:
                return
            place = found
            continue
        if together:
            places[:] = place
        together, who = False, threads.active(mask)
        if found is END:
            alive &= ~who
        elif found is BARRIER:
            blocked |= who
            rows = places.reshape(-1, size)
            met = (blocked.reshape(-1, size) & (rows == rows[:, :1])).all(1)
            if met.any():
                if all_of_them:
                    launch.shared.met(met)
                else:
                    yield place
                blocked &= ~np.repeat(met, size)
        else:
            places[who] = found
    raise Fault(f"more than {launch.options.most} instructions, the last of them {instructions[place - 1]}")
