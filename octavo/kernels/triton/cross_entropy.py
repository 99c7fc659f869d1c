"""The cross entropy of rows of logits in one launch, and its gradient in another; the contracts are in signatures.py.

A program owns a row, and goes over its columns once, with the largest so far; but the gradient's codes, which are also
written transposed, it writes by tiles. reference/cross_entropy.py has the formulas. A target that is no column makes
its row's loss and gradient NaN: the host does not wait to refuse it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import format_of
from octavo.kernels.arguments import LossRows, new_losses
from octavo.kernels.triton.cast_input import codes_to
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.prologue import exp2, reciprocal
from octavo.kernels.triton.tiles import Source, load_tile, narrow, store_codes
from octavo.numerics import scale_of_unit

COLUMNS = 8192  # at a time, 32 a thread
TILE = (128, 64)  # a program's codes: 128 bytes of them lie beside each other transposed; it reads as many of bfloat16


class LossOptions(NamedTuple):
    """The options of a cross entropy; steepness: 2 log2(e) / softcap, 0 without a softcap."""

    ignore_index: Any
    smoothing: Any
    share: Any  # what label smoothing gives each column: smoothing / columns
    softcap: Any
    steepness: Any


@triton.jit
def bend(x, steepness):
    """Return tanh(x / softcap)."""
    return 1.0 - 2.0 * reciprocal(1.0 + exp2(x * steepness))


@triton.jit
def logarithm(x):
    """Return log(x) of a normal number, else NaN, by Halley's steps from its exponent.

    Each leaves a twelfth of the error's cube. Triton's tl.log reads a string in memory, which the emulator lacks.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    y = ((x.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32) * 0.6931471805599453  # log(2)
    for _ in tl.static_range(3):
        power = exp2(y * LOG2_E)
        y += 2.0 * (x - power) * reciprocal(x + power)
    return y


@triton.jit
def cross_entropy_kernel(
    x_ptr,  # [T, V], a row's elements beside each other
    stride,
    target_ptr,
    losses_ptr,
    lse_ptr,
    columns,
    loss_options,  # LossOptions
    CAPS: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Write a row's loss, and the logarithm of the sum of its exponentials."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * stride
    target = tl.load(target_ptr + row)
    largest = -3e38  # finite, so that a row of -inf has a NaN as its loss
    exponentials = 0.0
    total = 0.0
    for start in range(0, columns, TILE_C):
        cols = start + tl.arange(0, TILE_C)
        z = tl.load(x_ptr + cols, mask=cols < columns, other=float("-inf")).to(tl.float32)
        if CAPS:
            z = tl.where(cols < columns, loss_options.softcap * bend(z, loss_options.steepness), float("-inf"))
        raised = tl.maximum(largest, tl.max(z, 0))
        exponentials *= exp2((largest - raised) * LOG2_E)
        exponentials += tl.sum(exp2((z - raised) * LOG2_E), 0)
        total += tl.sum(tl.where(cols < columns, z, 0.0), 0)
        largest = raised
    lse = largest + logarithm(exponentials)
    is_column = (target >= 0) & (target < columns)
    likely = tl.load(x_ptr + target, mask=is_column, other=0.0).to(tl.float32)
    if CAPS:
        likely = loss_options.softcap * bend(likely, loss_options.steepness)
    likely = tl.where(is_column, likely, float("nan"))
    loss = lse - (1.0 - loss_options.smoothing) * likely
    loss = tl.where(loss_options.smoothing == 0.0, loss, loss - loss_options.share * total)
    tl.store(losses_ptr + row, tl.where(target == loss_options.ignore_index, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@triton.jit
def gradient_of(z, lse, grad, target, cols, columns, loss_options, CAPS: tl.constexpr):
    """Return the gradient of logits z, where these broadcast: lse, grad and target of rows, cols [TC]."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    slope = 1.0
    if CAPS:
        tanh = bend(z, loss_options.steepness)
        z = loss_options.softcap * tanh
        slope = 1.0 - tanh * tanh
    grad = tl.where((target >= 0) & (target < columns), grad, float("nan"))
    gradient = exp2((z - lse) * LOG2_E) - loss_options.share
    gradient = tl.where(cols == target, gradient - (1.0 - loss_options.smoothing), gradient) * grad * slope
    return tl.where(target == loss_options.ignore_index, 0.0, gradient)


@triton.jit
def cross_entropy_backward_kernel(
    x_ptr,  # [T, V], a row's elements beside each other
    stride,
    target_ptr,
    lse_ptr,
    grad_ptr,
    grad_stride,
    out_ptr,  # [T, V], contiguous
    columns,
    loss_options,  # LossOptions
    CAPS: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Write the gradient of a row's logits."""
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * stride
    out_ptr += row.to(tl.int64) * columns
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    grad = tl.load(grad_ptr + row * grad_stride).to(tl.float32)
    for start in range(0, columns, TILE_C):
        cols = start + tl.arange(0, TILE_C)
        z = tl.load(x_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
        gradient = gradient_of(z, lse, grad, target, cols, columns, loss_options, CAPS)
        tl.store(out_ptr + cols, narrow(gradient, out_ptr.dtype.element_ty), mask=cols < columns)


@triton.jit
def cross_entropy_codes_kernel(
    x,  # Source, [T, V]
    target_ptr,
    lse_ptr,
    out,  # Codes
    first,  # column of the transposed codes
    columns_end,  # behind the last
    unit,  # the scale
    loss_options,  # LossOptions
    CAPS: tl.constexpr,
    E5M2: tl.constexpr,
    EVEN: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """Write the codes of the gradient of a tile of logits."""
    strips = tl.cdiv(x.C, TC)
    rows = tl.program_id(0) // strips * TR + tl.arange(0, TR)
    cols = tl.program_id(0) % strips * TC + tl.arange(0, TC)
    z = load_tile(x, rows, cols, EVEN)
    target = tl.load(target_ptr + rows, mask=rows < x.R, other=loss_options.ignore_index)[:, None]
    lse = tl.load(lse_ptr + rows, mask=rows < x.R, other=0.0)[:, None]
    gradient = gradient_of(z, lse, unit, target, cols[None, :], x.C, loss_options, CAPS)
    if not EVEN:
        gradient = tl.where((cols < x.C)[None, :], gradient, 0.0)
    codes = narrow(gradient, tl.float8e5 if E5M2 else tl.float8e4nv)
    store_codes(codes, out, rows, cols, x, EVEN, None, first + rows, columns_end)


def _options(rows: LossRows) -> LossOptions:
    """Return the kernels' options of a cross entropy."""
    smoothing, softcap = float(rows.label_smoothing), float(rows.softcap)
    steepness = 2.0 * math.log2(math.e) / softcap if softcap else 0.0
    return LossOptions(rows.ignore_index, smoothing, smoothing / rows.logits.shape[1], softcap, steepness)


def _launch_by_row(kernel: Any, rows: LossRows, *arguments: Any) -> None:
    """Launch a kernel whose programs own a row of logits each, with its arguments between target and columns."""
    x = rows.logits if rows.logits.stride(1) == 1 else rows.logits.contiguous()
    first, last = (x, x.stride(0), rows.target.contiguous()), (x.shape[1], _options(rows), rows.softcap != 0, COLUMNS)
    launch(kernel, len(x), (*first, *arguments, *last), 8, fuses=True)


def cross_entropy(rows: LossRows) -> tuple[Tensor, Tensor]:
    """Compute the op ``octavo::cross_entropy``; its contract is in signatures.py."""
    losses, lse = new_losses(rows)
    if not rows.logits.shape[1]:  # no column is right, and the sum of no exponentials is 0
        return losses.copy_(torch.where(rows.target == rows.ignore_index, 0.0, torch.nan)), lse.fill_(-torch.inf)
    if rows.logits.numel():
        _launch_by_row(cross_entropy_kernel, rows, losses, lse)
    return losses, lse


def cross_entropy_backward(rows: LossRows, lse: Tensor, grad: Tensor) -> Tensor:
    """Compute the op ``octavo::cross_entropy_backward``; its contract is in signatures.py."""
    out = rows.logits.new_empty(rows.logits.shape)
    if out.numel():
        _launch_by_row(cross_entropy_backward_kernel, rows, lse, grad, grad.stride(0), out)
    return out


def cross_entropy_codes(rows: LossRows, lse: Tensor, codes: Tensor, transposed: Tensor, first: int) -> None:
    """Compute the op ``octavo::cross_entropy_codes``; its contract is in signatures.py."""
    logits, target, *_, softcap = rows
    if logits.numel():
        count, columns = logits.shape
        wide = codes.shape[1] if codes.numel() else columns
        source = Source(logits, count, columns, *logits.stride())
        out = codes_to(codes, transposed)
        even = count % TILE[0] == 0 == columns % TILE[1] and wide == columns
        unit = scale_of_unit(format_of(codes.dtype).max)
        arguments = source, target.contiguous(), lse, out, first, transposed.shape[1], unit, _options(rows)
        programs = triton.cdiv(count, TILE[0]) * triton.cdiv(columns, TILE[1])
        constants = softcap != 0, codes.dtype is torch.float8_e5m2, even, *TILE
        launch(cross_entropy_codes_kernel, programs, (*arguments, *constants), 8, fuses=True)
