"""Measure how long kernels take on a GPU.

A reading is the median of single calls between two CUDA events, before each of which the L2 cache is cleared and the
GPU kept busy until the host has launched it: beside a slow host triton.testing.do_bench read the host's time, of
kernels that take less than 130 us. Variants take turns, so that drift affects all alike. On a CPU the host's clock is
read.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch

from octavo.private import keep_gpu_busy

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


class Timings(NamedTuple):
    """Seconds a call, with one reading for each round, and the errors of variants without readings."""

    seconds: dict[str, list[float]]
    errors: dict[str, str]

    def median(self, name: str) -> float:
        """Return the median of a variant's readings; NaN if the variant failed."""
        return statistics.median(self.seconds[name]) if name in self.seconds else math.nan


class Deadline:
    """A point in time so many minutes from now."""

    def __init__(self, minutes: float) -> None:
        if math.isnan(minutes):
            raise ValueError("minutes=nan: the deadline would never pass")
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Return the seconds left, negative when past."""
        return self._end - time.monotonic()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def describe(error: BaseException) -> str:
    """Return an error as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]


def error_of(function: Callable[..., object], *arguments: Any) -> str:
    """Call a function and wait for the GPU; return the error as one short line, "" for none."""
    try:
        function(*arguments)
        synchronize()
    except Exception as error:
        return describe(error)
    return ""


def timings(
    variants: Mapping[str, Callable[[], object]],
    rounds: int = 10,
    seconds_a_variant: float = 0.5,
    hide_host: bool = True,
) -> Timings:
    """Time variants in turns.

    A variant whose first call raises has an error instead of readings. A variant whose rounds would take longer than
    ``seconds_a_variant`` has fewer rounds. Unless ``hide_host``, a reading is of several calls in a row, which begin
    with an idle GPU: if the host is slower than the GPU, it is the host's time.
    """
    errors = {name: error for name, call in variants.items() if (error := error_of(call))}
    seconds: dict[str, list[float]] = {name: [] for name in variants if name not in errors}
    spent = dict.fromkeys(seconds, 0.0)
    for _ in range(rounds):
        for name, readings in seconds.items():
            if readings and spent[name] > seconds_a_variant:
                continue
            start = time.perf_counter()
            readings.append(_on_device(variants[name]) if hide_host and ON_GPU else _on_host(variants[name]))
            spent[name] += time.perf_counter() - start
    return Timings(seconds, errors)


CALLS, CACHE_BYTES, AHEAD_CYCLES = 5, 1 << 28, 1_000_000  # a reading's calls; more than any L2; half a millisecond


def _on_device(call: Callable[[], object]) -> float:
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=DEVICE)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
    for start, end in events:
        cache.zero_()
        keep_gpu_busy(AHEAD_CYCLES)
        start.record()
        call()
        end.record()
    synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def _on_host(call: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    results = [call() for _ in range(4 if ON_GPU else 1)]  # all are held, so that their memory is not freed meanwhile
    synchronize()
    return (time.perf_counter() - start) / len(results)


def precompile(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], minutes: float) -> list[str]:
    """Call ``function(*task)`` for each task, in a process for each core; ``function`` belongs to a module.

    Returns:
        a line for each task that raised; those not done in ``minutes`` are compiled when they are first called.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # inherited by the processes, which would start more
    processes = min(len(os.sched_getaffinity(0)), len(tasks), 32)
    in_time = False
    failures = []
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    futures = {pool.submit(_attempt, function, task): task for task in tasks}
    try:
        for future in as_completed(futures, timeout=max(60 * minutes, 1)):
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
    error = error_of(function, *task)
    if not error:
        torch.cuda.empty_cache()  # for the other processes
    return error
