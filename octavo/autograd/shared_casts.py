"""A tensor that several layers read is cast once: q, k and v share one pair of their input, gate and up another.

The pair is found by the tensor, not by any layer's name: the same object at the same version, cast the same way on the
same stream. An in-place write moves the version; one through ``.data`` does not, as autograd does not see it either. So
a shared pair is what casting again would give, bit for bit. Under a Delayed rule the layers' histories of the input
must be the same too: they are for as long as the layers have shared all their inputs (scaling/delayed.py).

A layer that reads a tensor again begins another forward, and casts anew. Pairs are held for the last few tensors of
each thread, and no longer than the tensor lives. In compiled graphs equal ops on one input are one node without this.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.private import FakeTensor, current_graph_task_id, current_raw_stream, tracing_state
from octavo.scaling.delayed import UNKNOWN_CAST, State, have_same_inputs
from octavo.scaling.recipe import Recipe
from octavo.step_count import version_of
from octavo.tensor.pair import Operands

MOST_HELD = 4  # tensors a thread: layers that share an input have few others between them
_numbers = itertools.count(UNKNOWN_CAST + 1)


class CastReader(NamedTuple):
    """The recipe, delayed state and dtype by which a layer reads its input, and the ends of groups of rows, if any."""

    recipe: Recipe
    state: State | None
    dtype: torch.dtype
    offsets: Tensor | None

    def agrees(self, other: CastReader) -> bool:
        """Whether a cast for the other reader is, bit for bit, one for this."""
        recipe, its = self.recipe, other.recipe
        if recipe is not its and (recipe.input_casts, recipe.may_pad) != (its.input_casts, its.may_pad):
            return False
        if self.dtype is not other.dtype or self.offsets is not other.offsets:
            return False
        if self.state is other.state or not any(cast and cast.is_delayed for cast in recipe.input_casts[:2]):
            return True
        assert self.state is not None and other.state is not None
        return recipe.delayed == its.delayed and have_same_inputs(self.state, other.state)

    def moment(self) -> tuple[int, ...]:
        """Return numbers that differ if a cast of the same tensor would read another delayed scale or other groups."""
        groups = 0 if self.offsets is None else version_of(self.offsets)
        return (groups,) if self.state is None else (groups, version_of(self.state.scale), current_graph_task_id())


class _SharedCast(NamedTuple):
    reader: CastReader
    moment: tuple[int, ...]
    transposed: bool
    operands: Operands
    number: int


class InputCasts:
    """The casts that layers have made in this forward of one tensor at one version, and which layers have read it."""

    __slots__ = ("casts", "readers", "reference", "version_and_stream")

    def __init__(self, reference: weakref.ref[Tensor], version_and_stream: tuple[int, Any]) -> None:
        self.reference, self.version_and_stream = reference, version_and_stream
        self.readers: set[int] = set()  # ids of layers
        self.casts: list[_SharedCast] = []

    def find(self, reader: CastReader, transposed: bool) -> tuple[Operands, int] | None:
        """Return (a cast that serves this reader, its number) or None; ``transposed``: whether grad_weight reads x."""
        for cast in self.casts:
            if (cast.transposed or not transposed) and reader.agrees(cast.reader):
                if cast.moment == cast.reader.moment():
                    return cast.operands, cast.number
        return None

    def add(self, reader: CastReader, transposed: bool, operands: Operands) -> int:
        """Keep a cast for other readers, and return its number, which no other has."""
        number = next(_numbers)
        self.casts.append(_SharedCast(reader, reader.moment(), transposed, operands, number))
        return number


_thread = threading.local()  # its ``held``: {id of a tensor: its InputCasts}, in the order of their last reads


def casts_to_share(x: Tensor, layer: object, is_view: bool = False) -> InputCasts | None:
    """Note that a layer reads x; return the casts of x that it shares with others, None where it casts for itself.

    That is in compiled graphs and in inference mode, whose tensors have no versions; in torch.jit.trace; and in a CUDA
    graph's capture for tensors that may be older than the capture. ``is_view``: whether x may be a view, new for each
    layer, of the tensor that they all read.
    """
    is_fake = type(x) is FakeTensor  # a forward without data shares casts as one with data would
    if torch.compiler.is_compiling() or not (is_fake or type(x) is Tensor) or x.is_inference() or tracing_state():
        return None
    if is_view:
        x = viewed(x)
    stream = None
    if x.is_cuda and not is_fake:
        if (capturing := torch.cuda.is_current_stream_capturing()) and x.grad_fn is None:
            return None
        stream = current_raw_stream(x.get_device()), capturing
    key, version_and_stream, held = id(x), (x._version, stream), vars(_thread).setdefault("held", {})
    x_casts: InputCasts | None = held.pop(key, None)
    is_same = x_casts is not None and x_casts.reference() is x and x_casts.version_and_stream == version_and_stream
    if x_casts is None or not is_same or id(layer) in x_casts.readers:
        x_casts = InputCasts(weakref.ref(x, lambda _: held.pop(key, None)), version_and_stream)
        if len(held) >= MOST_HELD:
            held.pop(next(iter(held), key), None)  # the tensor that was read longest ago
    x_casts.readers.add(id(layer))
    held[key] = x_casts  # behind all others
    return x_casts


def viewed(x: Tensor) -> Tensor:
    """Return the tensor of which x is a view of all elements in the same order, as DTensor.to_local() is; else x."""
    base = x._base
    if base is None or base.dtype != x.dtype or base.shape != x.shape or base.stride() != x.stride():
        return x
    return base if base.storage_offset() == x.storage_offset() else x
