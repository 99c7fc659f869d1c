"""Describe to kernels what a cast reads, a tensor or a function of it, and where its codes go. On the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import E5M2, format_of
from octavo.granularity import ALL, Tile
from octavo.kernels.activations import activation_of
from octavo.kernels.arguments import CastSource, NormSource, RotaryHeads, Scaling
from octavo.kernels.layouts import is_small_block, padded_size
from octavo.kernels.triton.groups import Grouping, Groups
from octavo.kernels.triton.launch import TABLE, WHOLE, Config, as_argument, block_size, config, launch, multiprocessors
from octavo.kernels.triton.prologue import Function, HeadGradients, Input, NormFactors
from octavo.kernels.triton.tiles import Codes, Outputs, Rounding, Source, Tiling

_UNBLOCKED = {(ALL, ALL), (1, ALL), (ALL, 1)}


def rounding_of(scaling: Scaling) -> Rounding:
    """Return the constants by which kernels choose a scaling's scales and round to its codes."""
    return _rounding(*scaling[:4], scaling.swizzles)


@functools.cache
def _rounding(dtype: torch.dtype, block: Tile, power_of_two: bool, margin: int, swizzles: bool) -> Rounding:
    """Return ``rounding_of`` of a scaling's fields, one object for equal ones."""
    fmt = format_of(dtype)
    return Rounding(fmt is E5M2, fmt.max * 2.0**-margin, power_of_two, block, swizzles)


def codes_to(q: Tensor | None, t: Tensor | None = None) -> Codes:
    """Return where kernels write codes, as they lie and transposed; tensors without elements are left out."""
    q, t = (None if codes is None or codes.numel() == 0 else codes for codes in (q, t))
    return Codes(q, 0 if q is None else q.shape[1], t, 0 if t is None else t.stride(0))


def outputs_to(codes: Codes, scale_inv: Tensor, amax: Tensor | None) -> Outputs:
    """Return where kernels write the codes, scales and amaxes of one scaling."""
    laid = amax if scale_inv.ndim == 1 else scale_inv  # swizzled ones have no strides
    return Outputs(codes, as_argument(scale_inv), amax, *((0, 0) if laid is None else laid.stride()))


_Shares = tuple[int, int, Tiling]


@functools.lru_cache(maxsize=4096)
def _shares(
    shape: tuple[int, int], enough: int, tile_r: int, tile_c: int, tiles: int, one_tile: bool, halves: bool, fold: int
) -> _Shares:
    """Return ``CastInput.tiling``; ``enough``: programs, below which each does fewer tiles."""
    rows, cols = shape
    strips = -(-cols // tile_c) or 1
    while tiles > 1 and strips * -(-rows // (tile_r * tiles)) < enough:
        tiles //= 2
    parts = -(-rows // (tile_r * tiles)) or 1
    even = rows == parts * tile_r * tiles and cols == strips * tile_c
    return strips, parts, Tiling(even, tile_r, tile_c, tiles, one_tile, halves, fold)


class CastInput(NamedTuple):
    """x, and the function of it that is cast.

    rows, cols: of a half, where a gated gradient writes two, which lie along the columns. extra: what the
    function reads besides x. groups: of rows in groups, as kernels read them.
    """

    x: Tensor
    rows: int
    cols: int
    extra: Input | NormFactors | HeadGradients | None = None
    function: Function = Function()
    halves: int = 1
    groups: tuple[Groups, Grouping] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of all that is cast."""
        return self.rows, self.cols * self.halves

    @property
    def source(self) -> Source:
        """x, its size and its strides, as kernels take them."""
        return Source(self.x, self.rows, self.cols, *self.x.stride())

    def config(self, kernel: str, and_value: bool = False) -> Config:
        """Return the configuration of a kernel that casts this: the row for its ``kind`` where the table has one.

        ``and_value``: whether the activation whose gradient is cast is cast too.
        """
        by_kind = f"{kernel}_{self.kind}" if self.kind else kernel
        h_is_codes = isinstance(self.extra, Input) and self.extra.scale_inv is not None
        variant = f"{by_kind}_and_value" if and_value else f"{by_kind}_of_codes" if h_is_codes else by_kind
        name = next((name for name in (variant, by_kind) if name in TABLE), kernel)
        return config(name, (self.rows * self.cols).bit_length())

    @property
    def kind(self) -> str:
        """The name of what is computed: "" for x itself, else norm, rotary, activation, gradient or gated_gradient."""
        function = self.function
        if function.name in ("", "norm", "rotary"):
            return function.name
        return "activation" if not function.gradient else "gated_gradient" if function.gated else "gradient"

    def fits(self, *blocks: Tile) -> bool:
        """Whether the kernels of rows, columns, small blocks or a whole tensor cast this by these blocks."""
        function, h = self.function, self.extra
        if isinstance(h, Input) and function.gated and h.scale_inv is not None:
            if function.block_c != WHOLE and self.cols % function.block_c:  # a block would hold gate and up
                return False
        for block in blocks:
            if block not in _UNBLOCKED:
                if self.rows * self.cols == 0 or not is_small_block(block):
                    return False
                if self.halves == 2 and self.cols % block[1]:  # a block would reach into the other half
                    return False
        return True

    def clear_padding(self, codes: Tensor, pad: int) -> None:
        """Set codes [R, C'], C' a multiple of ``pad``, to 0 where kernels would not reach all of their padding."""
        if self.halves == 2 and codes.shape[1] - self.cols > padded_size(self.cols, pad):
            codes.view(torch.uint8).zero_()  # no tile of a half may reach the end of the padding

    def tiling(self, tile_r: int, tile_c: int, tiles: int = 1, one_tile: bool = False, fold: int = 1) -> _Shares:
        """Return how programs share what is cast: (strips of columns, programs of a strip, tiling).

        ``tiles``: the most that a program does; fewer where a multiprocessor would otherwise have under three programs.
        """
        shape = self.rows, self.cols
        enough = 3 * multiprocessors(self.x.get_device())
        strips, parts, tiling = _shares(shape, enough, tile_r, tile_c, tiles, one_tile, self.halves == 2, fold)
        if self.groups is not None:
            groups, grouping = self.groups
            if grouping.ragged:  # a number that is enough for any groups
                parts = self.rows // (tiling.tiles * tile_r) + groups.count + 1
            tiling = tiling._replace(even=False, grouped=True)
        return strips, parts, tiling

    def with_partial_sums(self, sums: Tensor | None, parts: int) -> tuple[Tensor, Tensor] | None:
        """Return (column sums, memory for each part's partial sums), None without sums."""
        return sums if sums is None else (sums, self.x.new_empty((self.halves, parts, self.cols), dtype=torch.float32))

    def launch(
        self, kernel: Any, programs: int, num_warps: int, arguments: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        """Launch a kernel that reads this, with these other arguments and constants of it."""
        # a function may fuse multiply-adds, but not one that is rounded as the op rotary rounds; a plain cast has none
        fuses = self.function.name not in ("", "rotary")
        launch(kernel, programs, (self.source, self.extra, *arguments, self.function, *constants), num_warps, fuses)


def cast_input(source: CastSource | RotaryHeads) -> CastInput:
    """Return what the kernels of a cast read for this source."""
    if isinstance(source, RotaryHeads):
        return _heads_input(source)
    x, activation, preactivation, h_scale_inv, h_tile = source
    if not activation:
        return CastInput(x, *x.shape)
    rows, cols = source.shape
    name, gated = activation_of(activation)
    h = x if preactivation is None else preactivation
    half = h.shape[1] // 2 if gated else h.shape[1]
    block_r, block_c = map(block_size, h_tile)
    scale_r = scale_c = scale_shift = 0
    if h_scale_inv is not None and h_scale_inv.numel() == 0:
        h_scale_inv = None  # there are no codes, and kernels would read at least one scale
    if h_scale_inv is not None:
        h_scale_inv = as_argument(h_scale_inv)
        scale_r, scale_c = h_scale_inv.stride()
        scale_shift = half // block_c * scale_c if gated else 0
    halves = 2 if gated and preactivation is not None else 1
    shift = half * h.stride(1) if gated else 0
    input = Input(h, h.stride(0), h.stride(1), shift, h_scale_inv, scale_r, scale_c, scale_shift)
    function = Function(name, gated, preactivation is not None, block_r, block_c)
    return CastInput(x, rows, cols // halves, input, function, halves)


def _heads_input(heads: RotaryHeads) -> CastInput:
    """Return what a cast of gradients of heads reads, as q's matrix and the places of k's and v's."""
    (q, k, v), (rows, cols) = map(_rows_of_heads, heads[:3]), heads.shape
    cos, sin, positions, half = heads.cos.contiguous(), heads.sin.contiguous(), heads.q.shape[1], heads.q.shape[3] // 2
    first_columns = q.shape[1], q.shape[1] + k.shape[1]
    angles = cos, sin, 0 if len(cos) == 1 else cos.stride(0), positions
    strides = k.stride(0) - q.stride(0), v.stride(0) - k.stride(0)
    h = HeadGradients(k, v, *first_columns, *strides, *angles)
    return CastInput(q, rows, cols, h, Function("rotary", half=half, shift=cos.shape[2] - half))


def _rows_of_heads(x: Tensor) -> Tensor:
    """Return x [B, S, heads, D] as [B S, heads x D], whose rows' elements lie beside each other; a copy if need be."""
    batch, positions, heads, width = x.shape
    if x.stride(3) == 1 and x.stride(2) == width and x.stride(0) == positions * x.stride(1):
        return x.as_strided((batch * positions, heads * width), (x.stride(1), 1))
    # of one position stride(1) may be any number: torch calls x contiguous, and copies nothing
    return x.contiguous().view(batch * positions, heads * width)


def norm_input(
    source: NormSource, mean: Tensor, rstd: Tensor, residual: Tensor | None = None, total: Tensor | None = None
) -> CastInput:
    """Return what the kernels of a norm's cast read; its statistics are known, or norm_kernels.py's kernels write them.

    residual: of x's shape, is added to x by those kernels, which write the sum to ``total``.
    """
    gamma, beta = source.gamma.contiguous(), None if source.beta is None else source.beta.contiguous()
    added = (None, None) if residual is None else (residual.contiguous(), total)
    norm = NormFactors(mean if source.kind == "layer_norm" else None, rstd, gamma, beta, *added)
    return CastInput(source.x, *source.shape, norm, Function("norm", zero_centered=source.zero_centered))
