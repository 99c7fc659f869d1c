"""Which threads run next: all together, the least advanced first, or warps alone in a random order."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from emulator.integers import BARRIER, END, PAUSE
from emulator.machine import INSTRUCTIONS, Launch, Options, Threads
from emulator.memory import GlobalMemory
from emulator.parse import Fault, Program, parse

AT_ONCE = 4  # programs under way where warps run in a random order


def prepare(program: Program) -> None:
    """Make each instruction's closure, once."""
    for one in program.instructions:
        if one.run is None:
            build = INSTRUCTIONS.get(one.parts[0])
            if build is None:
                raise one.unsupported()
            one.run = build(program, one)


def run(
    text: str, grid: tuple[int, int, int], values: list[bytes], shared: int, memory: GlobalMemory, options: Options
) -> Launch:
    """Execute a launch.

    Args:
        text: PTX of one kernel.
        grid: programs in each dimension.
        values: each parameter's bytes.
        shared: bytes of shared memory a program.
        memory: what the kernel may touch; it is changed in place.

    Returns:
        the launch, with what was counted.

    Raises:
        Fault: what a GPU would fault at or leave undefined.
        Unsupported: an instruction that is not modelled.
    """
    program = parse(text)
    prepare(program)
    launch = Launch(program, grid, values, shared, memory, options)
    with np.errstate(all="ignore"):
        if options.schedule == "together":
            each = np.arange(launch.programs), np.arange(program.threads)
            threads = Threads(launch, np.repeat(each[0], program.threads), np.tile(each[1], launch.programs))
            for _ in _steps(threads, waits=False):
                pass
        else:
            _in_random_order(launch)
    return launch


def _in_random_order(launch: Launch) -> None:
    """Some programs at once, in a random order; of them one warp at a time until it waits."""
    program, random = launch.program, launch.random
    size = 128 if any(one.parts[0] == "wgmma" for one in program.instructions) else 32
    left = random.permutation(launch.programs).tolist()
    under_way: dict[int, list[Any]] = {}  # by program: [warp, whether it waits at a barrier]
    while left or under_way:
        while left and len(under_way) < AT_ONCE:
            number = left.pop()
            threads = [np.arange(first, first + size) for first in range(0, program.threads, size)]
            made = [Threads(launch, np.full(size, number), part) for part in threads]
            under_way[number] = [[_steps(part, waits=True), False] for part in made]
        number = random.choice(list(under_way))
        warps_ = under_way[number]
        if ready := [warp for warp in warps_ if not warp[1]]:
            warp = ready[random.integers(len(ready))]
            try:
                warp[1] = next(warp[0]) == BARRIER
            except StopIteration:
                warps_.remove(warp)
        for warp in warps_ if all(warp[1] for warp in warps_) else ():
            warp[1] = False
        if not warps_:
            del under_way[number]


def _steps(threads: Threads, waits: bool) -> Generator[str, None, None]:
    """Run to the end. ``waits``: these are a warp, which stops at barriers and after atomics for others to run.

    While all lanes are at one place, nothing is kept of where each is.
    """
    launch, instructions = threads.launch, threads.launch.program.instructions
    places, alive = np.zeros(threads.count, np.int64), np.ones(threads.count, bool)
    blocked = np.zeros(threads.count, bool)
    together, place, done = True, 0, 0
    while True:
        if together:
            here = None
        else:
            running = alive & ~blocked
            if not running.any():
                if not alive.any():
                    return
                stuck = np.unique(places[blocked]) - 1
                raise Fault(f"a barrier that not all reach: {'; '.join(str(instructions[at]) for at in stuck)}")
            place = int(places[running].min())
            here = running & (places == place)
            if here.all():
                together, here = True, None
        if place >= len(instructions):
            return
        one = instructions[place]
        done += 1
        if done > launch.options.most:
            raise Fault(f"more than {launch.options.most} instructions: {one}")
        mask = here
        if one.guard is not None:
            allowed = threads.registers[one.guard.number]
            allowed = ~allowed if one.negated else allowed
            mask = allowed if here is None else here & allowed
            mask = None if mask.all() else mask
        if here is not None:
            places[here] = place + 1
        if mask is not None and not mask.any():
            place += 1
            continue
        launch.executed[place] += threads.count if mask is None else int(mask.sum())
        if threads.under_way and one.used & threads.under_way - getattr(one.run, "writes", frozenset()):
            raise Fault(f"a register that a product or load under way will write is used before a wait: {one}")
        found = one.run(threads, mask)  # type: ignore[misc]
        if found is PAUSE:
            found = None
            if waits:
                yield PAUSE
        if found is None:
            place += 1
            continue
        if together and mask is None and not isinstance(found, np.ndarray):
            if found is END:
                return
            if found is BARRIER:
                launch.shared.met(slice(None) if not waits else threads.program)
                if waits:
                    yield BARRIER
                place += 1
            else:
                place = found
            continue
        if together:
            together = False
            places[:] = place + 1
        who = threads.active(mask)
        if isinstance(found, np.ndarray):
            places[who] = found[who]
        elif found is END:
            alive[who] = False
        elif found is BARRIER:
            if waits and not (who == alive).all():
                raise Fault(f"part of a warp reaches a barrier: {one}")
            blocked |= who
        else:
            places[who] = found
        if blocked.any():
            if waits:
                yield BARRIER
                blocked[:] = False
            else:
                waiting, living = (
                    np.bincount(threads.program[lanes], minlength=launch.programs) for lanes in (blocked, alive)
                )
                free = (waiting == living) & (living > 0)
                launch.shared.met(free)
                blocked &= ~free[threads.program]
