"""kernels/random_bits.py in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x):
    """Each bit of the result depends on all of x's (lowbias32); uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def with_number(key, number):
    """The key after one more number, an int64, as ``key_of``."""
    low = number.to(tl.uint32)
    high = (number >> 32).to(tl.uint32)
    key = mixed(key * 0x9E3779B1 + low + 0x7F4A7C15)
    return mixed(key * 0x9E3779B1 + high + 0x7F4A7C15)


@triton.jit
def random_bits(key, start, offsets, LARGE: tl.constexpr):
    """32 bits, uint32, for each element at ``offsets`` from ``start``, int64. LARGE: indices may pass 2^32."""
    if LARGE:
        index = start + offsets.to(tl.int64)
        low = index.to(tl.uint32) ^ ((index >> 32).to(tl.uint32) * 0x9E3779B9)
    else:
        low = start.to(tl.uint32) + offsets.to(tl.uint32)
    return mixed(low ^ key)


@triton.jit
def half(drawn, UPPER: tl.constexpr):
    """16 of 32 random bits, int32."""
    return (drawn >> 16 if UPPER else drawn & 0xFFFF).to(tl.int32)
