"""The state of a model's modules beside parameters: attributes, buffers, collections and generators, to be put back."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.inspect.record import np
from octavo.nn.recipe_module import RecipeModule

LARGEST_COPY = 1 << 26  # bytes of the tensors that are copied before each forward
_COLLECTIONS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_OF_TORCH = frozenset(vars(nn.Module()))  # names of attributes


class ModuleState:
    """The attributes and buffers of modules at a moment, the contents of their collections, and generators' states.

    Collections are looked into to any depth, also for modules that are in them. Tensors that require a gradient, and
    parameters, are no state: they stay what they are.

    Args:
        model: whose modules these are.
        before_forward: take only what its forward may read or write: no attributes of torch or of octavo's layers, and
            copies of the tensors, unless these have more than ``most_bytes``.
    """

    def __init__(self, model: nn.Module, before_forward: bool = False, most_bytes: float = LARGEST_COPY) -> None:
        self._collections: list[tuple[Any, Any, frozenset[str]]] = []  # (it, a shallow copy, names that it lacks)
        self._generators: list[tuple[Any, Any]] = []  # (a function that sets one's state, its state)
        self._before_forward, self._seen = before_forward, set[int]()
        self._add_module(model)
        tensors = {id(x): x for _, copied, _ in self._collections for x in _values(copied) if _is_state(x)}
        self._copies_tensors = not before_forward or sum(x.nbytes for x in tensors.values()) <= most_bytes
        if before_forward and self._copies_tensors:
            change = _copies()
            self._collections = [(one, _changed(copied, change), names) for one, copied, names in self._collections]

    def _add_module(self, module: nn.Module) -> None:
        """Note a module's attributes, and what is in them."""
        attributes, left = vars(module), _OF_TORCH if self._before_forward else frozenset[str]()
        if id(attributes) in self._seen:
            return
        self._seen.add(id(attributes))
        names = attributes.keys() - (_OF_TORCH - {"_parameters", "_buffers", "_modules"})
        if self._before_forward:
            names = {"_buffers", "_modules"} if isinstance(module, RecipeModule) else names - {"_parameters"}
        if not (self._before_forward and isinstance(module, RecipeModule)):
            copied = {name: value for name, value in attributes.items() if name not in left}
            self._collections.append((attributes, copied, left))
        for name in names:
            self._add(attributes[name])

    def _add(self, value: Any) -> None:
        """Note a value if it is a module, a collection or a generator, and what is in it."""
        if isinstance(value, nn.Module):
            self._add_module(value)
        elif type(value) in (*_COLLECTIONS, tuple):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                if type(value) is not tuple:
                    self._collections.append((value, copy.copy(value), frozenset()))
                for each in _values(value):
                    self._add(each)
        elif isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
            self._generators.append(_setter_and_state(value))

    def put_copies(self) -> None:
        """Give the modules this state with copies of its tensors, which they may write in place."""
        self._put(_copies() if self._copies_tensors else lambda x: x)

    def put_back(self) -> None:
        """Give the modules this state, of the very objects."""
        self._put(lambda x: x)

    def _put(self, change: Callable[[Any], Any]) -> None:
        """Give the modules and generators their noted contents, each value changed by a function."""
        for one, copied, names_left in self._collections:
            values = _changed(copied, change)
            if isinstance(one, dict):
                values = {name: value for name, value in one.items() if name in names_left} | values
            if not _are_same(one, values):
                one.clear()  # .update() of a Counter would add
                (one.update if isinstance(one, dict | set) else one.extend)(values)
        for set_state, state in self._generators:
            set_state(state)


def _values(collection: Any) -> Iterable[Any]:
    """Return the values of a collection."""
    return [*collection.values()] if isinstance(collection, dict) else [*collection]


def _is_state(x: Any) -> bool:
    """Whether a value is a tensor that a forward may write in place: it has memory, which was not freed."""
    if not isinstance(x, Tensor) or x.requires_grad or isinstance(x, nn.Parameter):
        return False
    try:
        return type(x) is not Tensor or x.untyped_storage().nbytes() >= x.element_size() * min(x.numel(), 1)
    except NotImplementedError:  # torch.func's, sparse
        return False


def _copies() -> Callable[[Any], Any]:
    """Return a function from tensors to copies, whose views of each other are views again; other values stay."""
    memo: dict[int, Any] = {}
    return lambda x: copy.deepcopy(x, memo) if _is_state(x) else x


def _changed(collection: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a collection with changed values."""
    if isinstance(collection, dict):
        return {key: change(value) for key, value in collection.items()}
    return [change(value) for value in collection]


def _are_same(present: Any, values: Any) -> bool:
    """Whether two collections have the same objects in the same order."""
    keys_agree = not isinstance(present, dict) or [*present] == [*values]
    return keys_agree and [*map(id, _values(present))] == [*map(id, _values(values))]


def _setter_and_state(generator: Any) -> tuple[Callable[[Any], None], Any]:
    """Return a function that sets the state of a generator of NumPy, Python or torch, and its state now."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state"), generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    return generator.set_state, generator.get_state()
