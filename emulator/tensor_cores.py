"""Compute what a matrix instruction of NVIDIA's tensor cores adds to its accumulator, bit for bit.

The hardware adds some products and the accumulator at once: all are cut off, towards zero, a fixed number of bits below
the largest exponent among them, what is left is added exactly, and the sum is cut off to the result's bits. A product's
exponent is the sum of its operands' and its significand is not normalised (1.5 * 1.5 is 2.25 * 2^0); a subnormal
operand has the exponent of its format's smallest normal number. Scales of blocks are powers of two, which only add to
their product's exponent.

NVIDIA documents none of this. Sources:

- MMA-Sim (arXiv 2511.10909; mmasim 2.1.1 on PyPI), which its authors hold against the GPUs: all of ``_SUMS``, special
  values and subnormals. tests/emulator/test_tensor_cores.py holds this file to it, bit for bit.
- Khattak and Mikaitis, Accurate Models of NVIDIA Tensor Cores (arXiv 2512.07004): the same numbers, by tests of their
  own. What GPUs gave in their repository (north-numerical-computing/MATLAB-tensor-core, 5,000 results a kind) is what
  this file gives, bit for bit: E4M3, E5M2, f16 and bf16 on L40S and RTX 1000 Ada (mma), E4M3 and E5M2 on H100 and H200
  (wgmma), f16 and bf16 on H100, H200 and B200. It has none of FP8 by tcgen05, of sm_120 and of E4M3 by E5M2.
- DeepSeek-V3 (arXiv 2412.19437), section 3.3.2: Hopper's sums of FP8 products keep about 14 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Exponents = NDArray[np.integer]

SMALLEST_NORMAL = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126}  # exponents
# By architecture, instruction and bytes of an operand: of a Rule all but the formats.
_SUMS = {
    ("sm_89", "mma", 1): (16, 13, 13, -132),
    ("sm_89", "mma", 2): (8, 24, 23, -132),
    ("sm_90", "wgmma", 1): (32, 13, 13, -133),
    ("sm_90", "wgmma", 2): (16, 25, 23, -133),
    ("sm_90", "mma", 2): (16, 25, 23, -133),
    ("sm_100", "tcgen05", 1): (32, 25, 23, -133),
    ("sm_100", "tcgen05", 2): (16, 25, 23, -133),
    ("sm_100", "mma", 2): (16, 25, 23, -133),
    ("sm_120", "mma", 1): (32, 25, 23, -133),
    ("sm_120", "mma", 2): (16, 25, 23, -133),
}
UNSCALED = np.ones((1, 1, 1))
_AT_ONCE = 1 << 18  # products: 2 MiB, which fit a cache
_OF_ZERO = -5000  # counts as an operand's exponent where it is 0: below all others


class Rule(NamedTuple):
    """The sums of an instruction with float32 accumulators. One whose K is longer than ``terms`` sums several times."""

    formats: tuple[str, str]  # of a and b
    terms: int  # products that are added at once, with the accumulator
    aligned_fraction: int  # fraction bits kept below the largest exponent
    fraction: int  # fraction bits of the result
    zero: int  # exponent of an accumulator of 0; it shows only where products are near float32's smallest numbers


def rule_of(target: str, instruction: str, a: str, b: str) -> Rule:
    """Return the rule of ``mma`` (mma.sync), ``wgmma`` (wgmma.mma_async) or ``tcgen05`` (tcgen05.mma) on a target.

    ``a`` and ``b`` are ``e4m3``, ``e5m2``, ``f16`` or ``bf16``; only those of FP8 may differ.

    Raises:
        NotImplementedError: where no source has a rule. FP8 in mma.sync has none on sm_90 and sm_100: the hardware has
            no such instruction, ptxas replaces it by several. Triton (3.6 to 3.9) converts to f16 there.
    """
    coded = {"e4m3", "e5m2"}
    has_formats = a in SMALLEST_NORMAL and (a == b or {a, b} == coded)
    sums = _SUMS.get((target.rstrip("af"), instruction, 1 if a in coded else 2)) if has_formats else None
    if sums is None:
        raise NotImplementedError(f"no source says how {instruction} sums {a} by {b} in float32 on {target}")
    return Rule((a, b), *sums)


def multiply_add(
    a: Floats, b: Floats, c: NDArray[np.float32], rule: Rule, a_scale: Floats = UNSCALED, b_scale: Floats = UNSCALED
) -> NDArray[np.float32]:
    """Return a . b^T + c of G instructions alike.

    Args:
        a: [G, M, K], exact values of the rule's first format.
        b: [G, N, K], of its second.
        c: [G, M, N].
        rule: of the instruction; what K has beyond it, further instructions add to the same accumulator.
        a_scale, b_scale: [G or 1, M or 1, 1] and [G or 1, N or 1, 1]: powers of two, or NaN, that multiply rows.

    Returns:
        [G, M, N]. Zeros are +0, NaNs 0x7FFFFFFF; above float32's largest number is infinity.
    """
    groups = max(1, _AT_ONCE // max(1, rule.terms * c.shape[1] * c.shape[2]))
    parts = (slice(first, first + groups) for first in range(0, len(c), groups))
    a_scale, b_scale = (np.broadcast_to(scale, (len(c), *scale.shape[1:])) for scale in (a_scale, b_scale))
    with np.errstate(invalid="ignore", over="ignore"):
        sums = [_chain(a[part], b[part], c[part], a_scale[part], b_scale[part], rule) for part in parts]
        result = np.concatenate(sums or [c], dtype=np.float32)
    result.view(np.uint32)[np.isnan(result)] = 0x7FFFFFFF
    return result


def _chain(
    a: Floats, b: Floats, c: NDArray[np.float32], a_scale: Floats, b_scale: Floats, rule: Rule
) -> NDArray[np.float32]:
    """Return ``multiply_add``, laid [K, G, M, N] or [K, M, N, G]: numpy is fast where the last axis is long."""
    by_groups = len(a) > b.shape[1]
    order, places, c_order = ((2, 1, 0), (2, 1), (1, 2, 0)) if by_groups else ((2, 0, 1), (3, 2), (0, 1, 2))
    (a, a_tops), (b, b_tops) = (
        _scaled(form, *(np.ascontiguousarray(np.expand_dims(each.transpose(order), at)) for each in (x, scale)))
        for x, scale, form, at in zip((a, b), (a_scale, b_scale), rule.formats, places, strict=True)
    )
    total = c.transpose(c_order)
    for step in (slice(first, first + rule.terms) for first in range(0, len(a), rule.terms)):
        top = (a_tops[step] + b_tops[step]).max(axis=0)
        total = _sum(a[step] * b[step], top, total, rule).astype(np.float32)
    return total.transpose(np.argsort(c_order))


def _scaled(form: str, x: Floats, scale: Floats) -> tuple[Floats, Exponents]:
    """Return an operand's values times their scales, and the exponents of both together."""
    tops = np.where(x == 0, _OF_ZERO, _exponents(x, SMALLEST_NORMAL[form])) + _exponents(scale, -127)
    return x * scale, tops.astype(np.int16)


def _sum(products: Floats, top: Exponents, c: NDArray[np.float32], rule: Rule) -> Floats:
    """Add products [terms, ...], of largest exponents top [...], and c [...]; products are overwritten.

    float64 holds all of it: products have 22 bits at most, and what is added are 33 integers below 2^27.
    """
    wide = c.astype(np.float64, order="C")
    last = (
        np.clip(np.maximum(top, np.where(c == 0, rule.zero, _exponents(wide, -126))), rule.zero, 284)
        - rule.aligned_fraction
    )
    unit = _power(-last)
    products *= unit
    total = (np.trunc(products, out=products).sum(axis=0) + np.trunc(wide * unit)) * _power(last)
    last = _exponents(total, -126) - rule.fraction
    return np.trunc(total * _power(-last)) * _power(last) + 0.0  # -0 + 0 is +0


def _exponents(x: Floats, least: int) -> Exponents:
    """Return exponents of the powers of two at or below |x|, at least ``least`` (as 0's); inf's, NaN's are 1024."""
    return np.maximum((x.view(np.int64) >> 52 & 0x7FF) - 1023, least)


def _power(exponents: Exponents) -> Floats:
    return (exponents.astype(np.int64) + 1023 << 52).view(np.float64)
