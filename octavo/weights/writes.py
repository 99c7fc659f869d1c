"""WeightWrites: whether anything but its optimizer has written a weight, by the counters that PyTorch has."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.private import local_tensor
from octavo.step_count import OPTIMIZER_STEPS, SeenWrites, version_of


class _Sight(NamedTuple):
    """The identity, the counters and the storage of a weight when it was last asked about."""

    weight_id: int
    by_hand: int  # writes by anything but its optimizer
    step: int  # the last one of its optimizer
    version: int  # of the storage's tensor
    storage: StorageWeakRef


class WeightWrites:
    """Notices writes to a layer's weight by anything but the optimizer that owns it. A copy begins anew."""

    def __init__(self) -> None:
        self._writes: SeenWrites | None = None  # to the weight of the last call; held here, they go on being counted
        self._last: _Sight | None = None
        self._loaded: tuple[int, int] | None = None  # id of a weight not seen since its load, its version then
        self.replaced = False  # whether another parameter took its place since, perhaps at the same address

    def since_last(self, weight: Tensor) -> bool:
        """Whether anything wrote the weight since the last call or since its load; new storage counts as a write.

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
        self._last = now = _Sight(id(weight), writes.by_hand, writes.step, version_of(local), storage)
        if last is None:
            loaded, self._loaded = self._loaded, None
            return loaded is not None and loaded[0] == id(weight) and loaded[1] != version_of(weight)
        if replaced or (last.weight_id, last.by_hand) != (now.weight_id, now.by_hand):
            return True
        # a step may change storage and version
        return last.step == now.step and (last.version, last.storage.cdata) != (now.version, storage.cdata)

    def were_loaded(self, weight: Tensor | None) -> None:
        """Note that the weight and its history were loaded together; forget the writes before the load."""
        self._last, self.replaced = None, False
        self._loaded = None if weight is None else (id(weight), version_of(weight))

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightWrites, ()
