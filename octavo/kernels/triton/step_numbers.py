"""kernels/step_numbers.py in Triton: random bits, and a step's numbers, in float64, rounded to float32 last.

GROUP, float64 [groups, 8]: Adam's lr, beta1, beta2, eps, weight_decay, maximize, beta1^2 / beta2; or SGD's lr,
momentum, dampening, weight_decay, nesterov, maximize, max_update.

Adam's Corrections of a step take 400 instructions and 22 for each bit of its number, in every program. So a step keeps
those of the next one, for each tensor, with step number, beta1 and beta2. An entry is read only where all three are the
same; after another step number (a state was loaded) or with other betas the Corrections are computed anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

KEPT: tl.constexpr = tl.constexpr(7)  # int64 an entry: step number, bits of beta1, beta2, and of Corrections


class AdamNumbers(NamedTuple):
    """A step's numbers in float32, as ``adam_numbers`` computes them; rate: -lr / correction1; bound: lr R_t.

    first_share, second_share: what a gradient and its square count in the moments.
    """

    first_share: Any
    beta2: Any
    second_share: Any
    eps: Any
    weight_decay: Any
    maximize: Any
    decay_factor: Any
    correction2: Any
    correction2_inv: Any
    rate: Any
    limit: Any
    bound: Any


class Corrections(NamedTuple):
    """The numbers of a step that follow from Adam's betas, in float64; names as in AdamStep."""

    correction1: Any
    correction2: Any
    correction2_inv: Any
    max_update: Any


class SgdNumbers(NamedTuple):
    """A step's numbers in float32; share: a gradient's in the momentum; average_share: in a momentum that averages."""

    minus_lr: Any
    momentum: Any
    share: Any
    weight_decay: Any
    nesterov: Any
    maximize: Any
    is_first: Any
    average_share: Any
    decay_factor: Any
    bound: Any


@triton.jit
def learning_rate(group_ptr, lr_address):
    """Return the learning rate in float64: the group's, or that of a float32 tensor where there is one."""
    lr = tl.load(group_ptr)
    if lr_address != 0:
        lr = tl.load(lr_address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return lr


@triton.jit
def corrections(group_ptr, number):
    """Return the Corrections by the betas at step ``number``, int64, from 1."""
    beta1 = tl.load(group_ptr + 1)
    beta2 = tl.load(group_ptr + 2)
    ratio = tl.load(group_ptr + 6)
    power1 = tl.full((), 1.0, tl.float64)
    power2 = tl.full((), 1.0, tl.float64)
    power3 = tl.full((), 1.0, tl.float64)
    square1 = beta1
    square2 = beta2
    square3 = ratio
    bits_left = number.to(tl.int32)
    while bits_left > 0:
        odd = (bits_left & 1) != 0
        power1 = tl.where(odd, power1 * square1, power1)
        power2 = tl.where(odd, power2 * square2, power2)
        power3 = tl.where(odd, power3 * square3, power3)
        square1 *= square1
        square2 *= square2
        square3 *= square3
        bits_left = bits_left >> 1
    terms = tl.where(ratio == 1.0, number.to(tl.float64), (1.0 - power3) / (1.0 - ratio))
    correction1 = 1.0 - power1
    correction2 = tl.sqrt(1.0 - power2)
    max_update = (1.0 - beta1) / correction1 * tl.sqrt((1.0 - power2) / (1.0 - beta2)) * tl.sqrt(terms)
    unbounded = ratio == float("inf")
    max_update = tl.where(unbounded, tl.where(number > 1, float("inf"), 1.0), max_update)
    return Corrections(correction1, correction2, 1.0 / correction2, max_update)


@triton.jit
def kept_corrections(kept_ptr, group_ptr, number):
    """Return ``corrections``, read where the previous step kept them; kept_ptr: the tensor's [2, KEPT], int64."""
    entry_ptr = kept_ptr + (number & 1) * KEPT
    is_other = tl.load(entry_ptr) != number
    for k in tl.static_range(1, 3):
        is_other |= tl.load(entry_ptr + k).to(tl.float64, bitcast=True) != tl.load(group_ptr + k)
    correction1 = tl.load(entry_ptr + 3).to(tl.float64, bitcast=True)
    correction2 = tl.load(entry_ptr + 4).to(tl.float64, bitcast=True)
    correction2_inv = tl.load(entry_ptr + 5).to(tl.float64, bitcast=True)
    max_update = tl.load(entry_ptr + 6).to(tl.float64, bitcast=True)
    if is_other:
        correction1, correction2, correction2_inv, max_update = corrections(group_ptr, number)
    return Corrections(correction1, correction2, correction2_inv, max_update)


@triton.jit
def keep_corrections(kept_ptr, group_ptr, number):
    """Keep the Corrections of step ``number``, in the entry that no program of the previous step reads."""
    numbers = corrections(group_ptr, number)
    entry_ptr = kept_ptr + (number & 1) * KEPT
    tl.store(entry_ptr, number)
    for k in tl.static_range(1, 3):
        tl.store(entry_ptr + k, tl.load(group_ptr + k).to(tl.int64, bitcast=True))
    for k in tl.static_range(4):
        tl.store(entry_ptr + 3 + k, numbers[k].to(tl.int64, bitcast=True))


@triton.jit
def adam_numbers(group_ptr, lr_address, step_corrections):
    """Return the numbers of a step with these Corrections."""
    lr = learning_rate(group_ptr, lr_address)
    beta1 = tl.load(group_ptr + 1)
    beta2 = tl.load(group_ptr + 2)
    weight_decay = tl.load(group_ptr + 4)
    return AdamNumbers(
        first_share=(1.0 - beta1).to(tl.float32),
        beta2=beta2.to(tl.float32),
        second_share=(1.0 - beta2).to(tl.float32),
        eps=tl.load(group_ptr + 3).to(tl.float32),
        weight_decay=weight_decay.to(tl.float32),
        maximize=tl.load(group_ptr + 5) != 0,
        decay_factor=(1.0 - lr * weight_decay).to(tl.float32),
        correction2=step_corrections.correction2.to(tl.float32),
        correction2_inv=step_corrections.correction2_inv.to(tl.float32),
        rate=(-lr / step_corrections.correction1).to(tl.float32),
        limit=(step_corrections.max_update * step_corrections.correction1).to(tl.float32),
        bound=(lr * step_corrections.max_update).to(tl.float32),
    )


@triton.jit
def sgd_numbers(group_ptr, lr_address, number):
    """Return the numbers of step ``number``, int64, from 1."""
    lr = learning_rate(group_ptr, lr_address)
    momentum = tl.load(group_ptr + 1)
    weight_decay = tl.load(group_ptr + 3)
    return SgdNumbers(
        minus_lr=(-lr).to(tl.float32),
        momentum=momentum.to(tl.float32),
        share=(1.0 - tl.load(group_ptr + 2)).to(tl.float32),
        weight_decay=weight_decay.to(tl.float32),
        nesterov=tl.load(group_ptr + 4) != 0,
        maximize=tl.load(group_ptr + 5) != 0,
        is_first=number == 1,
        average_share=(1.0 - momentum).to(tl.float32),
        decay_factor=(1.0 - lr * weight_decay).to(tl.float32),
        bound=(lr * tl.load(group_ptr + 6)).to(tl.float32),
    )


@triton.jit
def mixed(x):
    """Mix the bits of x, uint32, so that each bit of the result depends on all of x's (lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def with_number(key, number):
    """Return the key after one more number, an int64, as ``key_of``."""
    low = number.to(tl.uint32)
    high = (number >> 32).to(tl.uint32)
    key = mixed(key * 0x9E3779B1 + low + 0x7F4A7C15)
    return mixed(key * 0x9E3779B1 + high + 0x7F4A7C15)


@triton.jit
def random_bits(key, start, offsets, LARGE: tl.constexpr):
    """Return 32 bits, uint32, for each element at ``offsets`` from ``start``, int64. LARGE: indices may pass 2^31."""
    if LARGE:
        index = start + offsets.to(tl.int64)
        low = index.to(tl.uint32) ^ ((index >> 32).to(tl.uint32) * 0x9E3779B9)
    else:
        low = start.to(tl.uint32) + offsets.to(tl.uint32)
    return mixed(low ^ key)


@triton.jit
def swapped(drawn):
    """Return 32 random bits, uint32, with their halves exchanged; see kernels/step_numbers.py."""
    return (drawn << 16) | (drawn >> 16)


@triton.jit
def upper_bits(drawn, COUNT: tl.constexpr):
    """Return the upper COUNT of 32 random bits, uint32, as int32."""
    return (drawn >> (32 - COUNT)).to(tl.int32)
