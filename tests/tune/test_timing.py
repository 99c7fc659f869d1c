"""Timing: turns, medians, errors instead of readings, and time that is up."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.tune import timing
from octavo.tune.timing import precompile


def test_variants_take_turns_and_a_failing_one_has_an_error() -> None:
    order: list[str] = []

    def fail() -> None:
        raise RuntimeError("no\n  room")

    measured = timing.timings({"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": fail}, rounds=3)
    assert len(measured.seconds["a"]) == len(measured.seconds["b"]) == 3 and 0 <= measured.median("a") < 1
    assert measured.errors == {"c": "RuntimeError: no room"} and math.isnan(measured.median("c"))
    if not timing.ON_GPU:
        assert order == [*"ab"] * 4  # to warm up, then a round after the other

    slow = timing.timings({"a": lambda: None}, rounds=5, seconds_a_variant=-1.0, hide_host=False)
    assert len(slow.seconds["a"]) == 1, "it has fewer rounds"
    assert 29 < timing.Deadline(0.5).left() <= 30
    with pytest.raises(ValueError, match="would never pass"):
        timing.Deadline(math.nan)


def test_a_reading_on_a_gpu_is_the_median_of_calls_that_find_its_cache_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of milliseconds that are given, whose work is written down."""
    work: list[str] = []
    cache, milliseconds = SimpleNamespace(zero_=lambda: work.append("clear")), iter([9.0, 1.0, 3.0, 2.0, 4.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            work.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return next(milliseconds)

    monkeypatch.setattr(timing, "ON_GPU", True)
    monkeypatch.setattr(timing, "DEVICE", "a GPU")
    monkeypatch.setattr(timing, "keep_gpu_busy", lambda cycles: work.append("busy"))
    monkeypatch.setattr(torch, "empty", lambda size, *, dtype, device: cache if device == "a GPU" else None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: work.append("wait"))
    assert timing.timings({"a": lambda: work.append("call")}, rounds=1).seconds == {"a": [0.003]}
    assert work == ["call", "wait", *["clear", "busy", "event", "call", "event"] * timing.CALLS, "wait"]


pools: list[Any] = []  # those that a test has made


class PoolOfNone:
    """A ProcessPoolExecutor without processes, which does each task at once, and loses a process at a task of -2."""

    def __init__(self, processes: int, context: Any) -> None:
        assert context.get_start_method() == "spawn"
        self.ended: list[Any] = []
        self._processes = {number: SimpleNamespace(terminate=lambda: self.ended.append("terminated")) for number in [1]}
        pools.append(self)

    def submit(self, call: Callable[..., Any], function: Any, task: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        if task == (-2.0,):
            future.set_exception(BrokenProcessPool("a process died"))
        else:
            future.set_result(call(function, task))
        return future

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        assert cancel_futures
        self.ended.append("waited for" if wait else "left")


def test_failures_are_told_and_a_pool_that_lost_a_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(timing, "ProcessPoolExecutor", PoolOfNone)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # which precompile sets, for good
    assert precompile(math.sqrt, [(4.0,), (9.0,)], 2.0) == [] and pools[-1].ended == ["waited for"]
    monkeypatch.setattr(timing, "ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: emptied.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("empty"))
    (line,) = precompile(math.sqrt, [(4.0,), (-1.0,)], 2.0)
    assert line.startswith("(-1.0,): ValueError: ") and emptied == ["wait", "empty"]
    (line,) = precompile(math.sqrt, [(-2.0,)], 2.0)
    assert line == "compiling ahead: BrokenProcessPool: a process died" and pools[-1].ended == ["terminated", "left"]


@pytest.mark.full  # processes that import torch
def test_failures_are_told_and_time_is_kept() -> None:
    (line,) = precompile(math.sqrt, [(4.0,), (-1.0,)], 2.0)
    assert line.startswith("(-1.0,): ValueError")
    begun = time.monotonic()
    (line,) = precompile(time.sleep, [(60.0,)], 0.02)
    assert line.startswith("compiling ahead: TimeoutError") and time.monotonic() - begun < 30
