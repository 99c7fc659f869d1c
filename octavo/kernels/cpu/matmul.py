"""The product of two pairs, a . b^T, in chunks.

Codes are exact in bfloat16 and in float32, so a CPU multiplies them in the dtype that it multiplies faster: its own
float8 product (oneDNN) is 2-8 times slower. A scale that is constant along K multiplies the result; one that varies
along K must multiply the operand first.

The result is rounded once, at the end. torch has no bfloat16 product with a float32 output on a CPU, so bfloat16 is
used only where just one number has to multiply the result: where each operand has one scale, or scales that are powers
of two and multiply its codes exactly, to numbers that are not subnormal. All other products are in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E2M1, Format, format_of
from octavo.granularity import ALL
from octavo.kernels import capability
from octavo.kernels.arguments import OperandPair, ProductArguments
from octavo.kernels.cpu import codes
from octavo.kernels.cpu.codes import decode, row_slices
from octavo.kernels.layouts import tile_rows
from octavo.kernels.reference.matmul import result_scales
from octavo.numerics import MAX_SCALE, MIN_SCALE

_MANTISSA = (1 << 23) - 1  # of a float32's bits
# Times CHUNK elements are multiplied at a time: 1,024 x 768 by 768 x 256 takes 13.6 ms, not 14.8 (float32, 1 core, AMD
# EPYC Zen 1).
_CHUNKS = 4
_SMALL = 1 << 12  # up to so many elements torch's slower conversion takes less than the call of cast.cpp


def matmul(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Compute the op ``octavo::matmul``; its contract is in signatures.py."""
    a_pair, b_pair, bias = operands.plain()
    a, b = a_pair.codes, b_pair.codes
    narrow = out_dtype == torch.bfloat16
    compute = capability.fast_dtype(a.device) if narrow else torch.float32
    if compute == torch.bfloat16 and not _rounds_once(a_pair, b_pair):
        compute = torch.float32
    if bias is not None and not bias.dtype == out_dtype == compute:  # even a conversion to the same dtype costs a call
        bias = bias.to(torch.bfloat16 if narrow else torch.float32).to(compute)
    is_large = max(a.numel(), b.numel()) > codes.CHUNK
    if is_large and compute == torch.float32 and lies_transposed(a) and lies_transposed(b):
        return _by_chunks_of_terms(a_pair, b_pair, bias).to(out_dtype)
    if a.numel() <= codes.CHUNK:
        out_MN = a.new_empty((a.shape[0], b.shape[0]), dtype=compute)
        _multiply(_operand(a_pair, compute), _operand(b_pair, compute), bias, out_MN)
        return out_MN if compute == out_dtype else out_MN.to(out_dtype)
    return _by_chunks_of_rows(a_pair, b_pair, bias, compute, out_dtype)


def _rounds_once(a: OperandPair, b: OperandPair) -> bool:
    """Whether a bfloat16 product needs no second rounding, and the number that multiplies it is normal in float32."""
    number = 1.0
    for pair in (a, b):
        if pair.codes.dtype is E2M1.dtype:
            continue  # its values are exact in bfloat16
        if _is_single(pair):
            number *= float(pair.scale_inv)
        elif pair.scale_inv.numel() and not _multiplies_exactly(pair.scale_inv, format_of(pair.codes.dtype)):
            return False
    return MIN_SCALE <= number <= MAX_SCALE


def _multiplies_exactly(scale_inv: Tensor, fmt: Format) -> bool:
    """Whether codes times their scales are bfloat16 numbers: of powers of two, if none is subnormal or infinite.

    The instructions that multiply bfloat16 take subnormal numbers for 0.
    """
    wide = scale_inv.to(torch.float32)
    smallest, largest = map(float, torch.aminmax(wide))
    is_in_range = smallest * fmt.smallest_subnormal >= MIN_SCALE and largest * fmt.max <= 2 * MAX_SCALE
    return is_in_range and not bool((wide.view(torch.int32) & _MANTISSA).any())


def _is_single(pair: OperandPair) -> bool:
    """Whether an operand has one scale."""
    return pair.tile[1] == ALL and pair.scale_inv.numel() == 1


class _ScaledOperand(NamedTuple):
    """An operand [rows, K] to multiply, and the scales that its product is to be multiplied by.

    ``scale_inv``: [rows, 1] or [1, 1]; None where ``values`` are multiplied by it.
    """

    values: Tensor
    scale_inv: Tensor | None


def lies_transposed(x: Tensor) -> bool:
    """Whether x is the transpose of a contiguous matrix."""
    return not x.is_contiguous() and x.t().is_contiguous()


def _by_chunks_of_rows(
    a: OperandPair, b: OperandPair, bias: Tensor | None, compute: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """Return the product in chunks of a's rows, which stay in the cache between being read and being multiplied.

    The rows of a transposed a are columns in memory. Where the result is rounded, its chunk must fit too.
    """
    (q, scale_inv, tile), multiplied = a, _operand(b, compute)
    rows, cols = q.shape[0], b.codes.shape[0]
    out_MN = q.new_empty((rows, cols), dtype=out_dtype)
    transposed = lies_transposed(q)
    widest = q.shape[1] if compute == out_dtype else max(q.shape[1], cols)
    chunks = _CHUNKS if transposed or compute == out_dtype else 1
    slices = row_slices((rows, widest), max(tile[0], 1), q.device, chunks)
    if not transposed and not q.is_contiguous():
        slices = [slice(0, rows)]
    per_byte = 2 if q.dtype is E2M1.dtype else 1
    memory = q.new_empty(slices[0].stop * q.shape[1] * per_byte, dtype=compute)  # no chunk is larger than the first
    wide = None if compute == out_dtype else q.new_empty((slices[0].stop, cols), dtype=compute)
    for chunk in slices:
        a_chunk = q.t()[:, chunk].contiguous().t() if transposed else q[chunk]
        pair = OperandPair(a_chunk, tile_rows(scale_inv, tile, chunk), tile)
        operand = _operand(pair, compute, memory[: a_chunk.numel() * per_byte])
        if wide is None:
            _multiply(operand, multiplied, bias, out_MN[chunk])
        else:
            _multiply(operand, multiplied, bias, wide[: len(a_chunk)])
            out_MN[chunk].copy_(wide[: len(a_chunk)])
    return out_MN


def _by_chunks_of_terms(a: OperandPair, b: OperandPair, bias: Tensor | None) -> Tensor:
    """Return the product in float32 of two transposed operands, as grad_weight's are, in chunks of its sums' terms.

    Neither operand is ever in float32 as a whole.
    """
    rows, cols, terms = a.codes.shape[0], b.codes.shape[0], a.codes.shape[1]
    unit = math.lcm(*(max(pair.tile[1], 1) for pair in (a, b)))
    out_MN = a.codes.new_zeros((rows, cols), dtype=torch.float32)
    slices = row_slices((terms, rows + cols), unit, a.codes.device, _CHUNKS)
    memories = [pair.codes.new_empty((slices[0].stop, len(pair.codes)), dtype=torch.float32) for pair in (a, b)]
    for chunk in slices:
        left, right = (
            _operand(_terms(pair, chunk), torch.float32, memory[: chunk.stop - chunk.start])
            for pair, memory in zip((a, b), memories, strict=True)
        )
        torch.addmm(out_MN, left.values, right.values.t(), out=out_MN)
    _finish(out_MN, left, right, bias)
    return out_MN


def _terms(pair: OperandPair, chunk: slice) -> OperandPair:
    """Return some columns of an operand, which are whole tiles."""
    q, scale_inv, tile = pair
    return OperandPair(q.t()[chunk].t(), tile_rows(scale_inv.t(), (tile[1], tile[0]), chunk).t(), tile)


def _operand(pair: OperandPair, compute: torch.dtype, memory: Tensor | None = None) -> _ScaledOperand:
    """Return an operand in the dtype of the product, and its scales unless they multiply its codes."""
    q, scale_inv, tile = pair
    if tile[1] != ALL or (compute == torch.bfloat16 and not _is_single(pair)):
        return _ScaledOperand(decode(q, compute, scale_inv, tile, memory), None)
    if q.numel() <= _SMALL:
        return _ScaledOperand(q.to(compute), scale_inv)
    one = torch.ones((1, 1), device=q.device, dtype=torch.float32)
    return _ScaledOperand(decode(q, compute, one, (ALL, ALL), memory), scale_inv)


def _multiply(a: _ScaledOperand, b: _ScaledOperand, bias: Tensor | None, out_MN: Tensor) -> None:
    """Write a . b^T times both operands' scales, plus bias.

    With out=, because autocast would turn the product into float16, where a sum of codes overflows.
    """
    common = _common_factor(a, b)
    if common is not None:  # inside the product: one rounding and no second pass over the result
        start, beta = (out_MN, 0) if bias is None else (bias, 1)
        torch.addmm(start, a.values, b.values.t(), beta=beta, alpha=common, out=out_MN)
        return
    assert out_MN.dtype == torch.float32  # bfloat16 would round here, and again
    torch.addmm(out_MN, a.values, b.values.t(), beta=0, out=out_MN)
    _finish(out_MN, a, b, bias)


def _finish(wide_MN: Tensor, a: _ScaledOperand, b: _ScaledOperand, bias: Tensor | None) -> None:
    """Multiply float32 rows by a's scales and columns by b's; add bias."""
    for scales in result_scales(a.scale_inv, b.scale_inv):
        wide_MN.mul_(scales)
    if bias is not None:
        wide_MN.add_(bias)


def _common_factor(a: _ScaledOperand, b: _ScaledOperand) -> float | None:
    """Return the number that multiplies the whole result; None if several do, or if it is not normal in float32."""
    factor = 1.0
    for scale_inv in (a.scale_inv, b.scale_inv):
        if scale_inv is not None:
            if scale_inv.numel() != 1:
                return None
            factor *= float(scale_inv)
    return factor if MIN_SCALE <= factor <= MAX_SCALE else None
