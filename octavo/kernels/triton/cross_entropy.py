"""The cross entropy of rows of logits in one launch, and its gradient in another; the contracts are in signatures.py.

A program owns a row, and goes over its columns once, with the largest so far. reference/cross_entropy.py has the
formulas. A target that is no column makes its row's loss and gradient NaN: the host does not wait to refuse it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.arguments import LossRows, new_losses
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.prologue import exp2, reciprocal
from octavo.kernels.triton.tiles import narrow

COLUMNS = 8192  # at a time, 32 a thread


@triton.jit
def bend(x, steepness):
    """tanh(x / softcap), of which steepness is 2 log2(e) / softcap."""
    return 1.0 - 2.0 * reciprocal(1.0 + exp2(x * steepness))


@triton.jit
def logarithm(x):
    """log(x) of a normal number, else NaN, by Halley's steps from its exponent.

    Each leaves a twelfth of the error's cube. Triton's own reads a string in memory, which the emulator has not.
    """
    y = ((x.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32) * 0.6931471805599453
    for _ in tl.static_range(3):
        power = exp2(y * 1.4426950408889634)
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
    ignore_index,
    smoothing,
    share,  # of a column: smoothing / columns
    softcap,
    steepness,
    CAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's loss, and the logarithm of the sum of its exponentials."""
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * stride
    target = tl.load(target_ptr + row)
    largest = -3e38  # of a row of -inf too, whose loss is NaN
    exponentials = 0.0
    total = 0.0
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(x_ptr + cols, mask=cols < columns, other=float("-inf")).to(tl.float32)
        if CAPS:
            z = tl.where(cols < columns, softcap * bend(z, steepness), float("-inf"))
        raised = tl.maximum(largest, tl.max(z, 0))
        exponentials *= exp2((largest - raised) * 1.4426950408889634)
        exponentials += tl.sum(exp2((z - raised) * 1.4426950408889634), 0)
        total += tl.sum(tl.where(cols < columns, z, 0.0), 0)
        largest = raised
    lse = largest + logarithm(exponentials)
    known = (target >= 0) & (target < columns)
    likely = tl.load(x_ptr + target, mask=known, other=0.0).to(tl.float32)
    if CAPS:
        likely = softcap * bend(likely, steepness)
    likely = tl.where(known, likely, float("nan"))
    loss = lse - (1.0 - smoothing) * likely
    loss = tl.where(smoothing == 0.0, loss, loss - share * total)
    tl.store(losses_ptr + row, tl.where(target == ignore_index, 0.0, loss))
    tl.store(lse_ptr + row, lse)


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
    ignore_index,
    smoothing,
    share,  # of a column: smoothing / columns
    softcap,
    steepness,
    CAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a row's logits."""
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * stride
    out_ptr += row.to(tl.int64) * columns
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    grad = tl.load(grad_ptr + row * grad_stride).to(tl.float32)
    grad = tl.where((target >= 0) & (target < columns), grad, float("nan"))
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(x_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
        slope = 1.0
        if CAPS:
            bent = bend(z, steepness)
            z = softcap * bent
            slope = 1.0 - bent * bent
        gradient = exp2((z - lse) * 1.4426950408889634) - share
        gradient = tl.where(cols == target, gradient - (1.0 - smoothing), gradient) * grad * slope
        gradient = tl.where(target == ignore_index, 0.0, gradient)
        tl.store(out_ptr + cols, narrow(gradient, out_ptr.dtype.element_ty), mask=cols < columns)


def _scalars(rows: LossRows) -> tuple[int | float, ...]:
    columns, smoothing, softcap = rows.logits.shape[1], float(rows.label_smoothing), float(rows.softcap)
    steepness = 2.8853900817779268 / softcap if softcap else 0.0
    return columns, rows.ignore_index, smoothing, smoothing / columns, softcap, steepness


def cross_entropy(rows: LossRows) -> tuple[Tensor, Tensor]:
    """``octavo::cross_entropy``."""
    logits, target, *_, softcap = rows
    losses, lse = new_losses(rows)
    if logits.numel():
        x = logits if logits.stride(1) == 1 else logits.contiguous()
        arguments = x, x.stride(0), target.contiguous(), losses, lse, *_scalars(rows)
        launch(cross_entropy_kernel, len(x), (*arguments, softcap != 0, COLUMNS), 8, fuses=True)
    return losses, lse


def cross_entropy_backward(rows: LossRows, lse: Tensor, grad: Tensor) -> Tensor:
    """``octavo::cross_entropy_backward``."""
    logits, target, *_, softcap = rows
    out = logits.new_empty(logits.shape)
    if out.numel():
        x = logits if logits.stride(1) == 1 else logits.contiguous()
        arguments = x, x.stride(0), target.contiguous(), lse, grad, grad.stride(0), out, *_scalars(rows)
        launch(cross_entropy_backward_kernel, len(x), (*arguments, softcap != 0, COLUMNS), 8, fuses=True)
    return out
