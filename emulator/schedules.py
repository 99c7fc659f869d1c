"""Choose the threads to run next: all together, least advanced first, or programs or warps alone in random order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from emulator.machine import PAUSE, Launch, Mask, Options, Threads, instruction, prepare
from emulator.memory import GlobalMemory
from emulator.parse import Fault, Unsupported, parse

AT_ONCE = 4  # programs under way where they run in a random order
END, BARRIER = "end", "barrier"  # a closure returns one of these, None, PAUSE, or where each lane goes on

instruction("ret")(lambda threads: END)
instruction("bra(?:.uni)?", "- int")(lambda threads, place: place)
for name in (  # these do nothing: memory, and tcgen05.ld, are in order
    "wgmma.fence.sync.aligned|fence.proxy.async.shared::cta|tcgen05.wait::(?:ld|st).sync.aligned",
    "tcgen05.(?:dealloc|relinquish_alloc_permit).cta_group::1.sync.aligned(?:.b32)?",
):
    instruction(name, "- u32? int?")(lambda threads, *operands: None)


@instruction("brx.idx", "- u32 =")
def jump_by_table(threads: Threads, places: list[int], index: np.ndarray) -> np.ndarray:
    """Return each lane's place of a table."""
    index = np.where(threads.active(), index, 0)
    if (index >= len(places)).any():
        raise Fault(f"a jump beyond its table: {threads.one}")
    return np.array(places)[index]


@instruction("(?:bar|barrier).sync", "- 0 int?")
def meet(threads: Threads, count: int | None = None) -> str:
    """Stop at a barrier of all of a program's threads."""
    if count not in (None, threads.launch.program.threads):
        raise threads.one.unsupported()
    return BARRIER


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
        under_way: list[Iterator[str]] = []
        while left or under_way:
            while left and len(under_way) < AT_ONCE:
                under_way.append(_programs(launch, left.pop()))
            some = under_way[random.integers(len(under_way))]
            if next(some, END) is END:
                under_way.remove(some)
    return launch


def _programs(launch: Launch, numbers: np.ndarray) -> Iterator[str]:
    """Run programs: all of a launch, whose threads run together, or one, of which one warp runs at a time."""
    count, schedule = launch.program.threads, launch.options.schedule
    program, thread = np.repeat(numbers, count), np.tile(np.arange(count), numbers.size)
    # for each thread its next instruction, whether it has not ended, whether it waits at a barrier
    places, alive, blocked = np.zeros(program.size, int), program >= 0, program < 0
    size = 32 if schedule == "warps" else program.size
    if any(one.name.startswith("wgmma") for one in launch.program.instructions):
        size = max(size, 128)
    parts = [slice(first, first + size) for first in range(0, program.size, size)]
    ready = [_steps(Threads(launch, program[at], thread[at]), places[at], alive[at], blocked[at]) for at in parts]
    waiting: list[Iterator[str]] = []
    while True:
        steps = ready.pop(launch.random.integers(len(ready)))
        if signal := next(steps, None):
            (ready if signal is PAUSE else waiting).append(steps)
        if waiting and not ready:
            at, at_barrier = (each.reshape(numbers.size, -1) for each in (places, blocked))
            met = (at_barrier & (at == at[:, :1])).all(1)
            if not met.any():
                raise Fault(f"a barrier that not all reach: {launch.program.instructions[at[at_barrier][0] - 1]}")
            launch.shared.met(numbers[met])
            at_barrier[met] = False
            ready, waiting = waiting, []
        if not ready:
            return
        yield PAUSE


def _steps(threads: Threads, places: np.ndarray, alive: np.ndarray, blocked: np.ndarray) -> Iterator[str]:
    """Run to the end; yield PAUSE after atomics, and BARRIER where no lane can go on.

    The least advanced lanes run first, but those that loop around an mbarrier's wait last: lanes behind may end it.
    While all lanes are at one place, ``place`` alone says where.
    """
    launch, instructions, every = threads.launch, threads.launch.program.instructions, threads.count
    together, place = True, 0
    for _ in range(launch.options.most):
        here: Mask = None
        if not together:
            running = alive & ~blocked
            if threads.waits:
                running[list(threads.waits)] = False
            if not running.any():
                if not alive.any():
                    return
                if not threads.waits:
                    yield BARRIER
                threads.waits.clear()
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
        if threads.under_way and threads.under_way & one.registers and not one.name.startswith("wgmma.mma"):
            raise Fault(f"a register that a product under way will write is used before a wait: {one}")
        threads.one, threads.mask = one, None if count == every else mask
        outcome = one.run(threads)  # type: ignore[misc]
        if outcome is None:
            continue
        if outcome is PAUSE:
            yield PAUSE
        elif count == every and type(outcome) is int:
            place = outcome
        else:
            if together:
                places[:] = place
            together, active = False, threads.active()
            if outcome is END:
                alive &= ~active
            elif outcome is BARRIER:
                blocked |= active
            else:
                places[:] = np.where(active, outcome, places)
    raise Fault(f"more than {launch.options.most} instructions, the last of them {instructions[place - 1]}")
