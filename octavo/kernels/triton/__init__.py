"""The Triton kernels, on CUDA tensors.

Casts equal their reference bit for bit; those that compute an exp or a row's sum, to float32's rounding.

    file                     ops that it computes, or what it has for those that do
    cast.py                  amax, cast, cast_and_commit, norm: picks a kernel and launches it
    multi_tensor_cast.py     multi_tensor_cast
    grouped_cast.py          cast of rows in groups, whose kernels find a tensor's or a column's scale
      cast_input.py            what a cast reads and writes, as kernels' arguments, and how programs share it
      cast_kernels.py          kernels with a scale a tensor, row or column
      cast_blocks.py           the kernel with a scale a block
      prologue.py              what is cast: x, an activation, its gradient, a norm, heads turned back
    norm_kernels.py          norm_backward; the kernels of norms and of their casts
    dequantize.py            dequantize
    cast_statistics.py       cast_statistics, note_faults
    delayed_update.py        delayed_update; the delayed scale that a cast reads, and its history
    matmul.py                matmul
    grouped_matmul.py        grouped_matmul
      library_matmul.py        torch's scaled products, where they serve, and whether they are right
    groups.py                which group of rows a program works on
    cross_entropy.py         cross_entropy, its backward, as numbers and as codes
    rotary.py                rotary
    optimizer_step.py        optimizer_step: plans and launches
      step_kernel.py           its kernel
      optimizer_state.py       masters and moments, read and written
      moment_codes.py          codes of moments
      step_numbers.py          random bits, and a step's numbers
      table.py                 a launch's table of tensors; of multi_tensor_cast too
    tiles.py                 what all kernels share: scales, rounding, loads, stores, sums of several programs
    launch.py, configs.json  launches, configurations, scratch that programs share
    replay.py                launches again without the Python before them
    cases.py, agreement.py   cases to time and to compare with the reference, and how near they must be

A *tile* is what a program reads at once, [tile_r, tile_c], and a *block* is what shares a scale, (block_r, block_c).
Elsewhere that is a granularity's tile: so are an op's argument ``tile`` and that field of arguments.py's values named.
A program's *part* is all that it writes: some tiles one below the other in a *strip* of columns, of a product one tile.
What it adds up for others to add are *partial* sums.
"""

from collections.abc import Callable
from typing import Any

from octavo.kernels.arguments import unpacking
from octavo.kernels.backward_pass import scales_of_pass
from octavo.kernels.triton.cast import amax, cast, cast_and_commit, norm
from octavo.kernels.triton.cast_statistics import cast_statistics, note_faults
from octavo.kernels.triton.cross_entropy import cross_entropy, cross_entropy_backward, cross_entropy_codes
from octavo.kernels.triton.delayed_update import delayed_update, scale_exists
from octavo.kernels.triton.dequantize import dequantize
from octavo.kernels.triton.grouped_matmul import grouped_matmul
from octavo.kernels.triton.launch import on_its_device
from octavo.kernels.triton.library_matmul import reads_swizzled
from octavo.kernels.triton.matmul import matmul
from octavo.kernels.triton.multi_tensor_cast import multi_tensor_cast
from octavo.kernels.triton.norm_kernels import norm_backward
from octavo.kernels.triton.optimizer_step import optimizer_step
from octavo.kernels.triton.replay import replayed
from octavo.kernels.triton.rotary import rotary

__all__ = ["KERNELS", "optimizer_step", "reads_swizzled"]

_KERNELS: list[Callable[..., Any]] = [amax, cast, cast_and_commit, cast_statistics, cross_entropy]
_KERNELS += [cross_entropy_backward, cross_entropy_codes, delayed_update, dequantize, grouped_matmul, matmul]
_KERNELS += [multi_tensor_cast, norm, norm_backward, note_faults, rotary, scales_of_pass]
_APART = "multi_tensor_cast", "scales_of_pass"  # not replayed: lists of tensors; no launch
_EXISTS: dict[str, Callable[..., bool]] = {
    "cast": lambda x, delayed_scale, role: delayed_scale is not None and scale_exists(delayed_scale, role),
    "cast_and_commit": lambda x, delayed_scale, history: scale_exists(delayed_scale, 2),  # grad_output's
}
KERNELS = {
    name: on_its_device(kernel if name in _APART else replayed(kernel, _EXISTS.get(name)))
    for name, kernel in unpacking({kernel.__name__: kernel for kernel in _KERNELS}).items()
}
