"""Notes of a recorded step: the forwards of its model, and the gradients that backward gives to their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from octavo.distributed.checkpoint import PlainModel
from octavo.inspect.forwards import Forward, map_tensors
from octavo.inspect.slope import dot
from octavo.private import hooks_after_gradients
from octavo.weights.fsdp2 import whole

_Context = Callable[[], AbstractContextManager[None]]


class NotedOutput:
    """A tensor that a forward returned: the gradient that it gets, and their product."""

    def __init__(self, begins: Callable[[], None]) -> None:
        self.begins = begins  # to be called before backward changes a gradient
        self.grad: Tensor | None = None
        self.product: Tensor | float = 0.0


class _NotesGradient(torch.autograd.Function):
    """Return a tensor as it is, and note the gradient that it gets: of outside alone, as outputs may need each other.

    Not by a hook of a view: that one is left out where the view is written in place.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, output: NotedOutput) -> Tensor:
        ctx.output = output
        ctx.save_for_backward(y.detach())  # freed with the graph
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        output, noted = ctx.output, grad.detach()
        output.begins()
        try:
            (y,) = ctx.saved_tensors
            output.product = output.product + dot(whole(y), whole(noted))
        except RuntimeError:  # it was overwritten meanwhile, perhaps by its gradient
            output.product = math.nan
        output.grad = noted if output.grad is None else output.grad + noted  # more than one backward of a graph
        return grad, None


class Call(NamedTuple):
    """A forward of the model, and its outputs that need a gradient."""

    forward: Forward
    versions: dict[nn.Parameter, int]  # how often each was written; gathered ones by FSDP2, which are gone later
    outputs: list[NotedOutput]

    def is_before_writes(self, model: nn.Module) -> bool:
        """Return whether the model's parameters were written since the call."""
        return any(self.versions.get(p, p._version) != p._version for p in model.parameters())


class StepNotes:
    """Notes the calls of a model between ``begin`` and ``end``, by hooks.

    Args:
        wrapped: the module that a training calls, perhaps with DistributedDataParallel or torch.compile around it.
        before_gradient: is called before backward gives an output its gradient.
        or_reason: a context that notes an error as the reason for no twin.

    Attributes:
        model: the module without what is around it.
        calls: those that were noted, also without a backward.
    """

    def __init__(self, wrapped: nn.Module, before_gradient: Callable[[], None], or_reason: _Context) -> None:
        self.model, self._wrapped = PlainModel(wrapped).module, wrapped
        self._before_gradient, self._or_reason = before_gradient, or_reason
        self.calls: list[Call] = []
        self._running: list[Call | None] = []  # the call of each forward that runs, as one may call another
        self._hooks: list[Any] = []

    def begin(self) -> None:
        before = self._wrapped.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._hooks = [before, self._wrapped.register_forward_hook(self._after_forward, always_call=True)]

    def end(self) -> None:
        """Note no more forwards, and forget those that were noted."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.calls, self._running = [], [], []

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        call, model = None, self.model
        if torch.is_grad_enabled() and hooks_after_gradients(()) is not None and not self._running:
            with self._or_reason():
                call = Call(Forward.of(model, args, kwargs), {p: p._version for p in model.parameters()}, [])
        self._running.append(call)

    def _after_forward(self, _: nn.Module, args: Any, result: Any) -> Any:
        if torch.compiler.is_compiling() or not self._running or (call := self._running.pop()) is None:
            return None
        self.calls.append(call)

        def noted(y: Tensor) -> Tensor:
            if not gets_gradient(y):
                return y
            call.outputs.append(output := NotedOutput(self._before_gradient))
            return cast(Tensor, _NotesGradient.apply(y, output))

        with self._or_reason():
            return map_tensors(noted, result)
        return None


def gets_gradient(y: Tensor) -> bool:
    """Return whether backward gives an output of a model a gradient that is noted."""
    return y.requires_grad and not y.is_leaf
