"""The twin of a recorded step: its batches once more in high precision, with the same weights and random numbers.

A step's forwards of the model are noted with their arguments, random states and autocast, and the gradients that their
outputs get. Before the optimizer's update they run again with every layer in high precision, and backward begins with
the same gradients of the outputs. So weights' gradients can be compared however the loss is computed. The loss itself
is compared to first order, by the change of the outputs times their gradients: exactly where the model returns it.

The twin leaves no trace: gradients, buffers, random states and all that octavo keeps are as before.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.distributed.checkpoint import unwrapped
from octavo.distributed.ranks import Ranks
from octavo.inspect.rows import RecordedLayer
from octavo.nn.convert import using
from octavo.private import hooks_of, pytree
from octavo.weights.fsdp2 import on_this_rank

NO_OPTIMIZER = "a twin runs before an optimizer's update: give octavo.inspect.record the optimizer"
LOSS = "twin_loss"  # a scalar of the record: the loss in high precision
LEFT = "left_gradient"  # the same: Comparison.left


class Comparison(NamedTuple):
    """What a twin found, on the device.

    Attributes:
        products: [layers, 3] float64: of a layer's weight gradients g and the twin's t, <g, t>, <g, g> and <t, t>;
            summed over ranks; 0 where a gradient of an earlier step was left, as g is then not this step's alone.
        loss_change: the twin's loss less the step's, float64, times the loss scale; nan where an output was
            overwritten.
        loss: the twin's loss times the loss scale; nan where a model returns another tensor than a number.
        left: the norm of gradients from before the step's first backward, of weights that the optimizer has, over the
            norm of all weights' gradients after the last.
    """

    products: Tensor
    loss_change: Tensor
    loss: Tensor
    left: Tensor

    def beside(self, loss: float | Tensor, loss_scale: float | Tensor) -> Tensor:
        """Return the twin's loss beside a step's loss, which need be finite only where the model returns no number."""
        changed = loss + self.loss_change / loss_scale
        return torch.where(changed.isfinite(), changed, self.loss / loss_scale)


class _NotedOutput:
    """A tensor that a forward returned: the gradient that it gets, and their product."""

    def __init__(self, y: Tensor) -> None:
        self.grad: Tensor | None = None
        self.product = y.new_full((), math.nan, dtype=torch.float64)
        self._y, self._version = y.detach(), y._version

    def take(self, grad: Tensor) -> None:
        """Note the output's gradient; the output itself may have become that gradient, in place."""
        if self._y._version == self._version:
            self.product = _dot(self._y, grad)
        del self._y
        self.grad = grad.detach()


class _Call(NamedTuple):
    """A forward of the model: what it takes to run it again, and its outputs that have a gradient."""

    arguments: Any
    random_states: list[Tensor]
    autocast: Any  # a context manager
    outputs: list[_NotedOutput]


_StepAndTwin = tuple[Tensor | None, Tensor | None]  # a weight's gradient of the step, and of the twin


class Twin:
    """Notes a recorded step's forwards, and runs them again before the optimizer's update.

    Args:
        model: whose forwards are noted; DistributedDataParallel and torch.compile around it are left out.
        optimizer: before whose update the twin runs.
        ranks: that train together.
    """

    def __init__(self, model: nn.Module, optimizer: Any, ranks: Ranks) -> None:
        self.reason = ""  # why there is no twin
        self._comparison: Comparison | None = None
        self._model, self._wrapped, self._ranks = unwrapped(model), model, ranks
        self._layers: Sequence[RecordedLayer] = ()
        self._calls: list[_Call] = []
        self._left: list[Tensor] | None = None  # squares of the norms of gradients from before the first backward
        self._of_forward: list[tuple[Any, list[Tensor], Any]] = []
        self._hooks: list[Any] = []
        self._are_replicated: list[bool] | None = None  # whether all ranks have a layer's gradient, found once
        self._optimizer = hooked = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the optimizer
        if not isinstance(hooked, torch.optim.Optimizer):
            self.reason = NO_OPTIMIZER
        elif any(hooks_of(p)[1] for p in model.parameters()):
            self.reason = "hooks take gradients as backward makes them, such as an optimizer's update in backward"
        else:
            self._hooks_of_optimizer = [hooked.register_step_pre_hook(lambda *_: self._before_update())]

    def begin(self, layers: Sequence[RecordedLayer]) -> None:
        """Note the forwards of a recorded step, from now on."""
        self.end()
        if not self.reason:
            self._layers = layers
            before = self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            self._hooks = [before, self._model.register_forward_hook(self._after_forward)]

    def take(self) -> Comparison | None:
        """End a step; return what its twin found, or None where none ran."""
        self.end()
        comparison, self._comparison = self._comparison, None
        return comparison

    def end(self) -> None:
        """Note no more forwards, and forget those that were noted."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._calls, self._of_forward, self._layers, self._left = [], [], [], (), None

    def close(self) -> None:
        self.end()
        for hook in getattr(self, "_hooks_of_optimizer", ()):
            hook.remove()

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and model.training):
            return
        copies = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
        self._of_forward.append((copies, _random_states(model), _autocast(_device_of(model).type)))

    def _after_forward(self, model: nn.Module, args: Any, result: Any) -> Any:
        if torch.compiler.is_compiling() or not self._of_forward:
            return None
        outputs: list[_NotedOutput] = []
        self._calls.append(_Call(*self._of_forward.pop(), outputs))

        def noted(y: Any) -> Any:
            if not isinstance(y, Tensor) or not y.requires_grad:
                return y
            outputs.append(output := _NotedOutput(y))
            y = y.view_as(y)  # one output may be computed from another: the view's gradient is of outside alone
            y.register_hook(functools.partial(self._backward_begins, output))
            return y

        return pytree.tree_map(noted, result)

    def _backward_begins(self, output: _NotedOutput, grad: Tensor) -> None:
        if self._left is None:
            gradients = (module.weight_parameter.grad for module, _ in self._layers)
            zero = torch.zeros((), dtype=torch.float64, device=_device_of(self._model))
            self._left = [zero if g is None else _dot(local := on_this_rank(g), local) for g in gradients]
        output.take(grad)

    def _before_update(self) -> None:
        calls, layers, left = self._calls, self._layers, self._left
        self.end()
        if not calls or torch.compiler.is_compiling():
            return
        try:
            self._comparison = self._compare(calls, layers, left)
        except Exception as error:  # the training goes on
            self.reason = f"the model's forward or backward failed in high precision: {type(error).__name__}: {error}"

    def _compare(
        self, calls: Sequence[_Call], layers: Sequence[RecordedLayer], left: Sequence[Tensor] | None
    ) -> Comparison:
        parameters = [module.weight_parameter for module, _ in layers]
        with _without_trace(self._model) as gradients, using(self._model, recipes.high_precision()):
            changes, losses = zip(*(self._run(call) for call in calls), strict=True)
            pairs = [(gradients.get(p), p.grad) for p in parameters]
            products = torch.stack([*map(self._products, pairs, self._replicated(pairs))])
        change, loss = torch.stack(changes).sum(), torch.stack(losses).sum()
        products = self._ranks.sum(products)
        squares = torch.zeros_like(products[:, 1]) if left is None else self._ranks.sum(torch.stack([*left]))
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        left_of_trained = torch.stack([squares[at] * (id(p) in trained) for at, p in enumerate(parameters)]).sum()
        share = torch.where(left_of_trained == 0, 0.0, (left_of_trained / products[:, 1].sum()).sqrt())
        products = torch.where(squares.unsqueeze(1) == 0, products, 0.0)
        return Comparison(products, self._ranks.mean(change), self._ranks.mean(loss), share)

    def _run(self, call: _Call) -> tuple[Tensor, Tensor]:
        """Run a forward and its backward again; return (the change of its loss, its loss)."""
        _set_random_states(self._model, call.random_states)
        args, kwargs = call.arguments
        with torch.enable_grad(), call.autocast:
            result = self._model(*args, **kwargs)
        tensors = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor) and y.requires_grad]
        pairs = [(y, o.grad, o.product) for y, o in zip(tensors, call.outputs, strict=True) if o.grad is not None]
        zero = torch.zeros((), dtype=torch.float64, device=_device_of(self._model))
        if pairs:
            torch.autograd.backward([y for y, *_ in pairs], [grad for _, grad, _ in pairs])
        losses = [_dot(y.detach(), grad) for y, grad, _ in pairs]
        change = sum((loss - product for loss, (*_, product) in zip(losses, pairs, strict=True)), zero)
        are_numbers = all(y.numel() == 1 for y, *_ in pairs)
        return change, sum(losses, zero) if are_numbers else zero + math.nan

    def _replicated(self, pairs: Sequence[_StepAndTwin]) -> list[bool]:
        """Return whether all ranks have the same gradient of a weight, as under DDP, found once: it is a mean then."""
        if self._ranks.size == 1:
            return [False] * len(pairs)
        if self._are_replicated is None or len(self._are_replicated) != len(pairs):
            zero = torch.zeros((), dtype=torch.float64, device=_device_of(self._model))
            sizes = torch.stack([zero if grad is None else _dot(g := on_this_rank(grad), g) for grad, _ in pairs])
            largest, least = self._ranks.largest(sizes), -self._ranks.largest(-sizes)
            self._are_replicated = [bool(each) for each in ((largest == least) & (largest > 0)).tolist()]
        return self._are_replicated

    def _products(self, pair: _StepAndTwin, is_replicated: bool) -> Tensor:
        """Return <g, t>, <g, g> and <t, t> of a weight's gradients, float64 [3]."""
        grad, twin = pair
        if grad is None or twin is None:
            return torch.zeros(3, dtype=torch.float64, device=_device_of(self._model))
        g, t = on_this_rank(grad).float(), on_this_rank(twin).float()
        t = self._ranks.mean(t) if is_replicated else t
        return torch.stack([_dot(g, t), _dot(g, g), _dot(t, t)])


@contextlib.contextmanager
def _without_trace(model: nn.Module) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Run a block whose gradients, buffers and random numbers are not seen after it; yield the gradients from before.

    A model that is compiled runs in eager there.
    """
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = _random_states(model)
    try:
        for parameter in gradients:
            parameter.grad = None
        with torch.compiler.set_stance("force_eager"):
            yield gradients
    finally:
        for parameter in model.parameters():
            parameter.grad = gradients.get(parameter)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        _set_random_states(model, states)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _autocast(kind: str) -> Any:
    """Return a context manager of autocast as it is now on a kind of device."""
    if not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype, enabled, torch.is_autocast_cache_enabled())


def _random_states(model: nn.Module) -> list[Tensor]:
    """Return the states of the CPU's generator and the device's."""
    device = _device_of(model)
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else ())]


def _set_random_states(model: nn.Module, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], _device_of(model))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).sum() if x.numel() < 1 << 16 else (x.float() * y.float()).sum(dtype=torch.float64)
