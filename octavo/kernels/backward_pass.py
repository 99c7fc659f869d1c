"""The number of the backward pass that is under way, on each device.

A layer's delayed state is rolled once a pass, however often the layer was called in the forward: the first of its casts
of grad_output rolls, the others raise what the first has entered. The state itself says which pass rolled it last, so
that a copy of it, in a compiled graph say, does too; this is what it compares that with. It is a tensor that is counted
up on its device, in CUDA graphs too, where a replay is a pass of its own.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from octavo.private import current_graph_task_id

_numbers: dict[torch.device, Tensor] = {}
_tasks: dict[torch.device, int] = {}  # of autograd's engine: what each number was last counted up for


def is_running() -> bool:
    """Whether this thread is within a backward pass."""
    return current_graph_task_id() != -1


def backward_pass(device: torch.device) -> Tensor:
    """The pass's number, int32 [1]; outside of a backward pass each call is one by itself."""
    task = current_graph_task_id()
    number = _numbers.get(device)
    if number is None:
        with torch.inference_mode(False):
            # another number than in the process that a pickled state comes from
            number = _numbers[device] = torch.tensor([time.time_ns() % (1 << 30)], dtype=torch.int32, device=device)
    if task == -1 or _tasks.get(device) != task:
        with torch.no_grad():
            number.add_(1)
        _tasks[device] = task
    return number


def scales_of_pass(delayed_scale: Tensor, delayed_before: Tensor) -> Tensor:
    """``octavo::scales_of_pass``."""
    rolled = delayed_before[0] == backward_pass(delayed_scale.device)
    return torch.where(rolled, delayed_before[1].view(torch.float32), delayed_scale)
