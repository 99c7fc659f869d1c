"""``optimizer_step`` in one launch (two where a moment's one scale is found by a launch before), on CUDA tensors.

What a launch reads first, its table, lies on the device and stays while the same weights come; addresses of gradients
and options are sent when they change. Nothing waits for the device, and a CUDA graph can capture a step that has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3, E4M4, E5M2
from octavo.kernels.reference.fp8_weights import Fp8Weight
from octavo.kernels.reference.optimizer_state import BLOCK, StoredMoment, blocks_of
from octavo.kernels.reference.optimizer_step import AdamGroup, SgdGroup, WeightUpdate
from octavo.kernels.reference.random_bits import key_of
from octavo.kernels.reference.step_numbers import ratio_of
from octavo.kernels.triton.launch import config, is_capturing, on_its_device, workspace
from octavo.kernels.triton.optimizer_kernels import optimizer_step_kernel
from octavo.kernels.triton.table import search

# bytes are E4M3 codes, of a weight or a gradient
_FLOATS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 6, torch.uint8: 3}
_CODES = {E4M3: 3, E5M2: 4, E4M4: 5}
_MASTERS = {"weight": 0, "split32": 1, "split24": 2, "fp16_scaled": 3, "stochastic": 4}
_MASTERS |= {"fp8_split16": 5, "fp8_split24": 6, "fp8_fp16": 7, "fp8_fp32": 8, "fp8_stochastic": 9}
_EVEN, _SQUARE = 1, 2
_MOST_PLANS = 64
_NO_MOMENT = (0, 0, 0, 0)


class _Plan(NamedTuple):
    """A launch, but for what changes from step to step.

    Attributes:
        updates: of the weights, which must stay; without their gradients, which must not.
        table: int64, on the device.
        programs: how many.
        classes: see optimizer_kernels.py.
        one_scale, two_stages: whether any tensor has one scale, or finds its amax first.
        sent: what was last sent to the device: "gradients" and "groups", each (the values, the tensor).
        captured: the ids of such tensors that a CUDA graph reads.
    """

    updates: Sequence[WeightUpdate]
    table: Tensor
    programs: int
    classes: tuple[int, ...]
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
    rule = (1, groups[0].decoupled, groups[0].clip) if isinstance(groups[0], AdamGroup) else (2, False, False)
    _launch(plan.table, plan, gradients, options, rule, skip, grad_scale, resolution)


@on_its_device
def _launch(
    table: Tensor,
    plan: _Plan,
    gradients: Tensor,
    options: Tensor,
    rule: tuple[int, bool, bool],
    skip: Tensor | None,
    grad_scale: Tensor | None,
    resolution: Tensor | None,
) -> None:
    chosen = config("optimizer_step", 64)
    tensors = search(table.shape[0])
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
            tensors,
            plan.classes,
            rule,
            (chosen.block_r, chosen.tiles),
            plan.one_scale,
            find,
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
    classes: dict[tuple[int, ...], int] = {}
    for update in updates:
        shape, start, layout = _layout(update)
        fields = _class_of(update, layout, start + shape[0] * shape[1] > 1 << 31)
        number = classes.setdefault(fields, len(classes))
        tiles = -(-shape[0] * blocks_of(shape[1]) // chosen.block_r)
        if layout >= _SQUARE:
            tiles = blocks_of(shape[0]) * blocks_of(shape[1]) * chosen.tiles
        row = [
            *_addresses(update),
            rates[update.group],
            update.group,
            number,
            *shape,
            start,
            key_of(update.key),
            programs,
        ]
        rows.append([*row, _flags(update) if tiles else 0])
        programs += -(-tiles // chosen.tiles)
    table = torch.tensor(rows, dtype=torch.int64).to(updates[0].gradient.device)
    flat = tuple(field for fields in classes for field in fields)
    two_stages = any(moment.needs_amax_first for update in updates for moment in update.moments)
    kept = tuple(update._replace(gradient=update.master.weight, gradient_scale_inv=None) for update in updates)
    return _Plan(kept, table, programs, flat, any(row[-1] & 7 for row in rows), two_stages, {}, set())


def _is_square(update: WeightUpdate) -> bool:
    """Whether the weight's scales are those of blocks of 128 x 128."""
    return isinstance(update.master, Fp8Weight) and update.master.has_blocks


def _layout(update: WeightUpdate) -> tuple[tuple[int, int], int, int]:
    """(rows and columns, the first element's index, how tiles lie: see CLASSES)."""
    rows, cols = update.gradient.shape
    start = update.first_row * cols
    square = _is_square(update)
    if not square and not any(_has_blocks(moment) for moment in update.moments) and not _has_rows(update):
        rows, cols = 1, rows * cols
    tensors = [update.gradient, *_stored(update)]
    even = ((rows == 1 and not square) or cols % BLOCK == 0) and rows * cols % 16 == 0
    even = even and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return (rows, cols), start, _EVEN * even + _SQUARE * square


def _stored(update: WeightUpdate) -> list[Tensor]:
    kept = [update.master.weight, update.master.rest, *(moment.data for moment in update.moments)]
    return [tensor for tensor in kept if tensor is not None]


def _has_rows(update: WeightUpdate) -> bool:
    """Whether the gradient is in codes whose blocks lie along its rows, not along all of a vector that is [n, 1]."""
    scale_inv = update.gradient_scale_inv
    return scale_inv is not None and scale_inv.shape[0] == update.gradient.shape[0]


def _has_blocks(moment: StoredMoment) -> bool:
    return moment.fmt is not None and _scale_from(moment) == 0


def _scale_from(moment: StoredMoment) -> int:
    """SCALE."""
    return 1 if moment.amax is not None else 2 * moment.needs_amax_first


def _class_of(update: WeightUpdate, layout: int, large: bool) -> tuple[int, ...]:
    master = update.master
    fields = [_FLOATS[update.gradient.dtype], _FLOATS[master.weight.dtype], _MASTERS[master.kind], layout, large]
    for moment in (*update.moments, None, None)[:2]:
        if moment is None:
            fields += _NO_MOMENT
        else:
            kind = _FLOATS[moment.data.dtype] if moment.fmt is None else _CODES[moment.fmt]
            fields += [kind, moment.root, moment.stochastic, _scale_from(moment)]
    return tuple(map(int, fields))


def _addresses(update: WeightUpdate) -> list[int]:
    """The table's first eleven columns."""
    master = update.master
    found: list[Tensor | None] = [master.weight]
    for moment in (*update.moments, None, None)[:2]:
        found += [None] * 3 if moment is None else [moment.data, moment.scale_inv, moment.amax]
    found += [master.rest, master.scale_inv, update.amax, update.step]
    return [0 if tensor is None else tensor.data_ptr() for tensor in found]


def _flags(update: WeightUpdate) -> int:
    bits = [moment is not None and _scale_from(moment) != 0 for moment in (*update.moments, None, None)[:2]]
    bits += [update.master.needs_bound and not _is_square(update), update.measured]
    return sum(1 << place for place, bit in enumerate(bits) if bit)
