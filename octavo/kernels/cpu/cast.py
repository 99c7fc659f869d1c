"""Casts by ``cast.cpp`` and, to E2M1, ``nvfp4.cpp``: the reference's bits, both layouts of codes, in torch's threads.

Activations and norms are computed by torch in float32, by chunks of rows that never exist all at once. Where a scale
needs the amax of all rows before the first code, the first chunks, up to KEPT elements, are kept from the first pass to
the second; the other chunks are computed twice.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import E2M1
from octavo.granularity import ALL, NV, tiles_along
from octavo.kernels import reference
from octavo.kernels.activations import activation_of
from octavo.kernels.arguments import (
    Castable,
    CastSource,
    CastTarget,
    NormSource,
    RotaryHeads,
    Scaling,
    new_scales,
    no_codes,
)
from octavo.kernels.cpu.codes import (
    KINDS,
    compiled,
    compiled_packed,
    decode,
    described,
    described_packed,
    row_slices,
    threads_for,
    with_dense_rows,
)
from octavo.kernels.layouts import as_matrix_shape
from octavo.kernels.reference.activation import FUNCTIONS, gated
from octavo.kernels.reference.activation import produced as reference_produced
from octavo.kernels.reference.cast import write as reference_write
from octavo.kernels.reference.norm import normalise
from octavo.kernels.reference.rotary import rotary

# 16 MiB. Swiglu of [2048, 2048] is cast in 3.2 ms where all is kept, in 5.4 ms where nothing is (2 cores, Intel Xeon).
KEPT = 1 << 22
ROWS_OF_A_THREAD = 64  # cast.cpp's HEIGHT, by which it divides rows among threads
_MOST_THREADS = 8  # the most threads by which a chunk is made larger
_BUFFERS = 4  # float32 matrices that an activation or a norm works in, which together are to fit a cache


def write(
    source: Castable, targets: Sequence[CastTarget], besides: Sequence[Tensor] = (), recast: CastTarget | None = None
) -> None:
    """Write what ``reference.cast.write`` writes."""
    if isinstance(source, RotaryHeads):
        source = CastSource(rotary(source).view(source.shape))
    x = source.x
    shape = source.shape if isinstance(source, NormSource) or source.activation else (x.shape[0], x.shape[1])
    functions = compiled(x)
    packs = False
    for target in targets:  # a property, or a generator, takes longer
        packs |= target.scaling.dtype is E2M1.dtype
    if functions is None or (packs and compiled_packed(x) is None):
        return reference_write(source, targets, besides, recast)
    _clear_padding(targets, shape)
    if isinstance(source, NormSource):
        return write_chunks(functions, partial(_normalised, source, besides), shape, 1, targets)
    sums = besides[0] if besides and besides[0].numel() else None
    if source.activation:
        make = partial(_produced, source)
        if recast is not None:
            _clear_padding([recast], x.shape)
            make = partial(_produced_with_recast, source, functions, described(recast, x.shape), set())
        return write_chunks(functions, make, shape, max(source.h_tile[0], 1), targets, sums, min(x.shape[1], shape[1]))
    if sums is not None:
        sums.copy_(x.sum(0))  # torch adds in float32 and rounds once
    by_columns = x.stride(1) != 1 and x.stride(0) == 1
    x = with_dense_rows(x.t() if by_columns else x)
    matrix = _matrix(x, slice(0, x.shape[0]))
    for target in targets:
        if packs:
            _for_cpp(functions, target, shape, by_columns).cast(*matrix, -1)
        else:
            functions.octavo_cast(described(target, shape, by_columns), *matrix, -1)


class _CppTarget(NamedTuple):
    """A target as C++ writes it.

    Attributes:
        amax: what cast.cpp's octavo_amax takes, if the target ``spans``.
        cast: writes all else, given a matrix as ``_matrix`` returns it and ``faulty``: 1 if octavo_amax saw inf or NaN
            in these rows, 0 if none, -1 if it was not called.
        spans: whether a tile spans all rows, so that its amax is raised by each chunk of them.
        needs_amax_first: whether the first code needs that amax, as no scale is known.
        unit: rows that begin whole tiles.
    """

    amax: bytes
    cast: Callable[..., None]
    spans: bool
    needs_amax_first: bool
    unit: int


def _for_cpp(functions: ctypes.CDLL, target: CastTarget, shape: Sequence[int], by_columns: bool = False) -> _CppTarget:
    """Return how C++ casts a matrix of this shape, or its transpose where it lies ``by_columns``, into a target."""
    scaling = target.scaling
    has_scale = scaling.delayed_scale is not None and scaling.delayed_scale.tolist()[scaling.role] != 0
    if not scaling.is_packed:
        height = scaling.tile[by_columns]
        target_bytes = described(target, shape, by_columns)
        cast_rows = partial(functions.octavo_cast, target_bytes)
        return _CppTarget(target_bytes, cast_rows, height == ALL, height == ALL and not has_scale, max(height, 1))
    packed_functions = compiled_packed(target.amax)
    assert packed_functions is not None
    packed_bytes = described_packed(target, shape, by_columns)
    amax_bytes = described(target._replace(scaling=scaling._replace(tile=(ALL, ALL))), shape, by_columns)

    def cast(*matrix_and_faulty: int) -> None:
        *matrix, faulty = matrix_and_faulty
        if faulty < 0:
            functions.octavo_amax(amax_bytes, *matrix)
        packed_functions.octavo_cast_packed(packed_bytes, *matrix)

    return _CppTarget(amax_bytes, cast, True, not has_scale, NV[1])


def _clear_padding(targets: Sequence[CastTarget], shape: Sequence[int]) -> None:
    """Write zeros where the rows of codes are longer than those of the matrix of this shape; nvfp4.cpp does so."""
    for target in targets:
        if target.scaling.dtype is E2M1.dtype:
            continue
        for codes, size in ((target.codes, shape[1]), (target.transposed, shape[0])):
            if codes.shape[1] > size:
                codes.view(torch.uint8)[:, size:].zero_()


def _matrix(x: Tensor, rows: slice) -> tuple[int, ...]:
    """Return ``x``, which has these rows of the matrix that is cast, as arguments of cast.cpp."""
    first, stride = x.data_ptr() - rows.start * x.stride(0) * x.itemsize, x.stride(0)
    return first, stride, KINDS[x.dtype], rows.start, rows.stop, threads_for(x.numel())


def write_chunks(
    functions: ctypes.CDLL,
    make: Callable[[slice], Tensor],
    shape: tuple[int, int],
    unit: int,
    targets: Sequence[CastTarget],
    sums: Tensor | None = None,
    cols: int | None = None,
) -> None:
    """Cast the rows that ``make`` returns, float32, in chunks that begin at multiples of ``unit``; write their sums.

    ``cols``: the columns by which the chunks are sized, all unless given: an activation's also where its gradient is
    cast, so that both have the same chunks, and torch's functions the same bits.
    """
    cpp_targets = [_for_cpp(functions, target, shape) for target in targets]
    threads = min(torch.get_num_threads(), _MOST_THREADS)
    whole_tiles = math.lcm(unit, ROWS_OF_A_THREAD * threads, *(target.unit for target in cpp_targets))
    slices = row_slices((shape[0], _BUFFERS * (cols or shape[1])), whole_tiles, torch.device("cpu"))
    reads_twice = len(slices) > 1 and any(target.needs_amax_first for target in cpp_targets)
    faulty = [0] * len(cpp_targets)  # whether octavo_amax saw an inf or NaN, by target
    chunks_by_start: dict[int, Tensor] = {}
    elements_left = KEPT
    for rows in slices if reads_twice else []:
        y = make(rows)
        elements_left -= y.numel()
        if elements_left >= 0:
            chunks_by_start[rows.start] = y
        for index, target in enumerate(cpp_targets):
            if target.needs_amax_first:
                faulty[index] |= functions.octavo_amax(target.amax, *_matrix(y, rows))
    column_sums = torch.zeros(shape[1], dtype=torch.float32, device="cpu")
    for rows in slices:
        y = chunks_by_start.pop(rows.start) if rows.start in chunks_by_start else make(rows)
        matrix = _matrix(y, rows)
        if sums is not None:
            column_sums.add_(y.sum(0))
        for index, target in enumerate(cpp_targets):
            if target.spans and not (reads_twice and target.needs_amax_first):
                faulty[index] = functions.octavo_amax(target.amax, *matrix)
            target.cast(*matrix, faulty[index])
        del y  # before the next chunk is computed
    if sums is not None:
        sums.copy_(column_sums)


def _normalised(source: NormSource, besides: Sequence[Tensor], rows: slice) -> Tensor:
    """Return some rows of a norm's y; write their statistics and, where asked for, y."""
    mean, rstd, stored_y = besides
    y, mean_of_rows, rstd[rows] = normalise(*source._replace(x=source.x[rows]))
    if mean.numel():
        mean[rows] = mean_of_rows
    if stored_y.numel():
        stored_y[rows] = y
    return y


def _produced(source: CastSource, rows: slice) -> Tensor:
    """Return some rows of the matrix that is cast; of a preactivation in codes they are whole tiles of its scales."""
    unit = source.h_tile[0]
    scale_rows = slice(None) if unit == ALL else slice(rows.start // unit, tiles_along(rows.stop, unit))
    return reference_produced(*source.part(rows, scale_rows), decode, _gated)


def _produced_with_recast(
    source: CastSource, functions: ctypes.CDLL, recast: bytes, starts: set[int], rows: slice
) -> Tensor:
    """Return some rows of an activation's gradient; the first time write the activation's codes, and add to starts.

    ``recast``: the target of these codes, as cast.cpp reads it.
    """
    if rows.start in starts:
        return _produced(source, rows)
    starts.add(rows.start)
    assert source.preactivation is not None
    h, dy = source.preactivation[rows], source.x[rows]
    function, is_gated = activation_of(source.activation)
    if is_gated:
        y = torch.empty(dy.shape, dtype=torch.float32, device=dy.device)
        gradient = _gated(h, dy, function, y)
    else:
        y = _produced(CastSource(h, source.activation), slice(None))
        gradient = _produced(source, rows)
    functions.octavo_cast(recast, *_matrix(y, rows), -1)
    return gradient


def _gated(h: Tensor, dy: Tensor | None, function: str, y: Tensor | None = None) -> Tensor:
    """``reference.activation.gated``: torch computes f and f', or silu's sigmoid alone, and one pass all else.

    ``y``: dense rows where, beside the gradient, the activation itself is written, float32.
    """
    if (functions := compiled(h)) is None:
        if y is not None:
            y.copy_(gated(h, None, function))
        return gated(h, dy, function)
    h = with_dense_rows(h)
    gate = h.chunk(2, dim=1)[0].to(torch.float32, memory_format=torch.contiguous_format)
    slopes = None
    if function == "silu":
        values = gate.sigmoid() if gate.dtype == h.dtype else gate.sigmoid_()
    elif dy is None:
        values = FUNCTIONS[function].in_float32(gate)
    else:
        values, slopes = FUNCTIONS[function].with_slope(gate)
    out = values
    dy_fields = 0, 0, 0
    if dy is not None:
        dy = with_dense_rows(dy)
        out = values.new_empty(h.shape)
        dy_fields = dy.data_ptr(), dy.stride(0), KINDS[dy.dtype]
    h_fields = h.data_ptr(), h.stride(0), KINDS[h.dtype]
    addresses = (None if one is None else one.data_ptr() for one in (out, values, slopes))
    y_and_sizes = None if y is None else y.data_ptr(), *values.shape, threads_for(h.numel())
    functions.octavo_gated(*addresses, function == "silu", *h_fields, *dy_fields, *y_and_sizes)
    return out


def produced(*flat: Any) -> Tensor:
    """Return what ``reference.activation.produced`` returns."""
    source = CastSource(*flat)
    # this is no op: a graph with chunks in it would be right for one number of rows only
    if not source.activation or torch.compiler.is_compiling():
        return reference_produced(*source)
    values = source.x.new_empty(source.shape, dtype=torch.float32)
    for rows in row_slices(source.shape, max(source.h_tile[0], 1), source.x.device):
        values[rows] = _produced(source, rows)
    return values


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Compute the op ``octavo::amax``; its contract is in signatures.py."""
    if compiled(x) is None:
        return reference.KERNELS["amax"](x, tile)
    none = no_codes(x, torch.float8_e4m3fn)
    scaling = Scaling(none.dtype, (tile[0], tile[1]), False, 0)
    amaxes = new_scales(x, x.shape, scaling.tile)
    grid = amaxes if x.ndim == 2 else amaxes.view(1, 1)
    target = CastTarget(scaling, none, none, torch.empty_like(grid), grid)
    write(CastSource(x.reshape(as_matrix_shape(x.shape))), [target])
    return amaxes
