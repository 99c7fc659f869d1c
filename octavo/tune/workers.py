"""Compiling ahead, in parallel: processes make the same calls, which leaves code in Triton's and torch's caches."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from octavo.tune.timing import ON_GPU, Deadline, describe


def precompile(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], minutes: float) -> list[str]:
    """Call ``function(*task)`` for each task, a process a core; it is a module's function, what it returns is dropped.

    Returns:
        a line for each that raised; those not done in ``minutes`` are left to be compiled when first called.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of the processes too: each would start more
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
