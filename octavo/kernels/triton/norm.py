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

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from octavo.granularity import ALL, Tile
from octavo.kernels.arguments import NormSource, Output, Scaling, new_statistics
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.reference.cast import cast_two_scalings as reference_cast_two_scalings
from octavo.kernels.triton.cast import cast_by_tile, two_scalings
from octavo.kernels.triton.cast_blocks import cast_by_block
from octavo.kernels.triton.cast_input import CastInput, block_scaling_of, codes_to, norm_input, rounding_of
from octavo.kernels.triton.cast_lines import cast_by_line
from octavo.kernels.triton.known_scales import scale_exists
from octavo.kernels.triton.launch import Config, config, launch, workspace
from octavo.kernels.triton.norm_kernels import norm_blocks_kernel, norm_rows_kernel, norm_tensor_kernel
from octavo.kernels.triton.tiles import Outputs

_MOST_ROWS = 32  # of a block, for one launch: of 4096 rows the programs of 128 would be 32


def norm_cast(source: NormSource, scaling: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::norm_cast``."""
    norm = _norm(source, output)
    if norm is None or not norm.given.fits(scaling.tile):
        return reference_cast(source, scaling, output)
    q, t = norm.given.both_codes(scaling.dtype, output)
    out = norm.given.outputs(scaling, q, t)
    norm.cast(norm.given, scaling, out)
    return q, t, out.scale_inv, out.amax, *norm.statistics


def norm_cast_two_scalings(source: NormSource, first: Scaling, second: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::norm_cast_two_scalings``."""
    norm = _norm(source, output)
    if norm is None or not norm.given.fits(first.tile, second.tile):
        return reference_cast_two_scalings(source, first, second, output)
    casts = norm.cast_blocks, norm.cast_lines, norm.cast
    *results, _ = two_scalings(norm.given, first, second, output, *casts)
    return *results, *norm.statistics


def _norm(source: NormSource, output: Output) -> _Norm | None:
    """What is to be launched; None where there is nothing to normalise."""
    if source.x.numel() == 0:
        return None
    mean, rstd, y = new_statistics(source, output.keep)
    return _Norm(norm_input(source, mean, rstd), float(source.eps), (mean, rstd, y), output.keep)


class _Norm(NamedTuple):
    """A norm whose statistics are yet to be found, by the same launch as its cast or by one before."""

    given: CastInput
    eps: float
    statistics: tuple[Tensor, Tensor, Tensor]  # (mean, rstd, y), as the ops return them
    keep: bool

    def cast(self, given: CastInput, scaling: Scaling, out: Outputs, column_sum: bool = False) -> None:
        """``cast_by_tile`` of the norm, and its statistics and y; column sums are not asked for."""
        tile, delayed_scale = scaling.tile, scaling.delayed_scale
        if is_small_block(tile):
            self.cast_blocks(given, column_sum, (scaling, out))
        elif tile == (1, ALL):
            self.launch(norm_rows_kernel, "norm_cast", out.codes.t is not None, (out,), (rounding_of(scaling),))
        elif tile == (ALL, ALL) and delayed_scale is not None and scale_exists(delayed_scale, scaling.role):
            arguments = out, delayed_scale, workspace(given.x, 2)
            constants = scaling.role, rounding_of(scaling).e5m2
            self.launch(norm_tensor_kernel, "norm_cast", out.codes.t is not None, arguments, constants)
        else:
            self.find_statistics(out.amax if tile == (ALL, ALL) else None)
            cast_by_tile(given, scaling, out, column_sum, knows_amax=True)

    def cast_blocks(
        self,
        given: CastInput,
        column_sum: bool,
        first: tuple[Scaling, Outputs],
        second: tuple[Scaling, Outputs] | None = None,
    ) -> None:
        """``cast_by_block`` of the norm, and its statistics and y."""
        scaling, out = first
        second_scaling, second_out = second or (None, None)
        blocks = scaling.tile, (second_scaling or scaling).tile
        if max(rows for rows, _ in blocks) > _MOST_ROWS:
            self.find_statistics(None)
            cast_by_block(given, column_sum, first, second)
            return
        transposes = (out if second_out is None else second_out).codes.t is not None
        scalings = block_scaling_of(scaling), None if second_scaling is None else block_scaling_of(second_scaling)
        self.launch(norm_blocks_kernel, "norm_cast_blocks", transposes, (out, second_out), scalings, blocks)

    def cast_lines(self, given: CastInput, column_sum: bool, *scalings: tuple[Scaling, Outputs]) -> None:
        """``cast_by_line`` of the norm, and its statistics and y."""
        self.find_statistics(None)
        cast_by_line(given, column_sum, *scalings)

    def find_statistics(self, amax: Tensor | None) -> None:
        """Statistics, y, and unless it is None the amax of what is to be cast [1, 1]."""
        work = None if amax is None else workspace(self.given.x, 2)
        arguments = Outputs(codes_to(None), None, amax, 0, 0), None, work
        self.launch(norm_tensor_kernel, "norm_cast", False, arguments, (0, False))

    def launch(
        self,
        kernel: Any,
        name: str,
        transposes: bool,
        arguments: Sequence[Any],
        constants: Sequence[Any],
        blocks: tuple[Tile, ...] = (),
    ) -> None:
        """Launch a kernel of norm_kernels.py, by a configuration of this name, with its own arguments and constants.

        A tile is to hold whole blocks: (rows, columns) that share a scale, of one or two scalings.
        """
        x, rows, cols, norm, function, *_ = self.given
        name = name if not transposes and x.stride(1) == 1 else f"{name}_transpose"
        chosen = config(name, (rows * cols).bit_length())
        block_r, block_c, tiles, num_warps = _tile(chosen, cols, blocks)
        tiles = tiles if kernel is norm_tensor_kernel else 1  # fewer programs then meet at the shared amax
        fold = 16 // x.element_size()
        _, programs, tiling = self.given.tiling(block_r, block_c, tiles, block_c >= cols, fold)
        first = self.given.source, norm, self.statistics[2] if self.keep else None, self.eps
        launch(kernel, programs, (*first, *arguments, function.zero_centered, *constants, tiling), num_warps)


@functools.lru_cache(maxsize=4096)
def _tile(chosen: Config, cols: int, blocks: tuple[Tile, ...]) -> Config:
    """A configuration whose tile has whole blocks, and whole rows where up to 16 warps can hold one."""
    elements = chosen.block_r * chosen.block_c
    block_r = max(chosen.block_r, *(rows for rows, _ in blocks), 1)
    least = max(16, *(size for _, size in blocks), 1)
    widest = max(triton.next_power_of_2(cols), least)
    block_c = max(elements // block_r, least)
    larger = widest // block_c
    if block_r == 1 and 1 < larger and larger * chosen.num_warps <= 16:
        return Config(1, widest, chosen.tiles, larger * chosen.num_warps)
    block_c = min(block_c, widest)
    return chosen._replace(block_r=max(block_r, elements // block_c), block_c=block_c)
