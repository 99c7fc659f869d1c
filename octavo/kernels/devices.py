"""The kernels that a device runs: Triton's where FP8 is native, elsewhere those tuned for CPUs.

An optimizer's step is no op of torch's, for nothing traces or differentiates an optimizer. It follows the same rule:
Triton converts to E4M3, which moments are kept in, on GPUs with FP8 alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.capability import runs_natively
from octavo.kernels.cpu import KERNELS
from octavo.kernels.cpu.optimizer_step import step_in_place
from octavo.kernels.reference.optimizer_step import AdamGroup, SgdGroup, WeightUpdate
from octavo.kernels.reference.optimizer_step import optimizer_step as reference_step

_logger = logging.getLogger("octavo")


@functools.cache
def triton_kernels() -> ModuleType | None:
    """Return the Triton kernels' package, imported by the first call; None where Triton can't be imported."""
    try:
        from octavo.kernels import triton
    except ImportError as error:
        _logger.warning("Triton can't be imported (%s): GPUs run the CPU's kernels, slowly", error)
        return None
    return triton


@functools.cache
def kernels_of(index: int) -> dict[str, Callable[..., Any]]:
    """Return the kernels by name for tensors on CUDA device ``index``."""
    package = triton_kernels() if runs_natively(torch.device("cuda", index)) else None
    return KERNELS if package is None else package.KERNELS


def reads_swizzled(device: torch.device) -> bool:
    """Whether products of E8M0's blocks read their scales swizzled on a device, which the first call asks."""
    if device.type != "cuda" or kernels_of(device.index or 0) is KERNELS:
        return False
    package = triton_kernels()
    return package is not None and package.reads_swizzled(device)


reads_swizzled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's own mark imports Triton


def _on_cuda(name: str) -> Callable[..., Any]:
    """Return a function of an op's arguments that calls the kernel of the device they are on."""

    def call(x: Tensor | Sequence[Tensor], *args: Any, **named: Any) -> Any:
        first = x if isinstance(x, Tensor) else x[0]
        return kernels_of(first.get_device())[name](x, *args, **named)

    return call


ON_CUDA: dict[str, Callable[..., Any]] = {name: _on_cuda(name) for name in KERNELS}


def optimizer_step(
    updates: Sequence[WeightUpdate],
    groups: Sequence[AdamGroup] | Sequence[SgdGroup],
    skip: Tensor | None = None,
    grad_scale: Tensor | None = None,
    plans: dict[Any, Any] | None = None,
    resolution: Tensor | None = None,
) -> None:
    """Do ``reference.optimizer_step``; ``plans``: a dict of an optimizer, which keeps launches for its next steps.

    Its entry "captured" has what CUDA graphs read, and has to stay when launches are dropped.
    """
    if not updates:
        return
    gradient = updates[0].gradient
    if gradient.is_cuda and kernels_of(gradient.get_device()) is not KERNELS:
        from octavo.kernels import triton

        triton.optimizer_step(updates, groups, skip, grad_scale, plans, resolution)
    else:
        reference_step(updates, groups, skip, grad_scale, resolution, step_in_place)
