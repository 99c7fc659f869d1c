"""Random bits that depend on nothing but a key and an element's index: the same for any number of ranks or launches."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 32) - 1
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


def random_bits(key: int, index: Tensor) -> Tensor:
    """32 bits, int32, for each element of ``index``: int32 or int64, indices in the whole tensor; overwritten.

    The finaliser is "lowbias32" of C. Wellons, hash-prospector (bias 0.17 of the ideal's).
    """
    if index.dtype == torch.int64 and index.numel() and int(index.view(-1)[-1]) >> 32:
        # the upper half of a large tensor's index enters as well
        index.bitwise_xor_((index >> 32) * 0x9E3779B9)
    x = index.to(torch.int32).bitwise_xor_(_signed(key))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(_SECOND))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def halves(drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper 16 of 32 random bits, int32."""
    return drawn & 0xFFFF, (drawn >> 16).bitwise_and_(0xFFFF)


def key_of(*numbers: int) -> int:
    """A key of 32 bits out of some numbers of 64 (a seed, a tensor's, a step's), each of which changes all of it."""
    key = 0x243F6A88
    for number in numbers:
        for word in (number & _MASK, number >> 32 & _MASK):
            key = _mixed((key * 0x9E3779B1 + word + 0x7F4A7C15) & _MASK)
    return key


def _mixed(x: int) -> int:
    x ^= x >> 16
    x = x * _FIRST & _MASK
    x ^= x >> 15
    x = x * _SECOND & _MASK
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
