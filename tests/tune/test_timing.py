"""Timing: turns, medians, errors instead of readings, and time that is up."""

import math
import time

import pytest

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


@pytest.mark.full  # processes that import torch
def test_failures_are_told_and_time_is_kept() -> None:
    (line,) = precompile(math.sqrt, [(4.0,), (-1.0,)], 2.0)
    assert line.startswith("(-1.0,): ValueError")
    begun = time.monotonic()
    (line,) = precompile(time.sleep, [(60.0,)], 0.02)
    assert line.startswith("compiling ahead: TimeoutError") and time.monotonic() - begun < 30
