"""Cast many tensors in one launch (Dynamic per tensor: two), into outputs that the caller has allocated.

A table on the device (table.py) says where each tensor and its outputs lie and which programs work on it. It is kept
while the same tensors come, so that in a training loop nothing is copied; and for ever, 96 bytes a tensor, where a CUDA
graph reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.arguments import CastLists, Scaling
from octavo.kernels.reference.cast import sizes_of_casts
from octavo.kernels.triton.cast_blocks import store_blocks
from octavo.kernels.triton.cast_input import rounding_of
from octavo.kernels.triton.cast_kernels import cast_strip, strip_amax
from octavo.kernels.triton.delayed_update import scale_exists
from octavo.kernels.triton.launch import LARGE, Config, config, is_capturing, launch, with_room_for, workspace
from octavo.kernels.triton.prologue import Function
from octavo.kernels.triton.table import DTYPES, find_tensor, pointer, size
from octavo.kernels.triton.tiles import (
    Codes,
    Outputs,
    Source,
    Tiling,
    is_last_program,
    load_tile,
    raise_amax,
    scale_from_amax,
    scale_inv_from_scale,
    take_amax,
)
from octavo.numerics import E8M0

# columns of the table, int64 [tensors, WIDTH]: addresses; the tensor's sizes and rows' strides, and its first program
X, Q, T, SCALE_INV, AMAX, DELAYED_SCALE = map(tl.constexpr, range(6))
R, C, Q_STRIDE, T_STRIDE, FIRST_PROGRAM, X_STRIDE = map(tl.constexpr, range(6, 12))
WIDTH: tl.constexpr = tl.constexpr(12)


@triton.jit
def source(row_ptr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the row's tensor."""
    stride = size(row_ptr, X_STRIDE, ALIGNED)
    return Source(pointer(row_ptr, X, dtype, ALIGNED), size(row_ptr, R, False), size(row_ptr, C, ALIGNED), stride, 1)


@triton.jit
def code_pointer(row_ptr, COLUMN: tl.constexpr, E5M2: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address of codes; not a whole Codes, since Triton 3.6 can't return one that holds None."""
    return pointer(row_ptr, COLUMN, tl.float8e5 if E5M2 else tl.float8e4nv, ALIGNED)


@triton.jit
def programs_of(row_ptr, tensor, programs, TENSORS: tl.constexpr):
    """Return (the tensor's first program, how many it has)."""
    first = size(row_ptr, FIRST_PROGRAM, False)
    end = programs
    if tensor + 1 < TENSORS:
        end = size(row_ptr + WIDTH, FIRST_PROGRAM, False)
    return first, end - first


@triton.jit(do_not_specialize=["programs"])
def multi_tensor_amax_kernel(
    table_ptr,
    skip_ptr,  # None, or: return at once where it is not 0
    work_ptr,
    programs,
    X_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TENSORS: tl.constexpr,  # their number
    DELAYED: tl.constexpr,  # only where no scale exists
    ROLE: tl.constexpr,
    function: tl.constexpr,  # Function(): x itself
    tiling: tl.constexpr,  # Tiling
):
    """Write the amax of each tensor."""
    if skip_ptr is not None and tl.load(skip_ptr) != 0:
        return
    tensor, row_ptr = find_tensor(table_ptr, tl.program_id(0), TENSORS, WIDTH, FIRST_PROGRAM)
    if DELAYED and tl.load(pointer(row_ptr, DELAYED_SCALE, tl.float32, False) + ROLE) != 0:
        return
    first, count = programs_of(row_ptr, tensor, programs, TENSORS)
    x = source(row_ptr, X_TYPE, ALIGNED)
    strips = tl.maximum(tl.cdiv(x.C, tiling.tile_c), 1)
    program = tl.program_id(0) - first
    first_row = (program // strips) * (tiling.tiles * tiling.tile_r)
    cols = (program % strips) * tiling.tile_c + tl.arange(0, tiling.tile_c)
    raise_amax(work_ptr + 2 * tensor, strip_amax(x, None, first_row, cols, function, tiling))
    if is_last_program(work_ptr + 2 * tensor + 1, count):
        tl.store(pointer(row_ptr, AMAX, tl.float32, False), take_amax(work_ptr + 2 * tensor))


@triton.jit(do_not_specialize=["programs"])
def multi_tensor_cast_kernel(
    table_ptr,
    skip_ptr,  # None, or: return at once where it is not 0
    work_ptr,
    programs,
    X_TYPE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    rounding: tl.constexpr,
    ALIGNED: tl.constexpr,
    TENSORS: tl.constexpr,  # their number
    DELAYED: tl.constexpr,
    ROLE: tl.constexpr,
    function: tl.constexpr,  # Function(): x itself
    tiling: tl.constexpr,  # Tiling
):
    """Cast each tensor with one scale."""
    if skip_ptr is not None and tl.load(skip_ptr) != 0:
        return
    tensor, row_ptr = find_tensor(table_ptr, tl.program_id(0), TENSORS, WIDTH, FIRST_PROGRAM)
    first, count = programs_of(row_ptr, tensor, programs, TENSORS)
    amax_ptr = pointer(row_ptr, AMAX, tl.float32, False)
    scale = 0.0
    if DELAYED:
        scale = tl.load(pointer(row_ptr, DELAYED_SCALE, tl.float32, False) + ROLE)
    if scale == 0:
        scale = scale_from_amax(tl.load(amax_ptr), rounding.limit, rounding.power_of_two)
    program = tl.program_id(0) - first
    if program == 0:
        tl.store(pointer(row_ptr, SCALE_INV, tl.float32, False), scale_inv_from_scale(scale, False))
    x = source(row_ptr, X_TYPE, ALIGNED)
    strips = tl.maximum(tl.cdiv(x.C, tiling.tile_c), 1)
    cols = (program % strips) * tiling.tile_c + tl.arange(0, tiling.tile_c)
    q = code_pointer(row_ptr, Q, rounding.e5m2, ALIGNED)
    t = code_pointer(row_ptr, T, rounding.e5m2, ALIGNED) if TRANSPOSED else None
    out = Codes(q, size(row_ptr, Q_STRIDE, ALIGNED), t, size(row_ptr, T_STRIDE, ALIGNED) if TRANSPOSED else 0)
    first_row = (program // strips) * (tiling.tiles * tiling.tile_r)
    amax, _, _ = cast_strip(x, None, out, scale, first_row, cols, function, rounding.e5m2, False, tiling)
    if DELAYED:
        raise_amax(work_ptr + 2 * tensor, amax)
        if is_last_program(work_ptr + 2 * tensor + 1, count):
            tl.store(amax_ptr, take_amax(work_ptr + 2 * tensor))


@triton.jit
def multi_tensor_cast_blocks_kernel(
    table_ptr,
    skip_ptr,  # None, or: return at once where it is not 0
    X_TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,  # float32, or uint8 for E8M0
    TRANSPOSED: tl.constexpr,
    rounding: tl.constexpr,  # Rounding
    ALIGNED: tl.constexpr,
    TENSORS: tl.constexpr,  # their number
    tiling: tl.constexpr,  # Tiling
):
    """Cast each tensor with a scale for each block."""
    if skip_ptr is not None and tl.load(skip_ptr) != 0:
        return
    _, row_ptr = find_tensor(table_ptr, tl.program_id(0), TENSORS, WIDTH, FIRST_PROGRAM)
    x = source(row_ptr, X_TYPE, ALIGNED)
    program = tl.program_id(0) - size(row_ptr, FIRST_PROGRAM, False)
    strips = tl.cdiv(x.C, tiling.tile_c)
    tile_row = program // strips
    strip = program % strips
    rows = tile_row * tiling.tile_r + tl.arange(0, tiling.tile_r)
    cols = strip * tiling.tile_c + tl.arange(0, tiling.tile_c)
    q = code_pointer(row_ptr, Q, rounding.e5m2, ALIGNED)
    t = code_pointer(row_ptr, T, rounding.e5m2, ALIGNED) if TRANSPOSED else None
    codes = Codes(q, size(row_ptr, Q_STRIDE, ALIGNED), t, size(row_ptr, T_STRIDE, ALIGNED) if TRANSPOSED else 0)
    scale_inv = pointer(row_ptr, SCALE_INV, SCALE_TYPE, False)
    amax = pointer(row_ptr, AMAX, tl.float32, False)
    out = Outputs(codes, scale_inv, amax, tl.cdiv(x.C, rounding.block[1]), 1)
    store_blocks(load_tile(x, rows, cols, False), 0, tile_row, strip, None, x, out, rounding, tiling)


class _LaunchTable(NamedTuple):
    """A launch's table on the device, its number of programs, and whether all in it is a multiple of 16.

    ``sent``: on a GPU, the stream that copies the table, while the host goes on, and the event at the copy's end.
    """

    table: Tensor
    programs: int
    aligned: bool
    sent: tuple[torch.cuda.Stream, torch.cuda.Event] | None

    def use(self) -> None:
        """Let the current stream read the table; a CUDA graph may for ever."""
        if is_capturing():  # the captured stream runs after all others are done
            _captured.add(self)
        elif self.sent is not None:
            current, (stream, event) = torch.cuda.current_stream(self.table.device), self.sent
            if current != stream:
                current.wait_event(event)
                self.table.record_stream(current)


_Numbers = tuple[tuple[int, ...], ...]
_captured: set[_LaunchTable] = set()  # tables that CUDA graphs read: a graph does not say when it is gone


@functools.lru_cache(maxsize=64)
def _table_of(addresses: _Numbers, sizes: _Numbers, blocks: bool, chosen: Config, device: torch.device) -> _LaunchTable:
    """Return the table of tensors at these addresses (of each of the op's lists) and of these sizes.

    A tensor's sizes are (R, C, row stride of x, of qdata, of transposed). A tensor without elements has no program in
    a cast by blocks, and one in a cast per tensor, which writes its scale_inv.
    """
    if is_capturing():
        raise RuntimeError("run the step once before capturing it in a CUDA graph: these tensors are new to octavo")
    rows, programs = [], 0
    for index, (height, width, x_stride, q_stride, t_stride) in enumerate(sizes):
        strips = triton.cdiv(width, chosen.tile_c) or (not blocks)
        parts = triton.cdiv(height, chosen.tile_r * chosen.depth) or (not blocks)
        pointers = [of_list[index] if of_list else 0 for of_list in addresses]
        rows.append([*pointers, height, width, q_stride, t_stride, programs, x_stride])
        programs += strips * parts
    vectors = [*addresses[0], *addresses[1], *addresses[2], *(n for (_, *wide) in sizes for n in wide)]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    sent = None if stream is None else (stream, stream.record_event())
    return _LaunchTable(table, programs, all(n % 16 == 0 for n in vectors), sent)


def multi_tensor_cast(
    lists: CastLists, role: int, tile: Sequence[int], power_of_two: bool, margin: int, skip: Tensor | None = None
) -> None:
    """Compute the op ``octavo::multi_tensor_cast``; its contract is in signatures.py."""
    sizes = sizes_of_casts(lists, role, tile, power_of_two)
    xs, qdata, transposed, scale_inv, _, delayed_scales = lists
    if not xs:
        return
    blocks = tile[0] != ALL
    chosen = config("cast_blocks_transpose" if blocks else "cast_transpose", LARGE)
    if blocks:  # of which a program casts one tile, whatever a row says
        chosen = with_room_for(chosen, tile)._replace(depth=1)
    addresses = tuple(tuple(map(Tensor.data_ptr, tensors)) for tensors in lists)
    launch_table = _table_of(addresses, sizes, blocks, chosen, xs[0].device)
    launch_table.use()
    table, programs, aligned = launch_table[:3]
    if programs == 0:
        return
    rounding = rounding_of(Scaling(qdata[0].dtype, (tile[0], tile[1]), power_of_two, margin))
    tensors, tiling = (aligned, len(xs)), Tiling(False, *chosen[:3])
    x_type, writes_transposed, delayed = DTYPES[xs[0].dtype], bool(transposed), bool(delayed_scales)
    if blocks:
        scale_type = tl.uint8 if scale_inv[0].dtype == E8M0 else tl.float32
        arguments = table, skip, x_type, scale_type, writes_transposed, rounding, *tensors, tiling
        launch(multi_tensor_cast_blocks_kernel, programs, arguments, chosen.num_warps)
        return
    first = table, skip, workspace(xs[0], 2 * len(xs)), programs, x_type
    constants = *tensors, delayed, role, Function(), tiling
    if not delayed or not all(scale_exists(delayed_scale, role) for delayed_scale in delayed_scales):
        launch(multi_tensor_amax_kernel, programs, (*first, *constants), chosen.num_warps)
    launch(multi_tensor_cast_kernel, programs, (*first, writes_transposed, rounding, *constants), chosen.num_warps)
