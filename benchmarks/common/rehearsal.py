"""Without a GPU a benchmark's Triton kernels are compiled for Hopper, and their PTX runs in the emulator.

Layers and optimizers run them too, where nothing compiles them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from benchmarks.common import measure
from tests.support.emulated import emulating
from tests.support.triton_kernels import in_place_of_reference, load

CAPABILITY = 90


@contextmanager
def rehearsed() -> Iterator[None]:
    """Let kernels run within the block, without a GPU too: in the emulator, which results then name as device."""
    if torch.cuda.is_available():
        yield
        return
    emulated = emulating(CAPABILITY, finds_unwritten=False)  # some compile others' kernels too
    with (
        emulated,
        in_place_of_reference(load(False)),
        mock.patch.object(measure, "device_name", lambda: f"emulated-sm-{CAPABILITY}"),
    ):
        yield
