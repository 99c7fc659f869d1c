"""LayerNorm and RMSNorm with the cast of what they return. The contracts are in signatures.py.

One launch, of norm_kernels.py, where a program that owns rows knows the scales of what it normalises:

    Delayed                        whose scale is known to exist; the amax is gathered on the way
    per row                        whose amax takes another look at them
    per block of up to 32 rows     which lie in a program's tile; two such scalings too

All else is a launch for the statistics, with Dynamic the amax too, and then the cast, which normalises for itself. So
are blocks of more rows: few programs would own so many, and no cache would hold them until they are read again. Tiles
that no kernel casts so, and tensors without elements, are cast after the reference has normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from octavo.granularity import ALL, Tile, scale_shape
from octavo.kernels.arguments import NormSource, Output, Scaling, new_statistics
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.norm import normalise
from octavo.kernels.triton.cast import cast_by_tile, second_codes, second_of
from octavo.kernels.triton.cast_blocks import BlockOutputs, BlockTiling, Second, cast_by_block
from octavo.kernels.triton.given import Given, given_of_norm, kernel_rounding, out_of
from octavo.kernels.triton.history import scale_exists
from octavo.kernels.triton.launch import Config, config, launch, next_power_of_two, workspace
from octavo.kernels.triton.norm_kernels import NormTiling, norm_blocks_kernel, norm_rows_kernel, norm_tensor_kernel
from octavo.kernels.triton.produce import Norm
from octavo.kernels.triton.tiles import Rounding, Source

_MOST_ROWS = 32  # of a block, for one launch: of 4096 rows the programs of 128 would be 32


class _Call(NamedTuple):
    """What an op is asked to normalise, and where its statistics and y go."""

    source: NormSource
    mean: Tensor
    rstd: Tensor
    y: Tensor
    keep: bool

    @property
    def x(self) -> Tensor:
        """What is normalised."""
        return self.source.x

    @property
    def given(self) -> Given:
        """What a cast that normalises takes, once the statistics are known."""
        x, gamma, beta, kind, _, zero_centered = self.source
        return given_of_norm(x, self.mean, self.rstd, gamma, beta, kind, zero_centered)

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, rstd, y), as the ops return them."""
        return self.mean, self.rstd, self.y

    def by_reference(self) -> tuple[_Call, Given]:
        """The same, computed; and what it makes of x, to be cast."""
        wide, mean, rstd = normalise(*self.source)
        y = wide.to(self.x.dtype, copy=True) if self.keep else self.y
        return self._replace(mean=mean, rstd=rstd, y=y), Given(wide, *wide.shape)


def _call_of(source: NormSource, keep: bool) -> _Call:
    x, gamma, beta, kind, eps, zero_centered = source
    gamma, beta = gamma.contiguous(), None if beta is None else beta.contiguous()
    source = NormSource(x, gamma, beta, kind, float(eps), zero_centered)
    return _Call(source, *new_statistics(source, keep), keep)


def norm_cast(source: NormSource, scaling: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::norm_cast``."""
    call = _call_of(source, output.keep)
    given = call.given
    q, t = given.both_codes(scaling.dtype, output)
    laid = t if output.transpose else None
    if source.x.numel() > 0 and given.fits(scaling.tile):
        scale_inv, amax = _cast(call, scaling, q, laid)
    else:
        call, given = call.by_reference()
        scale_inv, amax, _ = cast_by_tile(given, scaling, q, laid, False)
    return q, t, scale_inv, amax, *call.results


def norm_cast_two_scalings(source: NormSource, first: Scaling, second: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::norm_cast_two_scalings``."""
    call = _call_of(source, output.keep)
    given = call.given
    q, other = second_codes(given, first, second, output)
    second_q, second_t = (None, other) if output.transpose else (other, None)
    fits = source.x.numel() > 0 and given.fits(first.tile) and given.fits(second.tile)
    if fits and is_small_block(first.tile) and is_small_block(second.tile):
        outputs = second_of(given, second, other, output)
        return q, _cast_two_blocks(call, first, q, outputs), other, outputs.scale_inv, *call.results
    if fits:
        scale_inv, _ = _cast(call, first, q, None)
    else:
        call, given = call.by_reference()
        scale_inv, *_ = cast_by_tile(given, first, q, None, False)
    second_scale_inv, *_ = cast_by_tile(given, second, second_q, second_t, False)
    if output.transpose:
        second_scale_inv = second_scale_inv.t().contiguous()  # nothing to move for a row or a column
    return q, scale_inv, other, second_scale_inv, *call.results


def _cast(call: _Call, scaling: Scaling, q: Tensor, t: Tensor | None) -> tuple[Tensor, Tensor]:
    """Statistics, y, and one scaling into q and t: (scale_inv, amax)."""
    tile, delayed_scale = scaling.tile, scaling.delayed_scale
    of_tensor = tile[0] == ALL and tile[1] == ALL
    if of_tensor and delayed_scale is not None and scale_exists(delayed_scale, scaling.role):
        return _cast_tensor(call, delayed_scale, scaling.role, kernel_rounding(scaling), q, t)
    if tile[0] == 1 and tile[1] == ALL:
        return _cast_rows(call, kernel_rounding(scaling), q, t)
    if is_small_block(tile) and tile[0] <= _MOST_ROWS:
        return _cast_blocks(call, kernel_rounding(scaling), tile, q, t)
    own_amax = _find_statistics(call, of_tensor)
    return cast_by_tile(call.given, scaling, q, t, False, own_amax)[:2]


def _cast_two_blocks(call: _Call, first: Scaling, q: Tensor, second: Second) -> Tensor:
    """The same in two scalings of small blocks: the first's scale_inv."""
    rounding, tile = kernel_rounding(first), first.tile
    if max(tile[0], second.tile[0]) <= _MOST_ROWS:
        return _cast_blocks(call, rounding, tile, q, None, second)[0]
    _find_statistics(call, False)
    return cast_by_block(call.given, rounding, tile, q, None, False, second)[0]


def _find_statistics(call: _Call, of_tensor: bool) -> Tensor | None:
    """Statistics, y, and if wanted the amax of what is to be cast [1, 1]."""
    amax = call.rstd.new_empty((1, 1)) if of_tensor else None
    arguments = out_of(None, None), None, amax, None, workspace(call.x, 2) if of_tensor else None
    _launch(norm_tensor_kernel, call, _config(call, None), None, arguments, (0, False))
    return amax


def _cast_tensor(
    call: _Call, delayed_scale: Tensor, role: int, rounding: Rounding, q: Tensor, t: Tensor | None
) -> tuple[Tensor, Tensor]:
    scale_inv, amax = call.rstd.new_empty((1, 1)), call.rstd.new_empty((1, 1))
    arguments = out_of(q, t), scale_inv, amax, delayed_scale, workspace(call.x, 2)
    _launch(norm_tensor_kernel, call, _config(call, t), None, arguments, (role, rounding.e5m2))
    return scale_inv, amax


def _cast_rows(call: _Call, rounding: Rounding, q: Tensor, t: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = call.x.shape[0]
    scale_inv, amax = call.rstd.new_empty((rows, 1)), call.rstd.new_empty((rows, 1))
    _launch(norm_rows_kernel, call, _config(call, t), None, (out_of(q, t), scale_inv, amax), (rounding,))
    return scale_inv, amax


def _cast_blocks(
    call: _Call, rounding: Rounding, tile: Sequence[int], q: Tensor, t: Tensor | None, second: Second | None = None
) -> tuple[Tensor, Tensor]:
    shape = scale_shape(call.x.shape, tile)
    scale_inv, amax = call.rstd.new_empty(shape), call.rstd.new_empty(shape)
    out = BlockOutputs(out_of(q, t), scale_inv, amax if second is None else None, *scale_inv.stride())
    second_out = second_rounding = second_block = None
    if second is not None:
        second_rounding, second_block, second_out = second.rounding, (second.tile[0], second.tile[1]), second.outputs
    name = _config(call, t if second is None else second.t, "norm_cast_blocks")
    blocks = (tile[0], tile[1]), second_block
    _launch(norm_blocks_kernel, call, name, blocks, (out, second_out), (rounding, second_rounding))
    return scale_inv, amax


def _config(call: _Call, t: Tensor | None, kernel: str = "norm_cast") -> str:
    """The name of a configuration: for rows read and written as they lie, or not."""
    return kernel if t is None and call.x.stride(1) == 1 else f"{kernel}_transpose"


def _launch(
    kernel: Any,
    call: _Call,
    name: str,
    blocks: tuple[Tile, Tile | None] | None,
    arguments: Sequence[Any],
    constants: Sequence[Any],
) -> None:
    """Launch a kernel of norm_kernels.py.

    Args:
        kernel: which.
        call: what it normalises.
        name: its configuration's.
        blocks: the two scalings' (rows, columns), which a tile is to hold whole.
        arguments: the kernel's, from ``out`` on.
        constants: its constants but the first and the last.
    """
    (x, gamma, beta, kind, eps, zero_centered), mean, rstd, y, keep = call
    rows, cols = x.shape
    chosen = config(name, (rows * cols).bit_length())
    block_r, block_c, tiles, num_warps = _tile(chosen, cols, [block for block in blocks or () if block is not None])
    tiles = tiles if kernel is norm_tensor_kernel else 1  # fewer programs then meet at the shared amax
    height = block_r * tiles
    even, one_tile = rows % height == 0 and cols % block_c == 0, block_c >= cols
    tiling = NormTiling(even, one_tile, tiles, block_r, block_c, 16 // x.element_size())
    if blocks is not None:
        constants = *constants, BlockTiling(even, block_r, block_c, *blocks)
    norm = Norm(mean if kind == "layer_norm" else None, rstd, gamma, beta)
    first = Source(x, rows, cols, *x.stride()), norm, y if keep else None, eps
    launch(kernel, -(-rows // height), (*first, *arguments, zero_centered, *constants, tiling), num_warps)


def _tile(chosen: Config, cols: int, blocks: Sequence[Sequence[int]]) -> Config:
    """A configuration whose tile has whole blocks, and whole rows where up to 16 warps can hold one."""
    elements = chosen.block_r * chosen.block_c
    block_r = max(chosen.block_r, *(rows for rows, _ in blocks), 1)
    least = max(16, *(size for _, size in blocks), 1)
    widest = max(next_power_of_two(cols), least)
    block_c = max(elements // block_r, least)
    larger = widest // block_c
    if block_r == 1 and 1 < larger and larger * chosen.num_warps <= 16:
        return Config(1, widest, chosen.tiles, larger * chosen.num_warps)
    block_c = min(block_c, widest)
    return chosen._replace(block_r=max(block_r, elements // block_c), block_c=block_c)
