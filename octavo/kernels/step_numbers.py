"""An optimizer step's own numbers, in float64, before they meet float32 tensors; triton/step_numbers.py has the same.

Powers are products of squares, so that every device rounds them alike.
"""

from __future__ import annotations

import math

from torch import Tensor


def power(base: float, exponent: int) -> float:
    """base^exponent of a base that is not negative, exponent at least 1; inf where it is too large."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def adam_max_update(step: int, beta1: float, beta2: float) -> float:
    """R_t, the largest |m_hat| / sqrt(v_hat) that any gradients can give Adam in step t, from 1.

    By Cauchy-Schwarz on m_t = (1 - beta1) sum beta1^(t-i) g_i against v_t = (1 - beta2) sum beta2^(t-i) g_i^2. It is
    inf where beta2 is 0 and beta1 is not, or beta1^2 > beta2 lets it grow without end.

    Example:
        >>> round(adam_max_update(10**6, 0.9, 0.999), 2), round(adam_max_update(10**6, 0.9, 0.95), 3)
        (7.27, 1.165)
    """
    ratio = ratio_of(beta1, beta2)
    if math.isinf(ratio):
        return math.inf if step > 1 else 1.0
    terms = float(step) if ratio == 1.0 else (1 - power(ratio, step)) / (1 - ratio)
    if math.isinf(terms):
        return math.inf
    return (1 - beta1) / (1 - power(beta1, step)) * math.sqrt((1 - power(beta2, step)) / (1 - beta2)) * math.sqrt(terms)


def ratio_of(beta1: float, beta2: float) -> float:
    """beta1^2 / beta2, of the sum in R_t; inf where only beta2 is 0."""
    if beta1 == 0.0:
        return 0.0
    return beta1 * beta1 / beta2 if beta2 else math.inf


def bound_after(amax: Tensor, lr: float, max_update: float, weight_decay: float) -> Tensor:
    """The most that |w|, up to ``amax`` now, can be after a step, with room for float32's roundings on the way.

    ``max_update``: the most that the step moves an element, by the learning rate; ``weight_decay``: decoupled, or 0.
    """
    return (amax * abs(1 - lr * weight_decay) + lr * max_update) * (1 + 2.0**-20)
