"""Bounded: a weight's next scale from its last amax and the most that the optimizer can move it.

The scale is known before the update, so that codes are written in the pass that computes them, and it cannot overflow.
For Adam the bound on |m_hat / sqrt(v_hat)| is exact: gradients g_i proportional to (beta1 / beta2)^(t - i) attain it.
"""

from __future__ import annotations

import math
from typing import Protocol


class BoundsItsUpdate(Protocol):
    """An optimizer that knows how far a step can move a weight."""

    def max_update(self, step: int) -> float:
        """The most that step number ``step`` (from 1) moves any element, by its learning rate."""
        ...


def adam_max_update(step: int, beta1: float, beta2: float) -> float:
    """R_t, the largest |m_hat| / sqrt(v_hat) that any gradients can give Adam in a step.

    By Cauchy-Schwarz on m_t = (1 - beta1) sum beta1^(t-i) g_i against v_t = (1 - beta2) sum beta2^(t-i) g_i^2.

    Args:
        step: t, from 1.
        beta1, beta2: Adam's.

    Returns:
        R_t; inf where beta2 is 0 and beta1 is not, or beta1^2 > beta2 lets it grow without end.

    Example:
        >>> round(adam_max_update(10**6, 0.9, 0.999), 2), round(adam_max_update(10**6, 0.9, 0.95), 3)
        (7.27, 1.165)
    """
    if beta1 == 0.0:
        return math.sqrt((1 - beta2**step) / (1 - beta2)) if step > 1 or beta2 else 1.0
    if beta2 == 0.0:
        return math.inf if step > 1 else 1.0
    ratio = beta1 * beta1 / beta2
    terms = float(step) if ratio == 1.0 else (1 - _power(ratio, step)) / (1 - ratio)
    if math.isinf(terms):
        return math.inf
    return (1 - beta1) / (1 - beta1**step) * math.sqrt((1 - beta2**step) / (1 - beta2)) * math.sqrt(terms)


def _power(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def bound_after(amax: float, lr: float, max_update: float, weight_decay: float = 0.0) -> float:
    """The most that a weight's |w| can be after a step.

    Args:
        amax: before it.
        lr: the learning rate.
        max_update: of the optimizer (``BoundsItsUpdate``).
        weight_decay: decoupled; 0 for others.

    Example:
        >>> bound_after(2.0, lr=0.1, max_update=1.0, weight_decay=0.5)
        2.0
    """
    return abs(1 - lr * weight_decay) * amax + lr * max_update
