"""Which threads run next: all together, the least advanced first, or programs or warps alone in a random order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from emulator.machine import PAUSE, Launch, Mask, Options, Threads, instruction, prepare
from emulator.memory import GlobalMemory
from emulator.parse import Fault, Unsupported, parse

AT_ONCE = 4  # programs under way where they run in a random order
END, BARRIER = "end", "barrier"  # what a closure returns besides None, PAUSE, or where each lane goes on


@instruction("bra(?:.uni)?", "- int")
def jump(threads: Threads, place: int) -> int:
    """To another place."""
    return place


@instruction("brx.idx", "- u32 =")
def jump_by_table(threads: Threads, places: list[int], index: np.ndarray) -> np.ndarray:
    """To each lane's place of a table."""
    index = np.where(threads.active(), index, 0)
    if (index >= len(places)).any():
        raise Fault(f"a jump beyond its table: {threads.one}")
    return np.array(places)[index]


@instruction("ret")
def end(threads: Threads) -> str:
    """Of a thread."""
    return END


@instruction("(?:bar|barrier).sync", "- 0 int?")
def meet(threads: Threads, count: int | None = None) -> str:
    """At a barrier of all of a program's threads."""
    if count not in (None, threads.launch.program.threads):
        raise threads.one.unsupported()
    return BARRIER


@instruction("wgmma.fence.sync.aligned|fence.proxy.async.shared::cta|tcgen05.wait::(?:ld|st).sync.aligned")
@instruction("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
@instruction("tcgen05.dealloc.cta_group::1.sync.aligned.b32", "- u32 int")
def nothing(threads: Threads, *given: Any) -> None:
    """Memory, and tcgen05.ld, are in order."""


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
        the launch, with what was counted. What a GPU would leave undefined raises Fault.
    """
    program = parse(text)
    if grid[1:] != (1, 1):
        raise Unsupported(f"a grid of {grid}")
    with np.errstate(all="ignore"):
        prepare(program)
        launch = Launch(program, grid[0], values, shared, memory, options)
        numbers, random = np.arange(grid[0]), launch.random
        left = [numbers] if options.schedule == "together" else list(random.permutation(numbers)[:, None])
        under_way: list[_Programs] = []
        while left or under_way:
            while left and len(under_way) < AT_ONCE:
                under_way.append(_Programs(launch, left.pop()))
            some = under_way[random.integers(len(under_way))]
            if some.have_ended():
                under_way.remove(some)
    return launch


class _Programs:
    """Programs under way: all of a launch, whose threads run together, or one, of which one warp runs at a time."""

    def __init__(self, launch: Launch, numbers: np.ndarray) -> None:
        self._launch, self._numbers, count, schedule = launch, numbers, launch.program.threads, launch.options.schedule
        program, thread = np.repeat(numbers, count), np.tile(np.arange(count), numbers.size)
        # of each thread where it goes on, whether it has not ended, whether it waits at a barrier
        self._places, alive, self._blocked = np.zeros(program.size, int), program >= 0, program < 0
        size = 32 if schedule == "warps" else program.size
        if any(one.name.startswith("wgmma") for one in launch.program.instructions):
            size = max(size, 128)
        self._ready: list[Iterator[str]] = []
        self._waiting: list[Iterator[str]] = []
        for part in (slice(first, first + size) for first in range(0, program.size, size)):
            threads = Threads(launch, program[part], thread[part])
            self._ready.append(_steps(threads, self._places[part], alive[part], self._blocked[part]))

    def have_ended(self) -> bool:
        """Run one warp until it waits; or all of them, where they run together."""
        steps = self._ready.pop(self._launch.random.integers(len(self._ready)))
        if told := next(steps, None):
            (self._ready if told is PAUSE else self._waiting).append(steps)
        if self._waiting and not self._ready:
            places, blocked = (each.reshape(self._numbers.size, -1) for each in (self._places, self._blocked))
            met = (blocked & (places == places[:, :1])).all(1)
            if not met.any():
                at = self._launch.program.instructions[places[blocked][0] - 1]
                raise Fault(f"a barrier that not all reach: {at}")
            self._launch.shared.met(self._numbers[met])
            blocked[met] = False
            self._ready, self._waiting = self._waiting, []
        return not self._ready


def _steps(threads: Threads, places: np.ndarray, alive: np.ndarray, blocked: np.ndarray) -> Iterator[str]:
    """Run to the end; stop after atomics, telling PAUSE, and where nobody can go on, telling BARRIER.

    The least advanced lanes run first, but those that loop around an mbarrier's wait last: who ends it may be behind.
    While all lanes are at one place, nothing is kept of where each is.
    """
    launch, instructions, every = threads.launch, threads.launch.program.instructions, threads.count
    together, place = True, 0
    for _ in range(launch.options.most):
        here: Mask = None
        if not together:
            running = alive & ~blocked & ~threads.waits
            if not running.any():
                if not alive.any():
                    return
                if not threads.waits.any():
                    yield BARRIER
                threads.waits[:] = False
                continue
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
        launch.executed[place - 1] += count
        if threads.under_way & one.registers and not one.name.startswith("wgmma.mma"):
            raise Fault(f"a register that a product under way will write is used before a wait: {one}")
        threads.one, threads.mask = one, None if count == every else mask
        found = one.run(threads)  # type: ignore[misc]
        if found is None:
            continue
        if found is PAUSE:
            yield PAUSE
        elif count == every and type(found) is int:
            place = found
        else:
            if together:
                places[:] = place
            together, who = False, threads.active()
            if found is END:
                alive &= ~who
            elif found is BARRIER:
                blocked |= who
            else:
                places[:] = np.where(who, found, places)
    raise Fault(f"more than {launch.options.most} instructions, the last of them {instructions[place - 1]}")
