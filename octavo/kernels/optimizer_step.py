"""An optimizer's step by its device: one launch where Triton's kernel runs, else tensor by tensor.

It is no op of torch's: nothing traces or differentiates an optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from octavo.kernels.devices import triton_kernels
from octavo.kernels.reference.optimizer_step import AdamGroup, SgdGroup, WeightUpdate
from octavo.kernels.reference.optimizer_step import optimizer_step as reference


def optimizer_step(
    updates: Sequence[WeightUpdate],
    groups: Sequence[AdamGroup] | Sequence[SgdGroup],
    skip: Tensor | None = None,
    grad_scale: Tensor | None = None,
    plans: dict[Any, Any] | None = None,
    resolution: Tensor | None = None,
) -> None:
    """``reference.optimizer_step``; ``plans``: the optimizer's, where a launch is kept for the next step."""
    if not updates:
        return
    package = triton_kernels() if updates[0].gradient.is_cuda else None
    if package is None:
        reference(updates, groups, skip, grad_scale, resolution)
    else:
        package.optimizer_step(updates, groups, skip, grad_scale, plans, resolution)
