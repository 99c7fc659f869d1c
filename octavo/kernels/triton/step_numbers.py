"""reference/step_numbers.py in Triton: what a step's options and its number make, in float64, rounded to float32 last.

GROUP, float64 [groups, 8]: Adam's lr, beta1, beta2, eps, weight_decay, maximize, beta1^2 / beta2; or SGD's lr,
momentum, dampening, weight_decay, nesterov, maximize.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class AdamNumbers(NamedTuple):
    """A step's numbers in float32: names as in reference/adam.py; ``bound``: lr times R_t."""

    weight1: Any
    beta2: Any
    square: Any
    eps: Any
    weight_decay: Any
    maximize: Any
    kept: Any
    correction2: Any
    correction2_inv: Any
    rate: Any
    limit: Any
    bound: Any


class SgdNumbers(NamedTuple):
    """A step's numbers in float32."""

    lr: Any
    momentum: Any
    new: Any
    weight_decay: Any
    nesterov: Any
    maximize: Any
    is_first: Any


@triton.jit
def learning_rate(group_ptr, lr_address):
    """float64: of the group, or of a float32 tensor where there is one."""
    lr = tl.load(group_ptr)
    if lr_address != 0:
        lr = tl.load(lr_address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return lr


@triton.jit
def adam_numbers(group_ptr, lr_address, number):
    """The numbers of step ``number``, int64, from 1."""
    lr = learning_rate(group_ptr, lr_address)
    beta1 = tl.load(group_ptr + 1)
    beta2 = tl.load(group_ptr + 2)
    weight_decay = tl.load(group_ptr + 4)
    ratio = tl.load(group_ptr + 6)
    power1 = tl.full((), 1.0, tl.float64)
    power2 = tl.full((), 1.0, tl.float64)
    power3 = tl.full((), 1.0, tl.float64)
    square1 = beta1
    square2 = beta2
    square3 = ratio
    left = number.to(tl.int32)
    while left > 0:
        odd = (left & 1) != 0
        power1 = tl.where(odd, power1 * square1, power1)
        power2 = tl.where(odd, power2 * square2, power2)
        power3 = tl.where(odd, power3 * square3, power3)
        square1 *= square1
        square2 *= square2
        square3 *= square3
        left = left >> 1
    terms = tl.where(ratio == 1.0, number.to(tl.float64), (1.0 - power3) / (1.0 - ratio))
    correction1 = 1.0 - power1
    correction2 = tl.sqrt(1.0 - power2)
    max_update = (1.0 - beta1) / correction1 * tl.sqrt((1.0 - power2) / (1.0 - beta2)) * tl.sqrt(terms)
    unbounded = ratio == float("inf")
    max_update = tl.where(unbounded, tl.where(number > 1, float("inf"), 1.0), max_update)
    return AdamNumbers(
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        tl.load(group_ptr + 3).to(tl.float32),
        weight_decay.to(tl.float32),
        tl.load(group_ptr + 5) != 0,
        (1.0 - lr * weight_decay).to(tl.float32),
        correction2.to(tl.float32),
        (1.0 / correction2).to(tl.float32),
        (-lr / correction1).to(tl.float32),
        (max_update * correction1).to(tl.float32),
        (lr * max_update).to(tl.float32),
    )


@triton.jit
def sgd_numbers(group_ptr, lr_address, number):
    """The numbers of step ``number``, int64, from 1."""
    return SgdNumbers(
        (-learning_rate(group_ptr, lr_address)).to(tl.float32),
        tl.load(group_ptr + 1).to(tl.float32),
        (1.0 - tl.load(group_ptr + 2)).to(tl.float32),
        tl.load(group_ptr + 3).to(tl.float32),
        tl.load(group_ptr + 4) != 0,
        tl.load(group_ptr + 5) != 0,
        number == 1,
    )
