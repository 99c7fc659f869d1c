"""Compute what a cast rounds from what it reads: an activation, its gradient, a norm, or nothing.

The definitions are activations.py, reference/activation.py and reference/norm.py. A kernel calls ``produce`` for each
of its tiles. A gated gradient is two tiles of one read, dgate and dup, which lie side by side in what is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from octavo.kernels.triton.tiles import decode, load_scale_inv, load_tile, narrow


class Function(NamedTuple):
    """The function of x that is cast: none, an activation or its gradient, or one of two more.

    "norm": a norm whose statistics are known; "rotary": gradients of heads, turned back and rounded to x's dtype.
    """

    name: str = ""
    gated: bool = False
    gradient: bool = False
    block_r: int = 0  # (rows, columns) that share a scale_inv in an activation's input, if that is codes
    block_c: int = 0
    zero_centered: bool = False
    half: int = 0  # half of a head's elements
    shift: int = 0  # from the angles of a head's first half to those of its second: half, or 0
    e5m2: bool = False  # whether an activation that is cast beside its gradient gets codes in E5M2


class Input(NamedTuple):
    """An activation's input: (gate | up), or h alone. It is as high as x; ``shift`` leads from gate to up."""

    ptr: Any
    stride_r: Any
    stride_c: Any
    shift: Any
    scale_inv: Any  # None unless h is codes
    scale_stride_r: Any
    scale_stride_c: Any
    scale_shift: Any


class NormFactors(NamedTuple):
    """The factors and addends of a norm: statistics of rows [R], parameters of columns [C]; mean, beta may be None.

    residual [R, C], contiguous, is added to x first, and the sum written to total; both may be None.
    """

    mean: Any
    rstd: Any
    gamma: Any
    beta: Any
    residual: Any = None
    total: Any = None


class HeadGradients(NamedTuple):
    """The gradients of keys and values, which lie to the right of x, those of queries, and the angles of positions."""

    k: Any
    v: Any
    k_first: Any  # the first column of k's, and of v's
    v_first: Any
    added_stride_k: Any  # the stride of k's rows less that of x's; a row's elements lie in order
    added_stride_v: Any  # the stride of v's rows less that of k's
    cos: Any  # [1 or B, S, half + shift]
    sin: Any
    angles_stride_b: Any
    positions: Any  # S


@triton.jit
def produce(x, extra, rows, cols, function: tl.constexpr, EVEN: tl.constexpr, scale_rows=None):
    """Return the tile [TR, TC] to be cast, float32, 0 outside of x; and the second one, of a gated gradient.

    x is the Source, whose R and C are those of the tile's tensor; an activation reads it only for its gradient. extra
    is Input, NormFactors, HeadGradients or None. EVEN: none of the tile is outside. scale_rows [TR]: which of an
    Input's scales a row has, if not by its number.
    """
    if function.name == "":
        first = load_tile(x, rows, cols, EVEN)
        second = first
    elif function.name == "norm":
        ZERO_CENTERED: tl.constexpr = function.zero_centered
        first = load_tile(x, rows, cols, EVEN)
        first = normalise(first, x, extra, rows, cols, ZERO_CENTERED, EVEN)
        second = first
    elif function.name == "rotary":
        first = turned_back(x, extra, rows, cols, function)
        second = first
    else:
        NAME: tl.constexpr = function.name  # Triton 3.6 takes no tuple's field as an argument
        gate = load_input(extra, x, rows, cols, False, function, EVEN, scale_rows)
        if function.gradient:
            first = load_tile(x, rows, cols, EVEN)
            second = first
            if function.gated:
                second *= value(gate, NAME)
                first *= load_input(extra, x, rows, cols, True, function, EVEN, scale_rows)
            first *= slope(gate, NAME)
            if not function.gated:
                second = first
        else:
            first = value(gate, NAME)
            if function.gated:
                first *= load_input(extra, x, rows, cols, True, function, EVEN, scale_rows)
            second = first
    return first, second


@triton.jit
def load_input(h, x, rows, cols, UP: tl.constexpr, function: tl.constexpr, EVEN: tl.constexpr, scale_rows=None):
    """Load the tile of h, or of its second half, as float32."""
    offsets = rows.to(tl.int64)[:, None] * h.stride_r + cols.to(tl.int64)[None, :] * h.stride_c
    ptr = h.ptr
    if UP:
        ptr += h.shift
    if EVEN:
        tile = tl.load(ptr + offsets)
    else:
        tile = tl.load(ptr + offsets, mask=(rows < x.R)[:, None] & (cols < x.C)[None, :], other=0.0)
    if h.scale_inv is None:
        result = tile.to(tl.float32)
    else:
        result = decode(tile) * input_scale_inv(h, x, rows, cols, UP, function, scale_rows)
    return result


@triton.jit
def input_scale_inv(h, x, rows, cols, UP: tl.constexpr, function: tl.constexpr, scale_rows=None):
    """Load the scale_inv of each code of a tile of h."""
    ptr = h.scale_inv
    if UP:
        ptr += h.scale_shift
    # codes beyond the end may have any scale
    row = scale_rows
    if scale_rows is None:
        row = tl.where(rows < x.R, rows, 0) // function.block_r
    col = tl.where(cols < x.C, cols, 0) // function.block_c
    return load_scale_inv(ptr + row[:, None] * h.scale_stride_r + col[None, :] * h.scale_stride_c)


@triton.jit
def normalise(tile, x, norm, rows, cols, ZERO_CENTERED: tl.constexpr, EVEN: tl.constexpr):
    """Return (tile - mean) rstd gamma + beta, 0 outside of x, by statistics that an earlier launch wrote.

    norm_kernels.normalised has them in registers, and loads gamma and beta without a mask where it can.
    """
    inside_r = rows < x.R
    inside_c = cols < x.C
    if norm.mean is not None:
        tile -= tl.load(norm.mean + rows, mask=inside_r, other=0.0)[:, None]
    tile *= tl.load(norm.rstd + rows, mask=inside_r, other=0.0)[:, None]
    tile *= factor(tl.load(norm.gamma + cols, mask=inside_c, other=0.0), ZERO_CENTERED)[None, :]
    if norm.beta is not None:
        tile += tl.load(norm.beta + cols, mask=inside_c, other=0.0).to(tl.float32)[None, :]
    if not EVEN:
        tile = tl.where(inside_r[:, None] & inside_c[None, :], tile, 0.0)
    return tile


@triton.jit
def turned_back(x, heads, rows, cols, function: tl.constexpr):
    """Return a tile of heads' gradients, turned back by their positions and rounded, float32.

    reference/rotary.py has the formula. The other half of a head's element lies in the same lines of a cache.
    """
    HALF: tl.constexpr = function.half
    SHIFT: tl.constexpr = function.shift
    inside = (rows < x.R)[:, None] & (cols < x.C)[None, :]
    turns = inside & (cols < heads.v_first)[None, :]
    q_ptr = x.ptr + cols
    k_ptr = heads.k + (cols - heads.k_first)
    v_ptr = heads.v + (cols - heads.v_first)
    ptr = tl.where(cols < heads.k_first, q_ptr, tl.where(cols < heads.v_first, k_ptr, v_ptr))
    # by differences: LLVM makes a choice between arguments a choice between their addresses
    stride = x.stride_r + tl.where(cols < heads.k_first, 0, heads.added_stride_k)
    stride += tl.where(cols < heads.v_first, 0, heads.added_stride_v)
    places = ptr[None, :] + rows.to(tl.int64)[:, None] * stride[None, :]
    this = tl.load(places, mask=inside, other=0.0)
    at = cols % (2 * HALF)
    is_first = at < HALF
    other = tl.load(places + tl.where(is_first, HALF, -HALF)[None, :], mask=turns, other=0.0).to(tl.float32)
    # of 32 bits: a division of 64 is a function's call
    sequence, position = rows // heads.positions, rows % heads.positions
    angles = (sequence.to(tl.int64) * heads.angles_stride_b + position.to(tl.int64) * (HALF + SHIFT))[:, None]
    cos_offsets = tl.where(is_first, at, at - HALF + SHIFT)[None, :]
    sin_offsets = tl.where(is_first, at + SHIFT, at - HALF)[None, :]
    cos = tl.load(heads.cos + angles + cos_offsets, mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(heads.sin + angles + sin_offsets, mask=turns, other=0.0).to(tl.float32)
    turned = this.to(tl.float32) * cos + other * tl.where(is_first[None, :], sin, -sin)
    turned = narrow(turned, x.ptr.dtype.element_ty).to(tl.float32)
    return tl.where((cols < heads.v_first)[None, :], turned, this.to(tl.float32))


@triton.jit
def factor(gamma, ZERO_CENTERED: tl.constexpr):
    """Return the factor by which a norm multiplies, float32."""
    result = gamma.to(tl.float32)
    if ZERO_CENTERED:
        result += 1.0
    return result


@triton.jit
def value(h, NAME: tl.constexpr):
    """Return f(h); a NaN stays one."""
    if NAME == "relu":
        result = tl.where(h <= 0, 0.0, h)
    elif NAME == "squared_relu":
        result = tl.where(h <= 0, 0.0, h)
        result *= result
    elif NAME == "gelu":
        result = normal_distribution(h) * h
    else:
        result = h * sigmoid_of(h, NAME)
    return result


@triton.jit
def slope(h, NAME: tl.constexpr):
    """Return f'(h); a NaN stays one."""
    if NAME == "relu":
        result = tl.where(h <= 0, 0.0, tl.where(h > 0, 1.0, h))
    elif NAME == "squared_relu":
        result = 2.0 * tl.where(h <= 0, 0.0, h)
    elif NAME == "gelu":
        result = normal_distribution(h) + h * (0.3989422804014327 * bell(h))
    else:
        s = sigmoid_of(h, NAME)
        relative_slope = 1.0 - s  # of the sigmoid: its slope over s
        if NAME == "quick_gelu":
            relative_slope *= 1.702
        elif NAME == "gelu_tanh":
            # where the square is larger, relative_slope or h s is 0, and times inf it would be NaN
            relative_slope *= 1.5957691216057308 + 0.21406444881780076 * tl.minimum(h * h, 1e4)
        else:
            tl.static_assert(NAME == "silu", "no function of this name")
        result = s + (h * s) * relative_slope
    return result


@triton.jit
def normal_distribution(h):
    """Return how much of the normal distribution lies below h: erfc(-h / sqrt(2)) / 2.

    Of -|h| it is e^(-h^2/2) P(t), t = 1 / (1 + 0.3 |h|), with the P of degree 8 whose largest relative error is least,
    1.3e-7 in exact arithmetic. Half as many instructions as CUDA's erff, and right far below 0 too.
    """
    t = reciprocal(1.0 + 0.3 * tl.abs(h))
    poly = 0.035932301289915446 * t - 0.15827817492704296
    poly = poly * t + 0.20821004169845628
    poly = poly * t - 0.05539673068813302
    poly = poly * t + 0.12947058468881503
    poly = poly * t + 0.09963711414673072
    poly = poly * t + 0.12079841312816038
    poly = poly * t + 0.11962638650770586
    below = bell(h) * (poly * t)
    return tl.where(h > 0, 1.0 - below, below)


@triton.jit
def bell(h):
    """Return e^(-h^2/2)."""
    return exp2(h * h * -0.7213475204444817)


@triton.jit
def sigmoid_of(h, NAME: tl.constexpr):
    """Return the sigmoid that multiplies h in f, 1 / (1 + 2^(-log2(e) a)); it is 0 or 1 where a is infinite."""
    if NAME == "quick_gelu":
        power = h * -2.4554669595930156
    elif NAME == "gelu_tanh":
        power = h * (-2.302208198144325 - 0.1029432395800235 * (h * h))
    else:
        tl.static_assert(NAME == "silu", "no function of this name")
        power = h * -1.4426950408889634
    return reciprocal(1.0 + exp2(power))


if triton.knobs.runtime.interpret:

    @triton.jit
    def exp2(x):
        """Return 2^x."""
        return tl.exp2(x)

    @triton.jit
    def reciprocal(x):
        """Return 1 / x."""
        return 1.0 / x

else:
    # one instruction each: tl.exp2 and / take several, for subnormal numbers that don't matter here

    @triton.jit
    def exp2(x):
        """Return 2^x, 0 where that is subnormal."""
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def reciprocal(x):
        """Return 1 / x, 0 where that is subnormal."""
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
