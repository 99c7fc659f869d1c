"""Adam's step of one weight by ``optimizer_step.cpp``: the reference's bits, in one pass and in threads."""

from __future__ import annotations

from ctypes import c_char_p, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from octavo.formats import E4M3, E4M4, E5M2
from octavo.kernels.cpu.codes import KINDS, threads_for
from octavo.kernels.cpu.library import Structure, library
from octavo.kernels.reference.optimizer_state import MASTER_KINDS, Fp8Weight, Master, MomentTensors
from octavo.kernels.reference.optimizer_step import AdamStep, SgdStep, WeightUpdate
from octavo.kernels.step_numbers import key_of

_KINDS = {**KINDS, torch.uint8: len(KINDS)}
_MASTERS = list(MASTER_KINDS)
FORMATS = [E4M3, E5M2, E4M4]  # of moments in codes

MOMENT, MASTER, STEP = (Structure("optimizer_step", name) for name in ("Moment", "Master", "Step"))
UPDATE = Structure("optimizer_step", "Update", Master=MASTER, Moment=MOMENT)


def step_in_place(update: WeightUpdate, step: AdamStep | SgdStep, divisor: float) -> bool:
    """Do ``reference.optimizer_step``'s pass over a weight whose state has begun the step; return whether it was done.

    Args:
        update: with one matrix.
        step: the rule; SGD's, and Adam's without a bound, which is torch's, are the reference's alone.
        divisor: the number that the gradient is divided by.
    """
    attributes = (value for stored in (update.master, *update.moments) for value in vars(stored).values())
    tensors = [x for x in (*attributes, update.gradient, update.gradient_scale_inv) if isinstance(x, Tensor)]
    takes_master = update.master.kind != "weight" or update.master.weight.dtype == torch.float32
    takes_tensors = takes_master and all(x.is_cpu and x.is_contiguous() for x in tensors)
    if not takes_tensors or isinstance(step, SgdStep) or step.max_update is None:
        return False
    if (compiled := library("optimizer_step")) is None:
        return False
    if compiled.octavo_adam.argtypes is None:
        for structure in (MOMENT, MASTER, STEP, UPDATE):
            structure.check(compiled)
        compiled.octavo_adam.argtypes = [c_char_p, c_char_p, c_int64, c_void_p]
    amaxes = torch.zeros(3, dtype=torch.float32, device="cpu")
    threads = threads_for(update.gradient.numel())
    compiled.octavo_adam(_update(update, step.number), _step(step, divisor), threads, amaxes.data_ptr())
    for stored, largest in zip((*update.moments, update.master), amaxes, strict=True):
        if not (isinstance(stored, Fp8Weight) and stored.has_blocks):
            stored.raise_amax_written(largest)
    return True


def _update(update: WeightUpdate, step_number: int) -> bytes:
    """Return an update as optimizer_step.cpp reads it."""
    gradient, scale_inv, bits = update.gradient, update.gradient_scale_inv, update.bits
    rows, cols = gradient.shape
    first_moment, second_moment = map(_moment, update.moments)
    moment_key, master_key = (key_of(bits.key, step_number, stream) for stream in (0, 1))
    fields: dict[str, Any] = {"first_moment": first_moment, "second_moment": second_moment}
    fields |= {"moment_key": moment_key, "master_key": master_key, "gradient_kind": _KINDS[gradient.dtype]}
    fields |= {"rows": rows, "cols": cols, "first_row": bits.first_row, "first_col": bits.first_col}
    fields |= {"row_length": bits.row_length or cols, **_addresses(gradient=gradient, gradient_scale_inv=scale_inv)}
    by_rows = scale_inv is not None and scale_inv.shape[0] == rows
    return UPDATE.pack(master=_master(update.master), gradient_by_rows=by_rows, **fields)


def _step(step: AdamStep, divisor: float) -> bytes:
    """Return a step as optimizer_step.cpp reads it: in float64, as the reference, and then rounded, as torch does."""
    assert step.max_update is not None
    group = step.group
    numbers = {"one_minus_beta1": 1 - group.beta1, "beta2": group.beta2, "one_minus_beta2": 1 - group.beta2}
    numbers |= {"coupled_decay": step.coupled_decay, "decay_factor": 1 - step.lr * step.decoupled_decay}
    numbers |= {"divisor": divisor, "correction2_inv": 1 / step.correction2, "eps": group.eps}
    numbers |= {"limit": step.max_update * step.correction1, "minus_rate": -step.lr / step.correction1}
    # by c_float, which rounds too large a number to inf
    return STEP.pack(maximize=step.maximize, **{name: c_float(number).value for name, number in numbers.items()})


def _moment(moment: MomentTensors) -> bytes:
    """Return a moment as optimizer_step.cpp reads it."""
    one_scale = moment.scale_inv is not None and moment.scale_inv.numel() == 1
    fields = {"kind": _KINDS[moment.data.dtype], "format": FORMATS.index(moment.fmt or E4M3), "one_scale": one_scale}
    fields |= {name: moment.rounding == name for name in ("stochastic", "hybrid")}
    addresses = _addresses(data=moment.data, scale_inv=moment.scale_inv, scale=moment.scale)
    return MOMENT.pack(root=moment.root, **fields, **addresses)


def _master(master: Master) -> bytes:
    """Return a master as optimizer_step.cpp reads it."""
    fields = {"kind": _MASTERS.index(master.kind), "has_blocks": master.has_blocks, "is_random": master.is_random}
    fields |= _addresses(weight=master.weight, low_bits=master.low_bits, scale_inv=master.scale_inv, scale=master.scale)
    return MASTER.pack(**fields, **_addresses(block_amax=master.amax_written if master.has_blocks else None))


def _addresses(**tensors: Tensor | None) -> dict[str, int]:
    """Return where tensors lie in memory; 0 for None."""
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
