"""Notes of a recorded step: the forwards of its model, and the gradients that backward gives to their outputs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.distributed.checkpoint import PlainModel
from octavo.inspect.forwards import Forward, map_tensors, nodes_of
from octavo.inspect.slope import dot
from octavo.nn.inputs import finds_shapes
from octavo.private import hooks_after_gradients, running_backward
from octavo.weights.fsdp2 import whole

_Context = Callable[[], contextlib.AbstractContextManager[None]]


class ModuleHook(NamedTuple):
    """A hook of a module, which does nothing in a copy or a pickle of the module."""

    call: Callable[..., None] = lambda *_: None

    def __call__(self, *arguments: Any) -> None:
        self.call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, ()


class NotedOutput:
    """A tensor that a forward returned, with the gradient that it gets from outside of the forward.

    An output may be computed from another one. Then autograd gives the other a sum: the addends that the forward's own
    nodes compute, and what comes from outside. Hooks note the sum and these addends, and the difference is ``grad``.
    The training gets the very tensor that the model returned, as hooks of autograd's nodes need no other one.

    Attributes:
        grad: the gradient from outside, summed over the step's backward passes; None before the first.
        product: the products of the tensor and ``grad``, summed likewise; nan if the tensor was overwritten.
    """

    def __init__(self, before_gradient: Callable[[], None]) -> None:
        self._before_gradient = before_gradient
        self.grad: Tensor | None = None
        self.product: Tensor | float = 0.0
        self._inside: list[tuple[int, Tensor]] = []  # (number of the backward pass, addend of a node of the forward)

    def watch(self, y: Tensor) -> None:
        """Note the gradients of ``y``, from now on."""
        self._y: Tensor | None = y.detach()
        self._version = y._version
        self._size, self._stride, self._offset = y.size(), y.stride(), y.storage_offset()
        index = y.output_nr
        handle = y.register_hook(self._note)
        hooks = handle.hooks_dict_ref()
        if len(hooks) > 1:
            # the forward has hooked y itself, and will again when the twin runs it: note the gradient before its hooks
            note_first = {handle.id: hooks.pop(handle.id)} | hooks  # autograd takes no notice of .move_to_end()
            hooks.clear()
            hooks.update(note_first)
        elif y.grad_fn is not None:
            # a node's hook runs after those of its tensors, so that it notes what the training's later hooks return
            handle.remove()
            y.grad_fn.register_prehook(lambda grads: self._note(grads[index]))

    def _add_inside(self, index: int, grads: Sequence[Tensor | None], _: object) -> None:
        """Note what a node of the forward adds to this tensor's gradient: its gradient of one of its inputs."""
        if (grad := grads[index]) is not None:
            self._inside.append((running_backward()[0], grad))

    @torch.no_grad()
    def _note(self, grad: Tensor | None) -> None:
        """Subtract the addends of the forward's nodes from this tensor's whole gradient, and note what is left."""
        number, keeps_graph = running_backward()
        inside = [addend for backward, addend in self._inside if backward == number]
        y = self._y if self._y is not None and self._y._version == self._version else None  # None: overwritten since
        self._inside = []
        if not keeps_graph:  # no backward pass follows
            self._y = None
        # autograd passes a lone addend on as the same object: then nothing came from outside the forward
        if grad is None or (len(inside) == 1 and inside[0] is grad):
            return
        outside = grad.detach() - functools.reduce(torch.add, inside) if inside else grad.detach()
        self._add(outside, y)

    def _add(self, grad: Tensor, y: Tensor | None) -> None:
        """Add a gradient of ``y``; None: it was overwritten meanwhile, perhaps by its gradient."""
        self._before_gradient()
        self.product = self.product + (math.nan if y is None else dot(whole(y), whole(grad)))
        self.grad = grad if self.grad is None else self.grad + grad  # a graph may have several backward passes


class _NotedBase(NotedOutput):
    """A tensor that a forward did not return itself, but views of it, which are outputs.

    If the training writes such a view in place, autograd gives its gradient to the base alone: each of ``views`` gets
    its part of that. As long as none is written the base notes nothing, and the views what they get.
    """

    def __init__(self, before_gradient: Callable[[], None]) -> None:
        super().__init__(before_gradient)
        self.views: list[NotedOutput] = []

    def _add(self, grad: Tensor, y: Tensor | None) -> None:
        """Add the views' parts of a gradient of ``y`` to them, if ``y`` is None: it was overwritten."""
        if y is None:
            unassigned = torch.empty_strided(self._size, self._stride, dtype=grad.dtype, device=grad.device).copy_(grad)
            for view in self.views:
                part = unassigned.as_strided(view._size, view._stride, view._offset - self._offset)
                view._add(part.clone(), None)
                part.zero_()  # views may have elements in common, which count once


def notes_of_outputs(result: Any, before_gradient: Callable[[], None]) -> list[NotedOutput]:
    """Return a note of each tensor of a forward's result that gets a gradient.

    Let a forward return y, z = f(y) and v, a view of a hidden h. The training computes a loss of the three.

        y    gets a sum: f's addend, which a hook of f's node notes, and the loss's gradient of y, its ``grad``
        z    gets the loss's gradient alone
        v    gets the loss's gradient alone, unless the training wrote v in place, as by v.mul_(2): then autograd gives
             it to h, whose note, a _NotedBase, adds it to v's

    ``before_gradient`` is called before a note adds a gradient.
    """
    tensors: list[Tensor] = []
    map_tensors(tensors.append, result)
    pairs = [(y, NotedOutput(before_gradient)) for y in tensors if gets_gradient(y)]
    outputs = dict(reversed(pairs))  # a tensor that is returned twice has one gradient: its first note gets it
    bases = defaultdict[Tensor, _NotedBase](lambda: _NotedBase(before_gradient))
    for y, output in outputs.items():
        base = y._base
        if type(base) is Tensor and base.grad_fn is not None and base not in outputs:
            if base.dtype == y.dtype and 0 not in y.stride():
                bases[base].views.append(output)
    notes: dict[Tensor, NotedOutput] = {**outputs, **bases}
    edges = {(y.grad_fn, y.output_nr): note for y, note in notes.items()}
    # of a lone output only the nodes between it and its base can add to a noted gradient
    ends = {base.grad_fn for base in bases} if len(outputs) == 1 else ()
    for node in nodes_of(outputs, ends) if len(edges) > 1 else ():
        for index, edge in enumerate(node.next_functions):
            if edge in edges:
                node.register_hook(partial(edges[edge]._add_inside, index))
    for y, note in notes.items():
        note.watch(y)
    return [output for _, output in pairs]


class Call(NamedTuple):
    """A forward of the model, and its outputs that need a gradient."""

    forward: Forward
    # how often each parameter had been written; includes FSDP2's gathered parameters, which the model has for a while
    versions: dict[nn.Parameter, int]
    outputs: list[NotedOutput]

    def weights_written_since(self, model: nn.Module) -> bool:
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
        self.model = PlainModel(wrapped).module
        self._wrapped = wrapped
        self._before_gradient, self._or_reason = before_gradient, or_reason
        self.calls: list[Call] = []
        self._running: list[Call | None] = []  # the calls of forwards that now run, as one may call another
        self._hooks = contextlib.ExitStack()

    def begin(self) -> None:
        """Note the forwards from now on."""
        before: Any = ModuleHook(self._before_forward)
        after: Any = ModuleHook(self._after_forward)
        self._hooks.enter_context(self._wrapped.register_forward_pre_hook(before, with_kwargs=True))
        self._hooks.enter_context(self._wrapped.register_forward_hook(after, always_call=True))

    def end(self) -> None:
        """Note no more forwards, and forget those that were noted."""
        self._hooks.close()
        self.calls = []
        self._running = []

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a forward needs to run again; None for a call within another, or without gradients."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or finds_shapes():
            return
        call = None
        if torch.is_grad_enabled() and hooks_after_gradients(()) is not None and not self._running:
            with self._or_reason():
                versions = {p: p._version for p in self.model.parameters()}
                call = Call(Forward.of(self.model, args, kwargs), versions, [])
        self._running.append(call)

    def _after_forward(self, _: nn.Module, args: Any, result: Any) -> None:
        """Note the call of a forward that ends, with its outputs."""
        if torch.compiler.is_compiling() or not self._running or (call := self._running.pop()) is None:
            return
        self.calls.append(call)
        with self._or_reason():
            call.outputs.extend(notes_of_outputs(result, self._before_gradient))


def gets_gradient(y: Tensor) -> bool:
    """Return whether backward gives an output of a model a gradient that is noted."""
    return y.requires_grad and not y.is_leaf
