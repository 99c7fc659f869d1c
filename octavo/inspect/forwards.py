"""Forwards of a model that can run again, without a trace: their arguments, modes, random numbers and autocast."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.inspect.module_state import ModuleState
from octavo.inspect.record import np
from octavo.nn.recipe_module import RecipeModule
from octavo.private import hooks_after_gradients, pytree


class Autocast(NamedTuple):
    """The arguments of torch.autocast, as they were."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool

    @classmethod
    def now(cls, kind: str) -> Autocast:
        """Return autocast as it is now on a kind of device; where that has none, as "meta", the CPU's."""
        kind = kind if torch.amp.is_autocast_available(kind) else "cpu"
        how = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        return cls(kind, *how)


class RandomStates(NamedTuple):
    """The states of the generators of Python, NumPy, the CPU and the device of a model, None on a CPU."""

    python: Any
    numpy: Any
    cpu: Any
    device: Any = None

    @classmethod
    def of(cls, model: nn.Module) -> RandomStates:
        """Return the states as they are now."""
        device = device_of(model)
        of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), of_device)

    def put_back(self, model: nn.Module) -> None:
        """Give the generators these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device_of(model))


class Forward(NamedTuple):
    """A forward of a model: what it takes to run it again."""

    arguments: Any
    modes: Sequence[bool]  # whether each module is in training
    random_states: RandomStates
    autocast: Autocast
    delayed: list[Any]  # states of the FP8 modules, or None, before backward writes them; empty where none is put back
    state: ModuleState | None  # of the modules before it; None where they keep what they have

    @classmethod
    def of(cls, model: nn.Module, args: Any, kwargs: Any) -> Forward:
        """Return the forward that a model is about to run."""
        modes, autocast = [module.training for module in model.modules()], Autocast.now(device_of(model).type)
        delayed = [None if fp8.state is None else fp8.state.clone() for fp8 in _in_fp8(model)]
        arguments, state = map_tensors(copy_of, (args, kwargs)), ModuleState(model, before_forward=True)
        return cls(arguments, modes, RandomStates.of(model), autocast, delayed, state)

    @property
    def is_float16(self) -> bool:
        """Whether autocast casts to float16."""
        return self.autocast.enabled and self.autocast.dtype == torch.float16

    def again(self, model: nn.Module) -> list[Tensor]:
        """Run the forward again; return its outputs."""
        if self.state is not None:
            self.state.put_copies()
        self.random_states.put_back(model)
        for module, mode in zip(model.modules(), self.modes, strict=True):
            vars(module)["training"] = mode
        for fp8, state in zip(_in_fp8(model), self.delayed, strict=True) if self.delayed else ():
            if fp8.state is not None and state is not None:
                fp8.state = state.clone()
        args, kwargs = map_tensors(copy_of, self.arguments)
        outputs: list[Tensor] = []
        with torch.autocast(*self.autocast):
            map_tensors(outputs.append, model(*args, **kwargs))
        return outputs


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a nested value with each of its tensors changed; of a dataclass a copy."""

    def changed(x: Any) -> Any:
        if isinstance(x, Tensor):
            return change(x)
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return x
        copied = copy.copy(x)
        for field in dataclasses.fields(x):
            if hasattr(x, field.name):
                object.__setattr__(copied, field.name, map_tensors(change, getattr(x, field.name)))
        return copied

    return pytree.tree_map(changed, value)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next(model.parameters()).device


@contextlib.contextmanager
def without_trace(model: nn.Module) -> Iterator[dict[Tensor, Tensor]]:
    """Run a block that changes no gradient, state of modules or random number; yield the gradients from before it.

    Modules have copies of their buffers there, as backwards to come may read these. A model that is compiled runs in
    eager.
    """
    # leaves that modules have as attributes too: those in a reentrant checkpoint are in no graph that backward() reads
    attributes = [x for attributes in map(vars, model.modules()) for x in attributes.values()]
    leaves = [x for x in attributes if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
    state, random_states = ModuleState(model), RandomStates.of(model)
    with _gradients_aside([*model.parameters(), *leaves]) as gradients:
        try:
            state.put_copies()
            with torch.compiler.set_stance("force_eager"):
                yield gradients
        finally:
            state.put_back()
            random_states.put_back(model)


@contextlib.contextmanager
def _gradients_aside(leaves: Sequence[Tensor]) -> Iterator[dict[Tensor, Tensor]]:
    """Run a block in which leaves have no gradient and no hooks after it; yield the gradients that they have again."""
    gradients = {leaf: leaf.grad for leaf in leaves if leaf.grad is not None}
    hooks = [(held, dict(held)) for held in hooks_after_gradients(leaves) or ()]
    try:
        for leaf in gradients:
            leaf.grad = None
        for held, _ in hooks:  # what they do to a gradient as it comes they do to the step's alone
            held.clear()
        yield gradients
    finally:
        for held, copied in hooks:
            held.update(copied)
        for leaf in leaves:
            _set_grad(leaf, gradients.get(leaf))


def backward(model: nn.Module, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Run backward from outputs, which changes the gradients of the model's parameters alone, of no other leaf."""
    of_model, nodes = {id(p) for p in model.parameters()}, nodes_of(outputs)
    leaves = [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]
    with _gradients_aside([leaf for leaf in leaves if id(leaf) not in of_model]):
        torch.autograd.backward(outputs, grads)


def nodes_of(outputs: Iterable[Tensor], ends: Collection[Any] = ()) -> set[Any]:
    """Return the nodes of autograd that a backward from outputs may run, without some at which it ends."""
    nodes, seen = [y.grad_fn for y in outputs], set[Any]()
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen and node not in ends:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return seen


def _set_grad(leaf: Tensor, grad: Tensor | None) -> None:
    """Set a leaf's gradient, also of one that has no elements now, as what frees weights between passes leaves it."""
    if grad is None or leaf.shape == grad.shape:
        leaf.grad = grad
        return
    data = leaf.data
    leaf.data = grad.detach()
    leaf.grad = grad
    leaf.data = data


def _in_fp8(model: nn.Module) -> list[Any]:
    """Return what each FP8 module keeps from step to step, in the modules' order."""
    return [module.fp8 for _, module in RecipeModule.named_in(model)]


def copy_of(x: Tensor) -> Tensor:
    """Return a copy without x's graph, which requires a gradient if x does."""
    return x.detach().clone().requires_grad_(x.requires_grad)
