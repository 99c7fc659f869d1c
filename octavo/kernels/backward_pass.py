"""The number of the backward pass that is under way, and of the last one before an optimizer's step, on each device.

A layer's delayed state is rolled once an optimizer step, by the first of its casts of grad_output after that. However
many micro-batches, losses or calls a step has, the later casts raise the amax that the first one entered. The state
itself holds the numbers of the pass that rolled it last and of the one that wrote it last, so that a copy of it, as in
a compiled graph, has them too; they are compared with the numbers here. These lie in a tensor that is written on its
device, in CUDA graphs too: a replay is a pass of its own, and ends a step if an optimizer's step was captured.

``delayed_before`` [3, 3] int32 has these rows, with an element a role (input, weight, grad_output):

    0  last_commit   the number of the last pass that wrote the role's state
    1  scale_before  the bits of the float32 scale from before that pass, which the pass goes on reading
    2  last_roll     the number of the last pass that rolled the role's history, where it did not raise its newest entry

Updates of weights without a torch.optim.Optimizer end no step; LONGEST passes do.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.private import current_graph_task_id, no_modes

LONGEST = 1024  # backward passes that count as one step where no optimizer has ended it

_numbers: dict[torch.device, Tensor] = {}
_tasks: dict[torch.device, int] = {}  # the task of autograd's engine that each device's number was last raised for


def is_running() -> bool:
    """Whether this thread is within a backward pass."""
    return current_graph_task_id() != -1


def backward_pass(device: torch.device) -> Tensor:
    """Return int32 [2]: the pass's number, and that of the last pass before or in which an optimizer made its step.

    Outside of a backward pass each call counts as a pass.
    """
    task = current_graph_task_id()
    if (numbers := _numbers.get(device)) is None:
        if not _numbers:
            register_optimizer_step_post_hook(end_step)
        with torch.inference_mode(False):
            # numbers that differ from those in the process that a pickled state comes from
            numbers = torch.full((2,), time.time_ns() % (1 << 30), dtype=torch.int32, device=device)
        _numbers[device] = numbers
    if task == -1 or _tasks.get(device) != task:
        with torch.no_grad():
            numbers[0].add_(1)
        _tasks[device] = task
    return numbers


def end_step(*arguments: object) -> None:
    """Note on each device, after an optimizer's step, that the passes until now are of a step that is over."""
    with no_modes(), torch.no_grad():  # modes that count operations, or make them fake, must not see these
        for numbers in _numbers.values():
            numbers[1].copy_(numbers[0])


def enters_again(delayed_before: Tensor, numbers: Tensor) -> Tensor:
    """Return for each role [3] whether a commit now raises the newest amax; else it rolls the history.

    ``delayed_before``: see the module; ``numbers``: of ``backward_pass``.
    """
    number, last_step_number = numbers.unbind()
    last_commit, _, last_roll = delayed_before.unbind()
    passes = number - last_roll  # negative if the state is from another process or device
    return (last_commit == number) | ((last_roll > last_step_number) & (passes >= 0) & (passes < LONGEST))


def scales_of_pass(delayed_scale: Tensor, delayed_before: Tensor) -> Tensor:
    """Compute the op ``octavo::scales_of_pass``; its contract is in signatures.py."""
    written = delayed_before[0] == backward_pass(delayed_scale.device)[0]
    return torch.where(written, delayed_before[1].view(torch.float32), delayed_scale)
