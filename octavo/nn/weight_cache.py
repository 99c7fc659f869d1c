"""A layer's FP8 weight, kept while micro-batches share it.

Reuse is only right while nothing can have changed the weight. All of these must hold:

    the same storage and layout      p.data = t swaps them; the storage is held by a weak reference, so none can recur
    the same version                 in-place operations and load_state_dict move it
    no optimizer step since          fused optimizers and those that write p.data do not move the version
    gradients are being accumulated  weight.grad is not None: a first micro-batch always casts anew
    the same recipe

A write through .data outside any optimizer moves none of them: octavo.invalidate is for that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.autograd.casts import Operands
from octavo.optimizer_steps import OPTIMIZER_STEPS
from octavo.scaling.recipe import Recipe


class WeightCache:
    """One layer's cached operands. A copy or pickle of it is empty."""

    def __init__(self) -> None:
        OPTIMIZER_STEPS.watch()
        self.clear()

    def clear(self) -> None:
        """Forget what is cached."""
        self._operands: Operands | None = None
        self._storage: StorageWeakRef | None = None
        self._key: tuple[Any, ...] = ()
        self._kept: tuple[Recipe, Operands] | None = None

    def keep(self, recipe: Recipe, operands: Operands) -> None:
        """Use these under this recipe, whatever the weight does, until cleared: see KeptWeights."""
        self._kept = recipe, operands

    def kept(self, recipe: Recipe) -> Operands | None:
        """What ``keep`` was given, if it was for this recipe."""
        return self._kept[1] if self._kept is not None and self._kept[0] is recipe else None

    def get(self, weight: Tensor, recipe: Recipe, transposed: bool) -> Operands | None:
        """The cached operands, no longer fresh, or None where the weight must be cast.

        Args:
            weight: the parameter itself, a leaf.
            recipe: the recipe in force.
            transposed: whether backward will need the transposed operand.
        """
        if self._operands is None or weight.grad is None or self._storage is None:
            return None
        if self._storage.cdata != weight.untyped_storage()._cdata or self._key != self._key_of(weight, recipe):
            return None
        if transposed and self._operands.transposed is None:
            return None
        return self._operands

    def put(self, weight: Tensor, recipe: Recipe, operands: Operands) -> None:
        """Keep operands just cast from ``weight``."""
        self._operands = operands._replace(fresh=False)  # a cached weight is not rolled into the history again
        self._storage = StorageWeakRef(weight.untyped_storage())
        self._key = self._key_of(weight, recipe)

    @staticmethod
    def _key_of(weight: Tensor, recipe: Recipe) -> tuple[Any, ...]:
        return weight.data_ptr(), weight.stride(), weight._version, OPTIMIZER_STEPS.count, id(recipe)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()


def invalidate(model: nn.Module) -> None:
    """Make every layer cast its weight anew at the next forward.

    Needed only after code of yours wrote weights through ``.data`` outside any torch.optim.Optimizer while gradients
    are being accumulated, or under FSDP2 at all (then call it on every rank); nothing else can leave a stale FP8 weight
    behind.

    Args:
        model: any module.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> _ = layer.weight.data.mul_(2)
        >>> octavo.invalidate(layer)
    """
    for module in model.modules():
        cache = module.__dict__.get("_weight_cache")
        if isinstance(cache, WeightCache):
            cache.clear()
            # of a sharded weight; every rank does so, as they find scales together
            module.gather.generation += 1  # type: ignore[union-attr, operator]
