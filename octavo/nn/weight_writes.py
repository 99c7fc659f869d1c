"""What tells that a weight was written: for the delayed history of a layer's weight, and for KeptWeights.

A write through .data moves nothing that could be asked; ``invalidate`` is for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.autograd.casts import WEIGHT
from octavo.scaling.delayed import empty_state, state_of
from octavo.step_count import OPTIMIZER_STEPS, version_of
from octavo.tensor.pair import Operands


class KeptOperands:
    """A weight's operands in the buffers of KeptWeights. A copy or pickle of the layer has none.

    Args:
        weight: that they were cast from just now.
        operands: the buffers.
        captured: whether the cast is only recorded in a CUDA graph, and to be read by what is captured too.
    """

    def __init__(self, weight: Tensor, operands: Operands, captured: bool) -> None:
        OPTIMIZER_STEPS.watch()
        self._weight, self._operands, self._captured = weight, operands, captured
        self._storage, self._key = StorageWeakRef(weight.untyped_storage()), _key_of(weight)

    def of(self, weight: Tensor) -> Operands | None:
        """The operands, unless the weight may have been written since; what is compiled or captured can't ask."""
        if self._weight is not weight:
            return None
        if torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._operands
        same = self._storage.cdata == weight.untyped_storage()._cdata and self._key == _key_of(weight)
        return self._operands if same and not self._captured else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _key_of(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), version_of(weight), OPTIMIZER_STEPS.count


class WeightWrites:
    """Whether a layer's weight is written by anything but an optimizer that owns it. A copy begins anew."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] | None = None
        self.replaced = False  # whether the layer was given another parameter since, perhaps at the same address

    def since_last(self, weight: Tensor, local: Tensor) -> bool:
        """Whether it was written since this was last asked.

        ``local``: this rank's rows of it, or itself; other storage is another weight.
        """
        OPTIMIZER_STEPS.watch()
        before, replaced, self.replaced = self._seen, self.replaced, False
        storage = StorageWeakRef(local.untyped_storage())
        identity = id(weight), OPTIMIZER_STEPS.by_hand(weight)
        place = OPTIMIZER_STEPS.of(weight), storage.cdata, version_of(local)
        self._seen = identity, place, storage
        if before is None:
            return False
        by_step = before[1][0] != place[0]  # which may change storage and version
        return replaced or before[0] != identity or not (by_step or before[1] == place)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightWrites, ()


def invalidate(model: nn.Module) -> None:
    """Forget what belongs to weights that code of yours wrote through ``.data`` outside any torch.optim.Optimizer.

    Under a delayed recipe that is the history of a weight, whose scale a much larger one would saturate; and what
    KeptWeights cast, until their next ``cast()``. Nothing else of a weight is kept from one forward to the next. Under
    FSDP2 call it on all ranks.

    Args:
        model: any module.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(64, 64, recipe=octavo.recipes.delayed())
        >>> _ = layer.weight.data.mul_(20)
        >>> octavo.nn.invalidate(layer)
    """
    for module in model.modules():
        if isinstance(module.__dict__.get("weight_writes"), WeightWrites):
            module.__dict__["kept_operands"] = None
            empty_state(state_of(module), WEIGHT)
            module.gather.generation += 1  # type: ignore[union-attr, operator]
