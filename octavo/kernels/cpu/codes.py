"""The arguments of ``cast.cpp``'s and ``nvfp4.cpp``'s functions, codes read back, and rows that fit a cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.formats import E2M1, format_of
from octavo.granularity import NV
from octavo.kernels.arguments import CastTarget, Counted, Scaling
from octavo.kernels.cpu.library import Structure, library
from octavo.kernels.layouts import tile_rows, unpacked_shape
from octavo.kernels.reference.cast_statistics import measured as reference_measured
from octavo.kernels.reference.codes import decode as reference_decode
from octavo.numerics import E8M0

# Elements worked on at a time. Fresh memory costs more than arithmetic on a CPU: reading 2048x1408 codes at once took
# 3.5 to 15 ms, depending on malloc's state, and in chunks with one temporary 1.0 ms (1 core, AMD EPYC Zen 5).
CHUNK = 1 << 18
CHUNK_ELSEWHERE = 1 << 26  # on a GPU each chunk costs launches, and only saves memory: this is 256 MiB of float32

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TARGET = Structure("cast", "Target")
PACKED = Structure("nvfp4", "Packed")
_MATRIX = (c_void_p, c_int64, c_int, c_int64, c_int64, c_int64)  # of a matrix's arguments, see cast._matrix
_SHARE = 1 << 16  # elements that are worth a thread


def row_slices(shape: Sequence[int], unit: int, device: torch.device, chunks: int = 1) -> list[slice]:
    """Return slices of rows, each of about ``chunks`` times CHUNK elements and, except the last, of whole units."""
    rows, cols = shape
    chunk = CHUNK if device.type == "cpu" else CHUNK_ELSEWHERE
    step = max(chunks * chunk // max(cols, 1) // unit, 1) * unit
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)] or [slice(0, 0)]


def compiled(x: Tensor) -> ctypes.CDLL | None:
    """Return cast.cpp's functions if x is on a CPU that has a compiler, and of a dtype that they take; else None."""
    functions = library("cast") if x.is_cpu and x.itemsize < 8 else None
    if functions is not None and functions.octavo_cast.argtypes is None:
        TARGET.check(functions)
        functions.octavo_cast.argtypes = [c_char_p, *_MATRIX, c_int]
        functions.octavo_amax.argtypes = [c_char_p, *_MATRIX]
        functions.octavo_decode.argtypes = [c_char_p, c_void_p, c_int, c_int64]
        rows = [c_void_p, c_int64, c_int]
        functions.octavo_gated.argtypes = [c_void_p, c_void_p, c_void_p, c_int, *rows, *rows, c_void_p, *[c_int64] * 3]
        functions.octavo_count.argtypes = [c_char_p, c_void_p, c_int64, c_int, c_int64, c_void_p]
    return functions


def compiled_packed(x: Tensor) -> ctypes.CDLL | None:
    """Return nvfp4.cpp's functions where ``compiled`` returns cast.cpp's; else None."""
    functions = library("nvfp4") if x.is_cpu and x.itemsize < 8 else None
    if functions is not None and functions.octavo_cast_packed.argtypes is None:
        PACKED.check(functions)
        functions.octavo_cast_packed.argtypes = [c_char_p, *_MATRIX]
        functions.octavo_decode_packed.argtypes = [c_char_p, c_void_p, c_int, c_int64]
    return functions


def threads_for(elements: int) -> int:
    """Return how many threads work on so many elements: no more than torch has, nor than are worth their start."""
    return min(torch.get_num_threads(), elements // _SHARE) if elements >= 2 * _SHARE else 1


def with_dense_rows(x: Tensor) -> Tensor:
    """Return x, or a copy where its rows are not dense; a single element is contiguous, whatever its stride."""
    return x if x.stride(1) == 1 else x.resolve_neg().contiguous()


def described(target: CastTarget, shape: Sequence[int], by_columns: bool = False) -> bytes:
    """Return ``target`` of a matrix of this shape as cast.cpp reads it; ``by_columns``: of the matrix's transpose."""
    scaling, codes, transposed, scale_inv, amax = target
    delayed, (is_e5m2, limit), tile = scaling.delayed_scale, _limits(scaling.dtype), scaling.tile
    delayed_address = 0 if delayed is None else delayed.data_ptr() + 4 * scaling.role * delayed.stride(0)
    if by_columns:
        codes, transposed, scale_inv, amax, tile = transposed, codes, scale_inv.t(), amax.t(), tile[::-1]
    return TARGET.layout.pack(  # in cast.cpp's order: by name a cast would take 3 us longer
        *(codes.data_ptr(), transposed.data_ptr(), scale_inv.data_ptr(), amax.data_ptr(), delayed_address),
        *(*(shape[::-1] if by_columns else shape), codes.stride(0), transposed.stride(0)),
        *(*scale_inv.stride(), *amax.stride(), *tile),
        *(scale_inv.dtype == E8M0, is_e5m2, scaling.power_of_two),
        limit * 2.0**-scaling.margin,
    )


def described_packed(target: CastTarget, shape: Sequence[int], by_columns: bool = False) -> bytes:
    """Return ``described`` of a target whose codes are E2M1's, as nvfp4.cpp reads it."""
    scaling, codes, transposed, scale_inv, amax = target
    delayed, place, block_lanes = scaling.delayed_scale, scaling.place, scaling.tile[0]
    delayed_address = 0 if delayed is None else delayed.data_ptr() + 4 * scaling.role * delayed.stride(0)
    if is_along_columns := scaling.tile[1] == 1:  # blocks of 16x1: the contraction is along the columns
        codes, transposed, scale_inv, place, block_lanes = transposed, codes, scale_inv.t(), place[::-1], 1
    rotation, seed = (-1 if number is None else number for number in (scaling.rotation, scaling.seed))
    return PACKED.layout.pack(  # in nvfp4.cpp's order
        *(codes.data_ptr(), transposed.data_ptr(), scale_inv.data_ptr(), amax.data_ptr(), delayed_address),
        *(*(shape[::-1] if by_columns else shape), codes.stride(0), transposed.stride(0), *scale_inv.stride()),
        *(block_lanes, is_along_columns != by_columns, rotation, seed, *place),
        E2M1.limit * 2.0**-scaling.margin,
    )


@functools.cache
def _limits(dtype: torch.dtype) -> tuple[bool, float]:
    """Return (whether a format has infinities, its largest finite value)."""
    fmt = format_of(dtype)
    return fmt.has_inf, fmt.max


def dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute the op ``octavo::dequantize``; its contract is in signatures.py."""
    return decode(qdata, dtype, scale_inv, tile).contiguous()


def decode(
    codes: Tensor, dtype: torch.dtype, scale_inv: Tensor, tile: Sequence[int], into: Tensor | None = None
) -> Tensor:
    """``reference.codes.decode`` of codes of any strides, of E2M1 dense; the result has the strides of dense codes.

    ``into``: memory for as many elements of ``dtype``, which the result of dense codes is written to.
    """
    is_packed = codes.dtype is E2M1.dtype
    if not is_packed and not codes.is_contiguous() and codes.t().is_contiguous():
        return decode(codes.t(), dtype, scale_inv.t(), tile[::-1], into).t()
    shape = unpacked_shape(codes.shape, codes.dtype) if is_packed else codes.shape
    values = torch.empty(shape, dtype=dtype, device=codes.device) if into is None else into.view(shape)
    functions = (compiled_packed if is_packed else compiled)(codes)
    is_of_packed_casts = tile[1] == NV[1] and shape[1] % NV[1] == 0 and scale_inv.dtype == torch.bfloat16
    if functions is None or dtype == torch.float16 or (is_packed and not is_of_packed_casts):
        return values.copy_(reference_decode(codes, dtype, scale_inv, tile))
    dense = with_dense_rows(codes)  # held until it has been read
    pair, out = _read(dense, scale_inv, tile), (values.data_ptr(), KINDS[dtype], threads_for(values.numel()))
    (functions.octavo_decode_packed if is_packed else functions.octavo_decode)(pair, *out)
    return values


def _read(codes: Tensor, scale_inv: Tensor, tile: Sequence[int]) -> bytes:
    """Return codes with dense rows as cast.cpp, or nvfp4.cpp, reads them."""
    target = CastTarget(Scaling(codes.dtype, (tile[0], tile[1]), False, 0), codes, codes, scale_inv, scale_inv)
    if codes.dtype is E2M1.dtype:
        return described_packed(target, unpacked_shape(codes.shape, codes.dtype))
    return described(target, codes.shape)


def measured(x: Tensor, codes: Tensor, scale_inv: Tensor, tile: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``reference.cast_statistics.measured`` returns."""
    functions, is_packed = compiled(x), codes.dtype is E2M1.dtype
    if functions is None or is_packed:
        read = decode if is_packed else reference_decode
        chunks = row_slices(x.shape, max(tile[0], 1), x.device)
        parts = [
            reference_measured(x[rows], codes[rows], tile_rows(scale_inv, tile, rows), tile, read) for rows in chunks
        ]
        sums, amaxes, exponents = map(torch.stack, zip(*parts, strict=True))
        return sums.sum(0), amaxes.max(), exponents.sum(0)
    x, codes = map(with_dense_rows, (x, codes))
    counts = torch.zeros(len(Counted.sums) + 1 + 256, dtype=torch.float64, device=x.device)
    arguments = x.data_ptr(), x.stride(0), KINDS[x.dtype], threads_for(x.numel()), counts.data_ptr()
    functions.octavo_count(_read(codes, scale_inv, tile), *arguments)
    return counts[: len(Counted.sums)], counts[len(Counted.sums)], counts[len(Counted.sums) + 1 :]
