"""Commits within one backward pass, and delayed states that are compared."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.scaling.delayed import State
from tests.support.definitions import same_bits


def one_pass(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in order, each in a node of its own of one backward pass, and return their results."""
    y, results = torch.zeros(1, requires_grad=True), []
    for call in reversed(calls):
        y = y.clone()
        y.register_hook(lambda grad, call=call: results.append(call()))
    y.backward()
    return results


def end_step() -> None:
    """End the optimizer step that the passes until now belong to, as a step of any optimizer does."""
    _optimizer.step()


_optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def before_of(scale: Tensor) -> Tensor:
    """Return a state's ``before`` when no pass has rolled it since these were its scales."""
    return torch.stack((torch.zeros_like(scale), scale, torch.zeros_like(scale))).view(torch.int32)


def same_state(state: State, expected: State) -> bool:
    """Whether two states are the same but for the numbers of passes, which outside of a backward are one a call."""
    left, right = ((*one[:2], one.before[1]) for one in (state, expected))
    return all(same_bits(a.cpu(), b.cpu()) for a, b in zip(left, right, strict=True))
