"""Whether a weight was written, by the counters that PyTorch has.

WeightWrites    by anything but its optimizer, since the last cast in training: delayed scales know nothing of it
KeptOperands    by anything, since KeptWeights cast it: the codes serve no longer
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.private import local_tensor
from octavo.scaling.delayed import State
from octavo.scaling.recipe import Cast, Recipe
from octavo.step_count import OPTIMIZER_STEPS, SeenWrites, version_of
from octavo.tensor.pair import Operands


class _Sight(NamedTuple):
    """A weight at one call of ``since_last``: its identity, its counters and its storage."""

    weight_id: int
    by_hand: int  # writes by anything but its optimizer
    step: int  # the last one of its optimizer
    version: int  # of the storage's tensor
    storage: StorageWeakRef


class WeightWrites:
    """Notices writes to a layer's weight by anything but the optimizer that owns it. A copy begins anew."""

    def __init__(self) -> None:
        self._writes: SeenWrites | None = None  # to the weight of the last call; held here, they go on being counted
        self._last: _Sight | None = None  # that of the last call
        self._loaded: tuple[int, int] | None = None  # id of a weight not seen since its load, its version then
        self.replaced = False  # whether another parameter took its place since, perhaps at the same address

    def since_last(self, weight: Tensor) -> bool:
        """Whether anything wrote the weight since the last call or since its load; new storage counts as a write.

        the first of these that applies                   what is compared                            the answer
        first call (``_last`` is None) of a loaded one    its version, with ``_loaded``'s             if it differs
        first call of another, of a copy                  nothing                                     False
        it was ``replaced``, or has another id            nothing                                     True
        otherwise                                         the count of writes by hand (``_writes``)   True if it rose
                                                          its optimizer's last step                   False if it rose
                                                          version and storage, with ``_last``'s       if one differs

        DeepSpeed ZeRO-3 gathers a weight into new storage for each forward: of such a weight it is this rank's part.
        """
        last, replaced, self.replaced = self._last, self.replaced, False
        if last is None:
            OPTIMIZER_STEPS.watch()
        local = weight.ds_tensor if hasattr(weight, "ds_tensor") else local_tensor(weight)
        if (writes := self._writes) is None or writes.parameter_id != id(weight):
            writes = self._writes = OPTIMIZER_STEPS.writes_to(weight)
        writes.count_others(weight)
        storage = StorageWeakRef(local.untyped_storage())
        self._last = now = _Sight(id(weight), writes.by_hand, writes.last_step, version_of(local), storage)
        if last is None:
            loaded, self._loaded = self._loaded, None
            return loaded is not None and loaded[0] == id(weight) and loaded[1] != version_of(weight)
        if replaced or (last.weight_id, last.by_hand) != (now.weight_id, now.by_hand):
            return True
        # another storage or version is a write, unless its optimizer has made a step since, which may change both
        return last.step == now.step and (last.version, last.storage.cdata) != (now.version, storage.cdata)

    def were_loaded(self, weight: Tensor | None) -> None:
        """Note that the weight and its history were loaded together; forget the writes before the load."""
        self._last, self.replaced = None, False
        self._loaded = None if weight is None else (id(weight), version_of(weight))

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightWrites, ()


class KeptOperands:
    """The buffers into which KeptWeights casts a layer's weight, by the recipe at the time. A copied layer has none.

    ``amax``: the buffer for the weight's. Under Delayed it is one of the operands, which backward commits.
    """

    def __init__(self, recipe: Recipe, cast: Cast, operands: Operands, amax: Tensor) -> None:
        OPTIMIZER_STEPS.watch()
        self.recipe, self.cast, self.amax = recipe, cast, amax
        self.pairs = operands._replace(amax=amax) if cast.is_delayed else operands
        self._weight: Tensor | None = None  # the one that was cast last, and below its storage and counters then

    def were_cast(self, weight: Tensor, captured: bool, state: State | None) -> None:
        """Note that the buffers were just cast from this weight, by this delayed state.

        ``captured``: whether a CUDA graph has only recorded the cast, so that only captured forwards may read them.
        """
        self._weight, self._captured = weight, captured
        self._storage, self._key = StorageWeakRef(weight.untyped_storage()), _key_of(weight, state)

    def operands(self, weight: Tensor, state: State | None) -> Operands | None:
        """Return the operands; None if the weight or its delayed scale may have been written since the cast.

        A compiled or captured forward can't compare, and always gets the operands of this weight.
        """
        if self._weight is not weight:
            return None
        if torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.pairs
        is_unwritten = self._storage.cdata == weight.untyped_storage()._cdata and self._key == _key_of(weight, state)
        return self.pairs if is_unwritten and not self._captured else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _key_of(weight: Tensor, state: State | None) -> tuple[Any, ...]:
    """Return a key that changes with each write to the weight or its delayed scale that a counter shows."""
    scale_key = None if state is None else (id(state.scale), version_of(state.scale))
    return weight.data_ptr(), weight.shape, weight.stride(), version_of(weight), OPTIMIZER_STEPS.count, scale_key
