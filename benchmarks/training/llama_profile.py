"""Where one step's time goes: kernels by kind, and the share of the step in which the GPU does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from octavo.tune.timing import ON_GPU, synchronize

# by parts of kernels' names, the first that fits
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "attention"),
    "optimizer": ("adam", "multi_tensor", "foreach", "optimizer_step"),
    "loss": ("softmax", "nll", "cross_entropy"),
    "casts": ("cast", "amax", "delayed_update"),
    "products": ("gemm", "matmul", "nvjet", "cutlass", "xmma", "::mm", "addmm", "scaled_mm"),
    "norms": ("norm",),
    "embedding": ("embedding", "index"),
}
REST = "other elementwise"


class Kernel(NamedTuple):
    """A launch: its name, and when it began and ended, in microseconds."""

    name: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), REST)


def account(kernels: Sequence[Kernel]) -> list[dict[str, str]]:
    """Return a row by kind with milliseconds and launches, and one of the time in which none of them runs."""
    launches = Counter(kind_of(kernel.name) for kernel in kernels)
    spent = dict.fromkeys(launches, 0.0)
    begin = until = min((kernel.begin for kernel in kernels), default=0.0)
    idle = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        spent[kind_of(kernel.name)] += kernel.end - kernel.begin
        idle += max(0.0, kernel.begin - until)
        until = max(until, kernel.end)
    largest = sorted(spent.items(), key=lambda item: -item[1])
    return [
        {
            "kind": kind,
            "ms": f"{us / 1e3:.2f}",
            "launches": str(launches[kind] or ""),
            "share": f"{us / (until - begin):.3f}",
        }
        for kind, us in (*largest, ("idle", idle))
        if until > begin
    ]


def kernels_of(step: Callable[[], object]) -> list[Kernel]:
    """Return the kernels of one step; without a GPU, the CPU's operations that call no other."""
    activities = torch.profiler.ProfilerActivity
    step()
    synchronize()
    with torch.profiler.profile(activities=[activities.CUDA if ON_GPU else activities.CPU]) as profile:
        step()
        synchronize()
    events: Any = profile.events()
    on_device = torch.autograd.DeviceType.CUDA if ON_GPU else torch.autograd.DeviceType.CPU
    mine = (each for each in events if each.device_type == on_device and not each.cpu_children)
    return [Kernel(each.name, each.time_range.start, each.time_range.end) for each in mine]
