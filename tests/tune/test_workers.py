"""Compiling ahead: what fails is told, and what takes too long is stopped."""

import math
import time

import pytest

from octavo.tune.workers import precompile


@pytest.mark.full  # processes that import torch
def test_failures_are_told_and_time_is_kept() -> None:
    (line,) = precompile(math.sqrt, [(4.0,), (-1.0,)], 2.0)
    assert line.startswith("(-1.0,): ValueError")
    begun = time.monotonic()
    (line,) = precompile(time.sleep, [(60.0,)], 0.02)
    assert line.startswith("compiling ahead: TimeoutError") and time.monotonic() - begun < 30
