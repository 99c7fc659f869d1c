"""The float8 and float4 formats, with their limits computed from their bit layout.

E4M3 (torch.float8_e4m3fn) has no infinity: exponent 15 with mantissa 7 is NaN and every other code is finite, so its
largest value is 1.75 x 2^8 = 448. E5M2 (torch.float8_e5m2) is the upper byte of IEEE float16, infinities included.
Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1.

E4M4 is for optimizers' second moments alone, which have no sign: E4M3 whose sign bit is a mantissa bit. torch has no
dtype for it, so its codes are bytes; nothing casts to it.

E2M1 (torch.float4_e2m1fn_x2) has 16 codes, all of them numbers: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Two lie
in a byte, the first in its lower half, so that a dimension of codes is half as long as that of the values.
Source: OCP Microscaling Formats v1.0, section 5.3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A float8 or float4 format: what its codes mean.

    Attributes:
        name: the field's name for it, ``"E4M3"``, ``"E5M2"``, ``"E4M4"`` or ``"E2M1"``.
        dtype: the torch dtype of the codes.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field, without the hidden bit.
        has_inf: whether the top exponent holds infinities.
        signed: whether there is a sign bit.
        has_nan: whether a code is NaN.

    Example:
        >>> from octavo import E4M3, E5M2
        >>> E4M3.max, E5M2.max
        (448.0, 57344.0)
        >>> E4M3.smallest_subnormal == 2.0**-9
        True
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    has_inf: bool
    signed: bool = True
    has_nan: bool = True

    @property
    def is_packed(self) -> bool:
        """Whether two codes lie in a byte, and a tensor's scales are of two levels (numerics.py)."""
        return self.exponent_bits + self.mantissa_bits < 4

    @property
    def bias(self) -> int:
        """The exponent's bias."""
        return 2 ** (self.exponent_bits - 1) - 1

    # neither a cached_property, whose lock in Python 3.11 ends a compiled graph, nor a field, which such a graph would
    # give to __init__
    @property
    def max(self) -> float:
        """The largest finite value."""
        exponent, mantissa = divmod(self.max_code, 1 << self.mantissa_bits)
        return (1.0 + mantissa * 2.0**-self.mantissa_bits) * 2.0 ** (exponent - self.bias)

    @property
    def limit(self) -> float:
        """The number that a tensor's scale brings its amax to: ``max``.

        For E2M1 it is 6 x 448: each of its blocks stores an E4M3 scale besides, which is at most 448.
        """
        return self.max * E4M3.max if self.is_packed else self.max

    @property
    def overflow(self) -> float:
        """The number halfway from the largest value to where the next one would be: larger ones are saturated."""
        return self.max + 2.0 ** (math.frexp(self.max)[1] - 2 - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with a hidden bit."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        # above it are inf and NaNs, which take the whole top exponent, or NaN alone, if the format has one
        above = 1 << self.mantissa_bits if self.has_inf else int(self.has_nan)
        return (1 << self.exponent_bits + self.mantissa_bits) - 1 - above

    @property
    def nan_code(self) -> int:
        """The one code that Octavo writes for NaN, in a format that has one."""
        return 0x7F if self.signed else 0xFF

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name  # pickled as the module-level constant, so that identity survives


E4M3 = Format("E4M3", torch.float8_e4m3fn, exponent_bits=4, mantissa_bits=3, has_inf=False)
"""torch.float8_e4m3fn: largest value 448, no infinity."""
E5M2 = Format("E5M2", torch.float8_e5m2, exponent_bits=5, mantissa_bits=2, has_inf=True)
"""torch.float8_e5m2: largest value 57344, and infinities."""
E4M4 = Format("E4M4", torch.uint8, exponent_bits=4, mantissa_bits=4, has_inf=False, signed=False)
"""The format of second moments: E4M3 whose sign bit is one more bit of mantissa; codes are bytes."""

E2M1 = Format("E2M1", torch.float4_e2m1fn_x2, exponent_bits=2, mantissa_bits=1, has_inf=False, has_nan=False)
"""torch.float4_e2m1fn_x2: largest value 6, no NaN, two codes a byte."""

# The dtypes that octavo casts from and reads back to.
HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)

FORMATS: dict[torch.dtype, Format] = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}
CAST_FORMATS = {**FORMATS, E2M1.dtype: E2M1}  # all that casts write


def format_of(dtype: torch.dtype) -> Format:
    """Return the format of a torch float8 or float4 dtype.

    Raises:
        TypeError: for any other dtype.
    """
    if dtype not in CAST_FORMATS:
        dtypes = "torch.float8_e4m3fn, torch.float8_e5m2 or torch.float4_e2m1fn_x2"
        raise TypeError(f"{dtype} is no dtype of octavo's codes; use {dtypes}")
    return CAST_FORMATS[dtype]
