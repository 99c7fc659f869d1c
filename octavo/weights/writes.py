"""WeightWrites: whether anything but its optimizer has written a weight, by the counters that PyTorch has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.private import local_tensor
from octavo.step_count import OPTIMIZER_STEPS, version_of


class WeightWrites:
    """Notices writes to a layer's weight by anything but the optimizer that owns it. A copy begins anew."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] | None = None  # the weight's identity, counters and storage
        self._loaded: dict[int, int] = {}  # id of a weight not seen since its load -> its version then
        self.replaced = False  # whether another parameter took its place since, perhaps at the same address

    def since_last(self, weight: Tensor) -> bool:
        """Whether anything wrote the weight since the last call or since its load; new storage counts as a write.

        DeepSpeed ZeRO-3 gathers a weight into new storage for each forward: of such a weight it is this rank's part.
        """
        OPTIMIZER_STEPS.watch()
        local = weight.ds_tensor if hasattr(weight, "ds_tensor") else local_tensor(weight)
        last, replaced, self.replaced = self._seen, self.replaced, False
        storage = StorageWeakRef(local.untyped_storage())
        identity = id(weight), OPTIMIZER_STEPS.by_hand(weight)
        values = OPTIMIZER_STEPS.of(weight), storage.cdata, version_of(local)
        self._seen = identity, values, storage
        if last is None:
            version = version_of(weight)
            return self._loaded.pop(id(weight), version) != version
        by_step = last[1][0] != values[0]  # a step may change storage and version
        return replaced or last[0] != identity or not (by_step or last[1] == values)

    def were_loaded(self, weights: Sequence[Tensor | None]) -> None:
        """Note that these weights and their history were loaded together; forget the writes before the load."""
        self._seen, self.replaced = None, False
        self._loaded = {id(weight): version_of(weight) for weight in weights if weight is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightWrites, ()
