"""Bounded: a weight's next scale from its last amax and the most that the optimizer can move it.

The scale is known before the update, so that codes are written in the pass that computes them, and it cannot overflow.
For Adam the bound on |m_hat / sqrt(v_hat)| is exact: gradients g_i proportional to (beta1 / beta2)^(t - i) attain it.
"""

from __future__ import annotations

from typing import Protocol

from octavo.kernels.reference.step_numbers import adam_max_update, bound_after

__all__ = ["BoundsItsUpdate", "adam_max_update", "bound_after"]


class BoundsItsUpdate(Protocol):
    """An optimizer that knows how far a step can move a weight."""

    def max_update(self, step: int) -> float:
        """The most that step number ``step`` (from 1) moves any element, by its learning rate."""
        ...
