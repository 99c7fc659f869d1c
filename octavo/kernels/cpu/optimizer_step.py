"""Adam's step of one weight by ``optimizer_step.cpp``: the reference's bits, in one pass and in threads."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.cpu.codes import KINDS, threads_for
from octavo.kernels.cpu.library import library
from octavo.kernels.reference.optimizer_state import MASTER_KINDS, Fp8Weight, Master, MomentTensors
from octavo.kernels.reference.optimizer_step import AdamStep, SgdStep, WeightUpdate
from octavo.kernels.step_numbers import key_of

_KINDS = {**KINDS, torch.uint8: len(KINDS)}
_MASTERS = list(MASTER_KINDS)


# optimizer_step.cpp's structures, field by field; 0P is the padding at an end
_MASTER = "5P3i0P"  # weight, rest, scale_inv, scale, block_amax; kind, has_blocks, is_random
_MOMENT = "3P5i6i2f0P"  # data, scale_inv, scale; kind, one_scale, root, stochastic, hybrid; the format's
# master; moments; gradient, gradient_scale_inv; rows, cols, first_row, first_col, row_length; moment_key, master_key;
# gradient_kind, gradient_by_rows
_UPDATE = struct.Struct(f"{_MASTER}{_MOMENT}{_MOMENT}2P5q2I2i")


def step_in_place(update: WeightUpdate, step: AdamStep | SgdStep, divisor: float) -> bool:
    """Do ``reference.optimizer_step``'s pass over a weight whose state has begun the step; return whether it was done.

    Args:
        update: with one matrix.
        step: the rule; SGD's, and Adam's without a bound, which is torch's, are the reference's alone.
        divisor: the number that the gradient is divided by.
    """
    tensors = [*_tensors_of(update.master), *(x for moment in update.moments for x in _tensors_of(moment))]
    tensors += [x for x in (update.gradient, update.gradient_scale_inv) if x is not None]
    if isinstance(step, SgdStep) or step.max_update is None or not all(x.is_cpu and x.is_contiguous() for x in tensors):
        return False
    if update.master.kind == "weight" and update.master.weight.dtype != torch.float32:
        return False
    if (compiled := library("optimizer_step")) is None:
        return False
    rows, cols = update.gradient.shape
    scale_inv, bits = update.gradient_scale_inv, update.bits
    fields = _UPDATE.pack(
        *_master(update.master),
        *(field for moment in update.moments for field in _moment(moment)),
        *(update.gradient.data_ptr(), _pointer(scale_inv)),
        *(rows, cols, bits.first_row, bits.first_col, bits.row_length or cols),
        *(key_of(bits.key, step.number, stream) for stream in (0, 1)),
        *(_KINDS[update.gradient.dtype], scale_inv is not None and scale_inv.shape[0] == rows),
    )
    numbers, threads = _numbers(step, divisor), threads_for(rows * cols)
    amaxes = torch.zeros(3, dtype=torch.float32, device="cpu")
    compiled.octavo_adam(fields, numbers, c_int64(threads), c_void_p(amaxes.data_ptr()))
    for stored, largest in zip((*update.moments, update.master), amaxes, strict=True):
        if not (isinstance(stored, Fp8Weight) and stored.has_blocks):
            stored.raise_amax_written(largest)
    return True


def _tensors_of(stored: Master | MomentTensors) -> list[Tensor]:
    """Return the tensors among an object's attributes."""
    return [value for value in vars(stored).values() if isinstance(value, Tensor)]


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _numbers(step: AdamStep, divisor: float) -> ctypes.Array[c_float]:
    """Return optimizer_step.cpp's Step, as the reference computes it, in float64; each becomes float32, as in torch."""
    assert step.max_update is not None
    group, limit = step.group, step.max_update * step.correction1
    numbers = (
        *(1 - group.beta1, 1 - group.beta2, group.beta2, 1 - step.lr * step.decoupled_decay, step.coupled_decay),
        *(divisor, 1 / step.correction2, group.eps, limit, -step.lr / step.correction1),
        step.maximize,
    )
    return (c_float * len(numbers))(*numbers)


def _moment(moment: MomentTensors) -> tuple[float, ...]:
    """Return the fields of optimizer_step.cpp's Moment, which end with its format's."""
    one_scale, fmt = moment.scale_inv is not None and moment.scale_inv.numel() == 1, moment.fmt or E4M3
    return (
        *(moment.data.data_ptr(), _pointer(moment.scale_inv), _pointer(moment.scale), _KINDS[moment.data.dtype]),
        *(one_scale, moment.root, moment.rounding == "stochastic", moment.rounding == "hybrid"),
        *(fmt.mantissa_bits, fmt.bias, fmt.max_code, fmt.nan_code, fmt.signed, fmt.has_inf),
        *(fmt.max, fmt.smallest_normal),
    )


def _master(master: Master) -> tuple[int, ...]:
    """Return the fields of optimizer_step.cpp's Master."""
    return (
        *(master.weight.data_ptr(), _pointer(master.low_bits), _pointer(master.scale_inv), _pointer(master.scale)),
        *(_pointer(master.amax_written) if master.has_blocks else 0, _MASTERS.index(master.kind), master.has_blocks),
        master.is_random,
    )
