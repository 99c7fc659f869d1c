"""WeightWrites: whether anything but its optimizer has written a weight, by the counters that PyTorch has."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.private import local_tensor
from octavo.step_count import OPTIMIZER_STEPS, version_of


class WeightWrites:
    """Notices writes to a layer's weight by anything but the optimizer that owns it. A copy begins anew."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] | None = None  # the weight's identity, counters and storage
        self._loaded: tuple[int, int] | None = None  # id of a weight not seen since its load, its version then
        self.replaced = False  # whether another parameter took its place since, perhaps at the same address

    def since_last(self, weight: Tensor) -> bool:
        """Whether anything wrote the weight since the last call or since its load; new storage counts as a write.

        DeepSpeed ZeRO-3 gathers a weight into new storage for each forward: of such a weight it is this rank's part.
        """
        last, replaced, self.replaced = self._seen, self.replaced, False
        if last is None:
            OPTIMIZER_STEPS.watch()
        local = weight.ds_tensor if hasattr(weight, "ds_tensor") else local_tensor(weight)
        writes = OPTIMIZER_STEPS.writes_to(weight)
        storage = StorageWeakRef(local.untyped_storage())
        identity = id(weight), writes.by_hand
        values = writes.step, storage.cdata, version_of(local)
        self._seen = identity, values, storage
        if last is None:
            loaded, self._loaded = self._loaded, None
            return loaded is not None and loaded[0] == id(weight) and loaded[1] != version_of(weight)
        by_step = last[1][0] != values[0]  # a step may change storage and version
        return replaced or last[0] != identity or not (by_step or last[1] == values)

    def were_loaded(self, weight: Tensor | None) -> None:
        """Note that the weight and its history were loaded together; forget the writes before the load."""
        self._seen, self.replaced = None, False
        self._loaded = None if weight is None else (id(weight), version_of(weight))

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightWrites, ()
