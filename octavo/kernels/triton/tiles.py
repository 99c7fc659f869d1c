"""The arithmetic that all kernels share: a scale, rounding to codes, and what the last of several programs finishes.

The definitions are numerics.py and reference/codes.py; these are the same in Triton. On a GPU rounding is the
hardware's conversion. Triton's interpreter rounds float8 wrongly where the mantissa carries (124.5 -> 64), so there it
is bit arithmetic.

Legend: x is float32 unless its name says otherwise; [TR, TC] is a program's tile of rows and columns. An annotation of
a kernel's argument can only say whether Triton compiles for its value, so its class stands in a comment behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# No constants here that kernels read: Triton compares each at every launch, about 1 us apiece.


class Source(NamedTuple):
    """A tensor that kernels read: x [R, C] of any strides. On the host a tensor and integers, in a kernel a pointer."""

    ptr: Any
    R: Any
    C: Any
    stride_r: Any
    stride_c: Any


class BlockScales(NamedTuple):
    """scale_inv that kernels read: one for each block of ``block_r`` x ``block_c`` codes, at these strides."""

    ptr: Any
    block_r: Any
    block_c: Any
    stride_r: Any
    stride_c: Any


class Codes(NamedTuple):
    """The places of codes, as they lie [R, q_stride] and transposed [C, t_stride]; None is left out.

    The strides are C and R, or more where the contraction is padded.
    """

    q: Any
    q_stride: Any
    t: Any
    t_stride: Any


class Outputs(NamedTuple):
    """The places of a scaling's results: codes, scale_inv, and amax or None; the strides of both, an element a block.

    ``scale``: where one scale for all is written too.
    """

    codes: Any
    scale_inv: Any
    amax: Any
    stride_r: Any
    stride_c: Any
    scale: Any = None


class Rounding(NamedTuple):
    """Constants for scales and codes; ``limit`` is format.max / 2^margin, ``block`` the elements that share a scale."""

    e5m2: bool
    limit: float
    power_of_two: bool
    block: tuple[int, int]  # (rows, columns), -1 for all
    swizzles: bool = False  # scale_inv, see layouts.swizzled


class Tiling(NamedTuple):
    """A program's part of the matrix that is cast, and the tiles by which it is read."""

    even: bool  # the matrix consists of whole parts, so nothing is masked
    tile_r: int
    tile_c: int
    tiles: int = 1  # one below the other
    one_tile: bool = False  # it holds whole rows
    halves: bool = False  # a gated gradient's two tiles are cast, which lie beside each other
    fold: int = 1  # elements that a thread loads at once
    grouped: bool = False  # rows are in groups, each of which has parts for itself


@triton.jit
def scale_from_amax(amax, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return numerics.scale_from_amax; LIMIT is format.max / 2^margin."""
    limit = tl.full(amax.shape, LIMIT, tl.float32)
    largest: tl.constexpr = 2.0**126
    smallest: tl.constexpr = 2.0**-126
    if POWER_OF_TWO:
        # The quotient's exponent is the difference of the bits' exponents, less one where the mantissas borrow: a tenth
        # of a division's instructions, and the same result, since no quotient below a power of two rounds up to it.
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (limit.to(tl.int32, bitcast=True) - bits) >> 23
        if LIMIT < 1.0:  # else the scale of a subnormal amax is the largest, whatever its mantissa
            subnormal = amax < smallest
            scaled = (amax * 2.0**24).to(tl.int32, bitcast=True)
            exponent = tl.where(subnormal, ((limit.to(tl.int32, bitcast=True) - scaled) >> 23) + 24, exponent)
        if LIMIT < 4.0:  # else it is never below the smallest
            exponent = tl.maximum(exponent, -126)
        scale = ((tl.minimum(exponent, 126) + 127) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.math.div_rn(limit, tl.where(amax > 0, amax, 1.0))  # a plain / is not correctly rounded
        scale = tl.where(scale > largest, largest, tl.where(scale < smallest, smallest, scale))
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def scale_inv_from_scale(scale, POWER_OF_TWO: tl.constexpr):
    """Return numerics.scale_inv_from_scale; POWER_OF_TWO: the scale is known to be one."""
    if POWER_OF_TWO:
        result = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        result = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return result


@triton.jit
def load_scale_inv(ptr, mask=None, OTHER: tl.constexpr = 1.0):
    """Load scale_inv as float32, whether it is stored so or as bytes of E8M0; OTHER where the mask is false."""
    if mask is None:
        result = tl.load(ptr)
    else:
        result = tl.load(ptr, mask=mask, other=OTHER)
    if result.dtype == tl.uint8:
        code = result.to(tl.int32)
        bits = tl.maximum(code << 23, 1 << 22)  # 0 is 2^-127
        result = tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
        if mask is not None:
            result = tl.where(mask, result, OTHER)
    return result


@triton.jit
def store_scale_inv(ptr, scale_inv, mask):
    """Write scale_inv, float32 [...], as float32, or powers of two as bytes of E8M0."""
    if ptr.dtype.scalar.element_ty == tl.uint8:
        tl.store(ptr, (scale_inv.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(ptr, scale_inv, mask=mask)


@triton.jit
def finite_abs(x):
    """Return |x|, 0 where x is inf or NaN, as an amax counts it."""
    return tl.maximum(tl.abs(nan_if_inf(x)), 0.0)  # of NaN and a number the number


@triton.jit
def nan_if_inf(x):
    """Return x, NaN where it is inf: one instruction, shared by a cast's amax and its codes."""
    return tl.fma(x, 0.0, x)


@triton.jit
def rounded(x):
    """Return x, a product that is to be summed where multiply-adds are fused, rounded before the sum.

    Two threads that add their products would each round the other's alone, and end with different sums.
    """
    return tl.fma(x, 2.0**-100, x)  # x, which the compiler doesn't know


@triton.jit
def encode(x, scale, E5M2: tl.constexpr):
    """Return codes of x times its scale: saturated if finite; NaN -> 0x7F; +-inf -> 0x7F in E4M3, +-inf in E5M2."""
    if E5M2:
        is_inf = tl.abs(x) == float("inf")
        codes = encode_finite(x, scale, E5M2).to(tl.uint8, bitcast=True)
        codes = tl.where(is_inf, tl.where(x < 0, 0xFC, 0x7C).to(tl.uint8), codes)
        result = codes.to(tl.float8e5, bitcast=True)
    else:
        result = encode_finite(nan_if_inf(x), scale, E5M2)
    return result


@triton.jit
def round_by_bits(y, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr):
    """Return the float8 codes nearest to y, ties to even, saturating at MAX_BITS (a float32); NaN -> 0x7F. uint8."""
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    # adding it leaves the code of a subnormal in the low bits, rounded as float32 sums are
    MAGIC_BITS: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA_BITS) << 23
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.where(magnitude > MAX_BITS, MAX_BITS, magnitude)
    rounded = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA_BITS)
    magic = tl.full(y.shape, MAGIC_BITS, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(is_nan, 0x7F, code).to(tl.uint8)


@triton.jit
def decode_bits(codes):
    """Return the float32 value of each float8 code, by its bits."""
    bits = codes.to(tl.uint8, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7F
    sign = (bits & 0x80) << 24
    if codes.dtype == tl.float8e5:  # the upper byte of a float16, whose exponent float32 has 112 above
        inf_or_nan = magnitude >= 0x7C
        value = (magnitude << 21).to(tl.float32, bitcast=True) * 2.0**112
        special = tl.where(magnitude == 0x7C, float("inf"), float("nan"))
    else:
        inf_or_nan = magnitude == 0x7F
        value = (magnitude << 20).to(tl.float32, bitcast=True) * 2.0**120
        special = tl.full(codes.shape, float("nan"), tl.float32)
    value = tl.where(inf_or_nan, special, value)
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def encode_finite(x, scale, E5M2: tl.constexpr):
    """Return ``encode`` of x that holds no inf, which would become max."""
    return narrow(x * scale, tl.float8e5 if E5M2 else tl.float8e4nv)


if triton.knobs.runtime.interpret:
    decode = decode_bits

    @triton.jit
    def kept_narrow(x, dtype: tl.constexpr):
        """Return x, float32 numbers that a 16-bit dtype has; until here registers hold them in that dtype."""
        return x

    @triton.jit
    def narrow(x, dtype: tl.constexpr):
        """Round float32 to dtype; of float8, beyond max to max."""
        if dtype == tl.float8e5:
            result = round_by_bits(x, 2, 15, 0x47600000).to(dtype, bitcast=True)
        elif dtype == tl.float8e4nv:
            result = round_by_bits(x, 3, 7, 0x43E00000).to(dtype, bitcast=True)
        elif dtype == tl.bfloat16:  # Triton's interpreter doesn't round this either
            bits = x.to(tl.int32, bitcast=True)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
            result = tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            result = x.to(dtype)
        return result

else:

    @triton.jit
    def kept_narrow(x, dtype: tl.constexpr):
        """Return x, float32 numbers that a 16-bit dtype has; until here registers hold them in that dtype."""
        # the compiler can't see that they are x and converts them anew: 24 registers fewer with two block scalings
        bits = x.to(dtype).to(tl.int16, bitcast=True)
        bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], tl.int16, is_pure=False, pack=2)
        return bits.to(dtype, bitcast=True).to(tl.float32)

    @triton.jit
    def narrow(x, dtype: tl.constexpr):
        """Round float32 to dtype; of float8, beyond max to max."""
        if dtype.is_fp8():
            # For Ada, Triton before 3.9 converts to float16 first, and cuts off: 1 normal code in 256 is one too small.
            # Two codes that are packed with two others, and read alone too, ptxas 12 loses: so four are one value.
            E4M3: tl.constexpr = (
                "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;"
                " mov.b32 $0, {lo, hi}; }"
            )
            E5M2: tl.constexpr = (
                "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1; cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3;"
                " mov.b32 $0, {lo, hi}; }"
            )
            code: tl.constexpr = E5M2 if dtype == tl.float8e5 else E4M3
            codes = tl.inline_asm_elementwise(code, "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)
            result = codes.to(dtype, bitcast=True)
        else:
            result = x.to(dtype)
        return result

    @triton.jit
    def decode(codes):
        """Return the float32 value of each float8 code."""
        return codes.to(tl.float32)


@triton.jit
def raise_amax(work_ptr, amax, mask=None):
    """Raise an amax, or several, that this launch's programs share; each is finite and not negative."""
    # such floats are ordered as their bits are
    tl.atomic_max(work_ptr, amax.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def is_last_program(counter_ptr, programs):
    """Whether all others of ``programs`` have passed here; what they wrote is then visible.

    The last one sets the counter back to 0 for the next launch.
    """
    tl.debug_barrier()  # all of this program's threads have written
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == programs - 1
    if last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return last


@triton.jit
def take_amax(work_ptr):
    """Return the amax that all programs raised, and set it back to 0 for the next launch. For the last program only."""
    return tl.atomic_xchg(work_ptr, 0, sem="relaxed").to(tl.float32, bitcast=True)


@triton.jit
def load_tile(x, rows, cols, EVEN: tl.constexpr):
    """Load the tile [TR, TC] of a Source as float32, 0 outside of it; rows [TR], cols [TC]. EVEN: none is outside."""
    offsets = rows.to(tl.int64)[:, None] * x.stride_r + cols.to(tl.int64)[None, :] * x.stride_c
    if EVEN:
        tile = tl.load(x.ptr + offsets)
    else:
        tile = tl.load(x.ptr + offsets, mask=(rows < x.R)[:, None] & (cols < x.C)[None, :], other=0.0)
    return tile.to(tl.float32)


@triton.jit
def store_codes(codes, out, rows, cols, x, EVEN: tl.constexpr, half=None, columns=None, columns_end=None):
    """Write codes [TR, TC] of the Source x to the Codes out.

    The padding's codes are 0, since load_tile's are. EVEN: there is no padding, and the tile is inside. With a half, 0
    or 1, out has room for two tensors like x, side by side. columns [TR]: where transposed codes go, up to columns_end;
    by default where the rows lie.
    """
    col_end = out.q_stride
    out_cols = cols
    if half is not None:
        out_cols += half * x.C
        col_end = tl.where(half == 0, x.C, col_end - x.C)  # the first half has no padding
    if out.q is not None:
        offsets = rows.to(tl.int64)[:, None] * out.q_stride + out_cols[None, :]
        if EVEN:
            tl.store(out.q + offsets, codes)
        else:
            tl.store(out.q + offsets, codes, mask=(rows < x.R)[:, None] & (cols < col_end)[None, :])
    if out.t is not None:
        if columns is None:
            columns = rows
            columns_end = out.t_stride
        offsets = out_cols.to(tl.int64)[:, None] * out.t_stride + columns[None, :]
        if EVEN:
            tl.store(out.t + offsets, tl.trans(codes))
        else:
            tl.store(out.t + offsets, tl.trans(codes), mask=(cols < x.C)[:, None] & (columns < columns_end)[None, :])


@triton.jit
def store_tiles(
    tile,
    other_half,
    scale,
    scale_of_half,
    out,
    rows,
    cols,
    x,
    E5M2: tl.constexpr,
    tiling: tl.constexpr,
    columns=None,
    columns_end=None,
):
    """Encode the results of ``produce``, one tile or two halves beside each other, and write them to the Codes out."""
    codes = encode(tile, scale, E5M2)
    if tiling.halves:
        store_codes(codes, out, rows, cols, x, tiling.even, 0, columns, columns_end)
        codes = encode(other_half, scale_of_half, E5M2)
        store_codes(codes, out, rows, cols, x, tiling.even, 1, columns, columns_end)
    else:
        store_codes(codes, out, rows, cols, x, tiling.even, None, columns, columns_end)


@triton.jit
def finish_column_sums(sums, sums_of_half, out, counter_ptr, part, parts, cols, C, HALVES: tl.constexpr):
    """Leave a program's column sums to the last of ``parts`` programs, which adds all of them up in one order.

    Args:
        sums, sums_of_half: [TC] float32, this program's; of its other half of columns, with HALVES.
        out: (totals [C] or [2 C], of x's dtype; [parts, C] or [2, parts, C] float32 partial sums).
        counter_ptr: this strip of columns' counter, 0 before and after.
        part, parts: which program this is of those that share the columns.
        cols: [TC].

    Returns:
        whether this program is the last; what all of them wrote before is then visible to it.
    """
    total_ptr, partial_ptr = out
    tl.store(partial_ptr + part * C + cols, sums, mask=cols < C)
    if HALVES:
        tl.store(partial_ptr + (parts + part) * C + cols, sums_of_half, mask=cols < C)
    is_last = is_last_program(counter_ptr, parts)
    if is_last:
        add_partial_sums(total_ptr, partial_ptr, parts, cols, C)
        if HALVES:
            add_partial_sums(total_ptr + C, partial_ptr + parts * C, parts, cols, C)
    return is_last


@triton.jit
def add_partial_sums(total_ptr, partial_ptr, parts, cols, C):
    """Write the sum of [parts, C] for the columns ``cols`` [TC], reading those of 32 parts at a time."""
    total = tl.full([32, cols.shape[0]], 0.0, tl.float32)
    for first in range(0, parts, 32):
        part = first + tl.arange(0, 32)
        inside = (part < parts)[:, None] & (cols < C)[None, :]
        # from L2: this multiprocessor's own cache doesn't see what others wrote
        ptrs = partial_ptr + part[:, None] * C + cols[None, :]
        total += tl.load(ptrs, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(total_ptr + cols, narrow(tl.sum(total, 0), total_ptr.dtype.element_ty), mask=cols < C)
