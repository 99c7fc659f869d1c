"""How long kernels take on a GPU.

A reading is the time between two CUDA events around calls that were queued while the GPU was kept busy: it has no time
of the host. Calls rotate among inputs, and the last results stay allocated, so that no input or output is in the L2
cache. Variants take turns, so that drift affects all alike. On a CPU the same functions read the host's clock.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch

from octavo.private import gpu_sleep

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
_L2_BYTES = 60 << 20
_LONG_ENOUGH = 100e-6  # seconds of a reading: an event takes about 1 us
_HERTZ = 2e9  # the most of a GPU's clock


class Timings(NamedTuple):
    """Seconds a call, with one reading for each round, and the errors of variants without readings."""

    seconds: dict[str, list[float]]
    errors: dict[str, str]

    def median(self, name: str) -> float:
        """The median of a variant's readings; NaN if the variant failed."""
        return statistics.median(self.seconds[name]) if name in self.seconds else math.nan


class Deadline:
    """A point in time so many minutes from now."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds left, negative when past."""
        return self._end - time.monotonic()


def input_sets(nbytes: int) -> int:
    """How many inputs of this size outgrow the L2 cache."""
    return max(2, min(32, math.ceil(2 * _L2_BYTES / max(nbytes, 1)))) if ON_GPU else 1


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def describe(error: BaseException) -> str:
    """An error in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:120]


def timings(
    variants: Mapping[str, Sequence[Callable[[], object]]],
    rounds: int = 10,
    seconds_a_variant: float = 0.5,
    hide_host: bool = True,
) -> Timings:
    """Time variants, each a list of calls that do the same work on different inputs.

    A variant whose first calls raise has an error instead of readings. A variant whose rounds would take longer than
    ``seconds_a_variant`` has fewer rounds. Unless ``hide_host``, a reading is of several calls in a row, which begin
    with an idle GPU: if the host is slower than the GPU, it is the host's time.
    """
    ready: dict[str, tuple[Sequence[Callable[[], object]], int, float]] = {}
    errors = {}
    for name, calls in variants.items():
        try:
            ready[name] = (calls, *_warm_up(calls))
        except Exception as error:
            errors[name] = describe(error)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    spent = dict.fromkeys(ready, 0.0)
    for _ in range(rounds):
        pending = {}
        for name, (calls, count, host) in ready.items():
            if seconds[name] and spent[name] > seconds_a_variant:
                continue
            start = time.perf_counter()
            if not hide_host:
                count, host = max(count, 4) if ON_GPU else 1, math.nan
            pending[name] = count, _reading(calls, count, host)
            spent[name] += time.perf_counter() - start
        synchronize()
        for name, (count, reading) in pending.items():
            value = reading if isinstance(reading, float) else reading[0].elapsed_time(reading[1]) / 1e3
            seconds[name].append(value / count)
            spent[name] += value if ON_GPU else 0.0
    return Timings(seconds, errors)


def _warm_up(calls: Sequence[Callable[[], object]]) -> tuple[int, float]:
    """Call all once; return how many calls make a reading long enough, and the host's seconds for one."""
    kept: deque[object] = deque(maxlen=len(calls))
    for call in calls:
        kept.append(call())
    if not ON_GPU:
        return 1, 0.0
    synchronize()
    start = time.perf_counter()
    for i in range(3):
        kept.append(calls[i % len(calls)]())
    host = (time.perf_counter() - start) / 3
    reading = _reading(calls, len(calls), host)
    synchronize()
    device = reading[0].elapsed_time(reading[1]) / 1e3 / len(calls)  # type: ignore[index]
    return max(1, min(100, math.ceil(_LONG_ENOUGH / max(device, 1e-6)))), host


def _reading(
    calls: Sequence[Callable[[], object]], count: int, host: float
) -> float | tuple[torch.cuda.Event, torch.cuda.Event]:
    """Time ``count`` calls, for each of which the host takes ``host`` seconds; NaN: its time is not to be hidden."""
    kept: deque[object] = deque(maxlen=len(calls))
    if not ON_GPU:
        before = time.perf_counter()
        for i in range(count):
            kept.append(calls[i % len(calls)]())
        return time.perf_counter() - before
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if math.isnan(host):
        torch.cuda.synchronize()
    else:  # busy until the calls are queued, with room for the host's hiccups
        gpu_sleep(int(min(1.5 * host * count + 50e-6, 0.05) * _HERTZ))
    start.record()
    for i in range(count):
        kept.append(calls[i % len(calls)]())
    end.record()
    return start, end


def precompile(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], minutes: float) -> list[str]:
    """Call ``function(*task)`` for each task, in a process for each core; ``function`` belongs to a module.

    Returns:
        a line for each task that raised; those not done in ``minutes`` are compiled when they are first called.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # inherited by the processes, which would start more
    deadline, in_time = Deadline(minutes), False
    processes = min(len(os.sched_getaffinity(0)), len(tasks), 32)
    failures = []
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    futures = {pool.submit(_attempt, function, task): task for task in tasks}
    try:
        for future in as_completed(futures, timeout=max(deadline.left(), 1)):
            if error := future.result():
                failures.append(f"{futures[future]}: {error}")
        in_time = True
    except Exception as error:  # a process died, or time is up
        failures.append(f"compiling ahead: {describe(error)}")
    finally:  # also when interrupted
        for process in [] if in_time else list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=in_time, cancel_futures=True)
    return failures


def _attempt(function: Callable[..., Any], task: tuple[Any, ...]) -> str:
    try:
        function(*task)
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for the other processes
        return ""
    except Exception as error:
        return describe(error)
