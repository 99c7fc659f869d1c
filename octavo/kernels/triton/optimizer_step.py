"""``optimizer_step`` in one launch (two where a moment's one scale is found by a launch before), on CUDA tensors.

A launch's table lies on the device and stays while the same weights come; addresses of gradients and options are sent
when they change. Nothing waits for the device, and a CUDA graph can capture a step that has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.granularity import BLOCK, tiles_along
from octavo.kernels.layouts import blocks_in_row
from octavo.kernels.reference.optimizer_step import AdamGroup, SgdGroup, WeightUpdate, check_update
from octavo.kernels.step_numbers import key_of, ratio_of
from octavo.kernels.triton.launch import LARGE, config, is_capturing, launch, multiprocessors, on_its_device, workspace
from octavo.kernels.triton.optimizer_state import WIDTH, MasterClass, MomentClass, TableRow, TensorClass
from octavo.kernels.triton.step_kernel import StepClass, StepRule, optimizer_step_kernel
from octavo.kernels.triton.table import DTYPES

_MOST_PLANS = 64


class _Launch(NamedTuple):
    """A launch without its arguments that change from step to step.

    Attributes:
        updates: of the weights, which must live as long; without the gradients, which may be freed.
        table: int64, on the device.
        programs: how many.
        tiles: of each program.
        steps: the classes that launches are compiled for.
        sent: the last values sent to the device: "gradients" and "groups", each (the values, the tensor).
        captured: the sent tensors that a CUDA graph reads.
    """

    updates: Sequence[WeightUpdate]
    table: Tensor
    programs: int
    tiles: int
    steps: tuple[StepClass, ...]
    sent: dict[str, tuple[Any, Tensor]]
    captured: set[Tensor]


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
    addresses = _addresses_by_matrix(updates, [update.gradient for update in updates])
    rates = tuple(_address(group.lr) for group in groups)
    rule = _rule_of(groups)
    weights = tuple((u.master, u.gradient.dtype, u.gradient.data_ptr() & 15 == 0) for u in updates)
    key = weights, rates, rule
    if (plan := plans.get(key)) is None:
        _check_capture("these weights, gradients or options are new to the optimizer")
        if len(plans) > _MOST_PLANS:
            captured = plans.get("captured", [])
            plans.clear()
            plans["captured"] = captured
        plan = plans[key] = _launch_of(updates, rates, rule)
    if plan.programs == 0:
        for update in updates:
            update.step.add_(1 if skip is None else skip == 0)
        return
    scales = [update.gradient_scale_inv for update in updates]
    if any(scale_inv is not None for scale_inv in scales):
        addresses += _addresses_by_matrix(updates, scales)
    gradients = _sent(plan, "gradients", addresses, torch.int64)
    options = _sent(plan, "groups", [_row_of(group) for group in groups], torch.float64)
    if is_capturing():  # the graph will read them as they are: none is freed or written again
        plans.setdefault("captured", []).append((plan.table, gradients, options))
        plan.captured.update((gradients, options))
    _launch(plan.table, plan, gradients, options, skip, grad_scale, resolution)


@on_its_device
def _launch(table: Tensor, plan: _Launch, *step_arguments: Tensor | None) -> None:
    """Launch the step's kernels on the table's device."""
    count, num_warps = table.shape[0], config("optimizer_step", LARGE).num_warps
    work = workspace(table, 1 + 6 * count)
    for step in plan.steps:
        arguments = table, *step_arguments, work, plan.programs, plan.tiles, count, step
        launch(optimizer_step_kernel, plan.programs, arguments, num_warps)


def _sent(plan: _Launch, name: str, values: list[Any], dtype: torch.dtype) -> Tensor:
    """Return numbers on the device, sent if they are new, without waiting: they are few and travel with the command."""
    if (values_and_tensor := plan.sent.get(name)) is not None and values_and_tensor[0] == values:
        return values_and_tensor[1]
    _check_capture("the gradients' addresses or the options changed")
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if values_and_tensor is None or values_and_tensor[1] in plan.captured:
        tensor = tensor.to(plan.table.device)
    else:
        tensor = values_and_tensor[1].copy_(tensor, non_blocking=True)
    plan.sent[name] = values, tensor
    return tensor


def _check_capture(change: str) -> None:
    """Raise RuntimeError while a CUDA graph is captured: ``change`` needs something sent to the device."""
    if is_capturing():
        raise RuntimeError(f"run the step once before capturing it in a CUDA graph: {change}")


def _addresses_by_matrix(updates: Sequence[WeightUpdate], tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the address of a tensor of each update, for experts that of each one's part; 0 where there is none."""
    addresses: list[int] = []
    for update, tensor in zip(updates, tensors, strict=True):
        count = update.master.matrices
        address, size = (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes // count)
        addresses += [address + index * size for index in range(count)]
    return addresses


def _address(lr: float | Tensor) -> int:
    """Return the address of a learning rate that the kernel reads as a tensor; 0 for one sent with the options."""
    return lr.data_ptr() if isinstance(lr, Tensor) and lr.is_cuda and lr.dtype == torch.float32 else 0


def _rule_of(groups: Sequence[AdamGroup] | Sequence[SgdGroup]) -> StepRule:
    """Return the rule that groups of one kind share."""
    ascends = any(group.maximize for group in groups)
    if not isinstance(first := groups[0], AdamGroup):
        return StepRule(False, first.averages, ascends, averages=first.averages)
    share_below_half = all(isinstance(group, AdamGroup) and group.beta1 > 0.51 for group in groups)  # in float32 too
    return StepRule(True, first.decoupled, ascends, first.bounds_update, share_below_half)


def _row_of(group: AdamGroup | SgdGroup) -> list[float]:
    """Return a group's row, whose columns step_numbers.py names."""
    lr = 0.0 if _address(group.lr) else float(group.lr)
    if isinstance(group, AdamGroup):
        ratio = ratio_of(group.beta1, group.beta2)
        return [lr, group.beta1, group.beta2, group.eps, group.weight_decay, float(group.maximize), ratio, 0.0]
    options = group.momentum, group.dampening, group.weight_decay, float(group.nesterov), float(group.maximize)
    return [lr, *options, group.max_update, 0.0]


def _launch_of(updates: Sequence[WeightUpdate], rates: tuple[int, ...], rule: StepRule) -> _Launch:
    """Return the launch of updates: their table, programs, and the classes to compile for."""
    chosen = config("optimizer_step", LARGE)
    first = updates[0].gradient
    enough = 12 * multiprocessors(first.get_device())  # programs: few idle multiprocessors wait for the last ones
    most = sum(update.gradient.numel() for update in updates) // (chosen.tile_r * BLOCK * (enough or 1))
    chosen = chosen._replace(depth=max(1, min(chosen.depth, most)))
    rows, programs = [], 0
    numbers: dict[TensorClass, int] = {}
    matrices = [matrix for update in updates for matrix in update.matrices()]
    for update in matrices:
        check_update(update)
        length = update.bits.row_length or update.gradient.shape[1]
        start, gap = update.bits.first_row * length + update.bits.first_col, length - update.gradient.shape[1]
        height, cols = _shape(update, gap)
        tensor_class = _class_of(update, height, cols, start, gap)
        tiles = tiles_along(height * blocks_in_row(cols), chosen.tile_r)
        if tensor_class.square:
            tiles = blocks_in_row(height) * blocks_in_row(cols) * chosen.depth
        kind = numbers.setdefault(tensor_class, len(numbers))
        place = {"rows": height, "cols": cols, "start": start, "gap": gap, "first_program": programs}
        options = {"lr": rates[update.group], "group": update.group, "key": key_of(update.bits.key)}
        row = TableRow(**_addresses(update), **options, **place, tensor_class=kind, measured=update.measured)
        rows.append([*row, *[0] * (WIDTH.value - len(row))])
        programs += tiles_along(tiles, chosen.depth)
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(first.device)
    has_two_launches = any(moment.needs_amax_first for update in matrices for moment in update.moments)
    finds_by_launch = (True, False) if has_two_launches else (False,)
    steps = tuple(StepClass(tuple(numbers), rule, chosen.tile_r, finds) for finds in finds_by_launch)
    bare_updates = tuple(update._replace(gradient=update.master.weight, gradient_scale_inv=None) for update in updates)
    return _Launch(bare_updates, table, programs, chosen.depth, steps, {}, set())


def _shape(update: WeightUpdate, gap: int) -> tuple[int, int]:
    """Return (rows, columns) as the kernel sees them: one row, where no block ends with a row; gap: TableRow's."""
    rows, cols = update.gradient.shape
    scale_inv = update.gradient_scale_inv  # of a vector that is [n, 1], blocks lie along all of it
    has_rows = scale_inv is not None and scale_inv.shape[0] == rows
    has_blocks = any(m.fmt is not None and not MomentClass.of(m).has_one_scale for m in update.moments)
    return (rows, cols) if update.master.has_blocks or has_blocks or has_rows or gap else (1, rows * cols)


def _class_of(update: WeightUpdate, rows: int, cols: int, start: int, gap: int) -> TensorClass:
    """Return an update's class; arguments as TableRow's."""
    master, square = update.master, update.master.has_blocks
    tensors = [update.gradient, master.weight, master.low_bits, *(moment.data for moment in update.moments)]
    is_even = ((rows == 1 and not square) or cols % BLOCK == 0) and rows * cols % 16 == 0
    is_even = is_even and all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor is not None)
    first, second = (*map(MomentClass.of, update.moments), MomentClass(), MomentClass())[:2]
    is_large, gradient = start + rows * (cols + gap) > 1 << 31, DTYPES[update.gradient.dtype]
    read = gradient, MasterClass.of(master), first, second
    return TensorClass(*read, even=is_even, square=square, large=is_large, apart=gap != 0)


def _addresses(update: WeightUpdate) -> dict[str, int]:
    """Return a TableRow's addresses, of the tensors that there are."""
    master = update.master
    tensors = {"weight": master.weight, "low_bits": master.low_bits, "step": update.step}
    tensors |= {"master_scale_inv": master.scale_inv, "master_amax": master.amax}
    for name, moment in zip(("first", "second"), update.moments, strict=False):
        tensors |= {name: moment.data, f"{name}_scale_inv": moment.scale_inv, f"{name}_amax": moment.amax}
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
