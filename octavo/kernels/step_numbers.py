"""An optimizer step's own numbers, in float64, before they meet float32 tensors, and its random bits.

Powers are products of squares, so that every device rounds them alike. Random bits depend on nothing but a key and an
element's index: the same for any number of ranks or launches. triton/step_numbers.py has both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = (1 << 32) - 1
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


def power(base: float, exponent: int) -> float:
    """Return base^exponent, for a base of at least 0 and an exponent of at least 1; inf where it is too large."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def adam_max_update(step: int, beta1: float, beta2: float) -> float:
    """Return R_t, the largest |m_hat| / sqrt(v_hat) that any gradients can give Adam in step t, from 1.

    By Cauchy-Schwarz on m_t = (1 - beta1) sum beta1^(t-i) g_i against v_t = (1 - beta2) sum beta2^(t-i) g_i^2. It is
    inf where beta2 is 0 and beta1 is not, or beta1^2 > beta2 lets it grow without end.

    Example:
        >>> round(adam_max_update(10**6, 0.9, 0.999), 2), round(adam_max_update(10**6, 0.9, 0.95), 3)
        (7.27, 1.165)
    """
    if math.isinf(ratio := ratio_of(beta1, beta2)):
        return math.inf if step > 1 else 1.0
    terms = float(step) if ratio == 1.0 else (1 - power(ratio, step)) / (1 - ratio)
    if math.isinf(terms):
        return math.inf
    return (1 - beta1) / (1 - power(beta1, step)) * math.sqrt((1 - power(beta2, step)) / (1 - beta2)) * math.sqrt(terms)


def ratio_of(beta1: float, beta2: float) -> float:
    """Return beta1^2 / beta2, of the sum in R_t; inf where only beta2 is 0."""
    if beta1 == 0.0:
        return 0.0
    return beta1 * beta1 / beta2 if beta2 else math.inf


def bound_after(amax: Tensor, lr: float, max_update: float, weight_decay: float) -> Tensor:
    """Return the most that |w|, up to ``amax`` now, can be after a step, with room for float32's roundings.

    ``max_update``: the most that the step moves an element, by the learning rate; ``weight_decay``: decoupled, or 0.
    """
    return (amax * abs(1 - lr * weight_decay) + lr * max_update) * (1 + 2.0**-20)


def root_of(square: Tensor) -> Tensor:
    """Return the square root of float32, rounded to nearest, in a fresh tensor.

    torch's own is MKL's on a CPU, which on some (an AMD EPYC without AVX512) is a unit in the last place off in 17 % of
    all numbers. In float64 that is far below what float32 rounds.
    """
    return square.to(torch.float64).sqrt_().to(torch.float32)


def random_bits(key: int, index: Tensor) -> Tensor:
    """Return 32 bits, int32, for each element of ``index``: int32 or int64, of the whole tensor; overwritten."""
    if index.dtype == torch.int64 and index.numel() and int(index.view(-1)[-1]) >> 32:
        # the upper half of a large tensor's index enters as well
        index.bitwise_xor_((index >> 32) * 0x9E3779B9)
    return mixed_(index.to(torch.int32).bitwise_xor_(_signed(key)))


def mixed_(x: Tensor) -> Tensor:
    """Hash each int32 element in place, and return the tensor.

    The function is "lowbias32" of C. Wellons, hash-prospector (bias 0.17 of the ideal's).
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(_SECOND))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def swapped(drawn: Tensor) -> Tensor:
    """Return 32 random bits, int32, with their halves exchanged, for a second number that is rounded by its upper bits.

    The upper 16 of both are independent; the further ones of each, the other's first, weigh below 2^-16 of a step.
    """
    return (drawn << 16).bitwise_or_((drawn >> 16).bitwise_and_(0xFFFF))


def upper_bits(drawn: Tensor, count: int) -> Tensor:
    """Return the upper ``count`` of 32 random bits, as int32 from 0 to 2^count - 1."""
    return (drawn >> (32 - count)).bitwise_and_((1 << count) - 1)


def key_of(*numbers: int) -> int:
    """Return a key of 32 bits from numbers of 64 (a seed, a tensor's, a step's), each of which changes all of it."""
    key = 0x243F6A88
    for number in numbers:
        for word in (number & _MASK, number >> 32 & _MASK):
            key = _mixed((key * 0x9E3779B1 + word + 0x7F4A7C15) & _MASK)
    return key


def _mixed(x: int) -> int:
    """Return ``mixed_`` of one number of 32 bits."""
    x ^= x >> 16
    x = x * _FIRST & _MASK
    x ^= x >> 15
    x = x * _SECOND & _MASK
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    """Return a number of 32 bits as torch's int32 holds it."""
    return x - (1 << 32) if x >= 1 << 31 else x
