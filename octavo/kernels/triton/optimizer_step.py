"""``optimizer_step`` in one launch (two where a moment's one scale is found by a launch before), on CUDA tensors.

What a launch reads first, its table, lies on the device and stays while the same weights come; addresses of gradients
and options are sent when they change. Nothing waits for the device, and a CUDA graph can capture a step that has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.reference.fp8_weights import Fp8Weight
from octavo.kernels.reference.optimizer_state import BLOCK, blocks_of
from octavo.kernels.reference.optimizer_step import AdamGroup, SgdGroup, WeightUpdate
from octavo.kernels.reference.random_bits import key_of
from octavo.kernels.reference.step_numbers import ratio_of
from octavo.kernels.triton.launch import config, is_capturing, on_its_device, workspace
from octavo.kernels.triton.optimizer_state import DTYPES, MEASURED, TensorClass, master_class, moment_class
from octavo.kernels.triton.step_kernel import StepClass, optimizer_step_kernel
from octavo.kernels.triton.table import Tensors

_MOST_PLANS = 64


class _Plan(NamedTuple):
    """A launch, but for what changes from step to step.

    Attributes:
        updates: of the weights, which must stay; without their gradients, which must not.
        table: int64, on the device.
        programs: how many.
        classes: of the tensors.
        one_scale, two_stages: whether any tensor has one scale, or finds its amax first.
        sent: what was last sent to the device: "gradients" and "groups", each (the values, the tensor).
        captured: the ids of such tensors that a CUDA graph reads.
    """

    updates: Sequence[WeightUpdate]
    table: Tensor
    programs: int
    classes: tuple[TensorClass, ...]
    one_scale: bool
    two_stages: bool
    sent: dict[str, tuple[Any, Tensor]]
    captured: set[int]


def optimizer_step(
    updates: Sequence[WeightUpdate],
    groups: Sequence[AdamGroup] | Sequence[SgdGroup],
    skip: Tensor | None = None,
    grad_scale: Tensor | None = None,
    plans: dict[Any, Any] | None = None,
    resolution: Tensor | None = None,
) -> None:
    """``reference.optimizer_step``; ``plans`` keeps launches for the next steps."""
    plans = {} if plans is None else plans
    addresses = [update.gradient.data_ptr() for update in updates]
    rates = tuple(_address(group.lr) for group in groups)
    key = (
        tuple((id(u.master), u.gradient.dtype, a & 15 == 0) for u, a in zip(updates, addresses, strict=True)),
        rates,
    )
    plan = plans.get(key)
    if plan is None:
        _check_capture("these weights or gradients are new to the optimizer")
        if len(plans) > _MOST_PLANS:
            captured = plans.get("captured", [])
            plans.clear()
            plans["captured"] = captured
        plan = plans[key] = _plan_of(updates, rates)
    if plan.programs == 0:
        for update in updates:
            update.step.add_(1 if skip is None else skip == 0)
        return
    scales = [update.gradient_scale_inv for update in updates]
    if any(scale_inv is not None for scale_inv in scales):
        addresses += [0 if scale_inv is None else scale_inv.data_ptr() for scale_inv in scales]
    gradients = _sent(plan, "gradients", addresses, torch.int64)
    options = _sent(plan, "groups", [_row_of(group) for group in groups], torch.float64)
    if is_capturing():  # the graph will read them as they are: none is freed or written again
        plans.setdefault("captured", []).append((plan.table, gradients, options))
        plan.captured.update((id(gradients), id(options)))
    _launch(plan.table, plan, gradients, options, groups[0], skip, grad_scale, resolution)


@on_its_device
def _launch(
    table: Tensor,
    plan: _Plan,
    gradients: Tensor,
    options: Tensor,
    group: AdamGroup | SgdGroup,
    skip: Tensor | None,
    grad_scale: Tensor | None,
    resolution: Tensor | None,
) -> None:
    chosen = config("optimizer_step", 64)
    rule = (True, group.decoupled, group.clip) if isinstance(group, AdamGroup) else (False, False, False)
    work = workspace(table, 1 + 6 * table.shape[0])
    for find in (True, False) if plan.two_stages else (False,):
        optimizer_step_kernel[(plan.programs,)](
            table,
            gradients,
            options,
            skip,
            grad_scale,
            resolution,
            work,
            plan.programs,
            Tensors(table.shape[0]),
            StepClass(plan.classes, *rule, chosen.block_r, chosen.tiles, plan.one_scale, find),
            num_warps=chosen.num_warps,
            enable_fp_fusion=False,
        )


def _sent(plan: _Plan, name: str, values: list[Any], dtype: torch.dtype) -> Tensor:
    """Numbers on the device, sent if they are new, without waiting: they are few enough to travel with the command."""
    found = plan.sent.get(name)
    if found is not None and found[0] == values:
        return found[1]
    _check_capture("the gradients' addresses or the options changed")
    tensor = torch.tensor(values, dtype=dtype)
    if found is None or id(found[1]) in plan.captured:
        tensor = tensor.to(plan.table.device)
    else:
        tensor = found[1].copy_(tensor, non_blocking=True)
    plan.sent[name] = values, tensor
    return tensor


def _check_capture(what: str) -> None:
    if is_capturing():
        raise RuntimeError(f"run the step once before capturing it in a CUDA graph: {what}")


def _address(lr: float | Tensor) -> int:
    """Of a learning rate that the kernel reads; 0 for one that is sent."""
    return lr.data_ptr() if isinstance(lr, Tensor) and lr.is_cuda and lr.dtype == torch.float32 else 0


def _row_of(group: AdamGroup | SgdGroup) -> list[float]:
    lr = 0.0 if _address(group.lr) else float(group.lr)
    if isinstance(group, AdamGroup):
        ratio = ratio_of(group.beta1, group.beta2)
        return [lr, group.beta1, group.beta2, group.eps, group.weight_decay, float(group.maximize), ratio, 0.0]
    rest = group.momentum, group.dampening, group.weight_decay, float(group.nesterov), float(group.maximize)
    return [lr, *rest, 0.0, 0.0]


def _plan_of(updates: Sequence[WeightUpdate], rates: tuple[int, ...]) -> _Plan:
    chosen = config("optimizer_step", 64)
    rows, programs = [], 0
    numbers: dict[TensorClass, int] = {}
    for update in updates:
        height, cols, start = _shape(update)
        of = _class_of(update, height, cols, start)
        tiles = -(-height * blocks_of(cols) // chosen.block_r)
        if of.square:
            tiles = blocks_of(height) * blocks_of(cols) * chosen.tiles
        rows.append(
            [
                *_addresses(update),
                rates[update.group],
                update.group,
                numbers.setdefault(of, len(numbers)),
                height,
                cols,
                start,
                key_of(update.key),
                programs,
                _flags(update, of) if tiles else 0,
            ]
        )
        programs += -(-tiles // chosen.tiles)
    table = torch.tensor(rows, dtype=torch.int64).to(updates[0].gradient.device)
    two_stages = any(moment.needs_amax_first for update in updates for moment in update.moments)
    kept = tuple(update._replace(gradient=update.master.weight, gradient_scale_inv=None) for update in updates)
    return _Plan(kept, table, programs, tuple(numbers), any(row[-1] & 7 for row in rows), two_stages, {}, set())


def _is_square(update: WeightUpdate) -> bool:
    """Whether the weight's scales are those of blocks of 128 x 128."""
    return isinstance(update.master, Fp8Weight) and update.master.has_blocks


def _shape(update: WeightUpdate) -> tuple[int, int, int]:
    """(rows, columns, the first element's index) as the kernel sees it: one row, where no block ends with a row."""
    rows, cols = update.gradient.shape
    start = update.first_row * cols
    scale_inv = update.gradient_scale_inv  # of a vector that is [n, 1], blocks lie along all of it
    has_rows = scale_inv is not None and scale_inv.shape[0] == rows
    has_blocks = any(moment.fmt is not None and not moment_class(moment).has_one_scale for moment in update.moments)
    if not _is_square(update) and not has_blocks and not has_rows:
        rows, cols = 1, rows * cols
    return rows, cols, start


def _class_of(update: WeightUpdate, rows: int, cols: int, start: int) -> TensorClass:
    master, square = update.master, _is_square(update)
    kept = [update.gradient, master.weight, master.rest, *(moment.data for moment in update.moments)]
    is_even = ((rows == 1 and not square) or cols % BLOCK == 0) and rows * cols % 16 == 0
    is_even = is_even and all(tensor.data_ptr() % 16 == 0 for tensor in kept if tensor is not None)
    first, second = (moment_class(moment) for moment in (*update.moments, None, None)[:2])
    is_large = start + rows * cols > 1 << 31
    gradient = DTYPES[update.gradient.dtype]
    return TensorClass(gradient, master_class(master), first, second, is_even, square, is_large)


def _addresses(update: WeightUpdate) -> list[int]:
    """The table's first eleven columns."""
    master = update.master
    found: list[Tensor | None] = [master.weight]
    for moment in (*update.moments, None, None)[:2]:
        found += [None] * 3 if moment is None else [moment.data, moment.scale_inv, moment.amax]
    found += [master.rest, master.scale_inv, update.amax, update.step]
    return [0 if tensor is None else tensor.data_ptr() for tensor in found]


def _flags(update: WeightUpdate, of: TensorClass) -> int:
    """ONE_SCALE's bits, and MEASURED."""
    bits = of.first.has_one_scale, of.second.has_one_scale, of.master_has_one_scale
    return sum(1 << place for place, bit in enumerate(bits) if bit) + MEASURED.value * update.measured
