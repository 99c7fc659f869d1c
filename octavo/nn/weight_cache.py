"""A layer's FP8 weight, kept while micro-batches share it.

Reuse is only right while nothing can have changed the weight. All of these must hold:

    the same storage and layout      p.data = t swaps them; the storage is held by a weak reference, so none can recur
    the same version                 in-place operations and load_state_dict move it
    no optimizer step since          fused optimizers and those that write p.data do not move the version; the step of
                                     any optimizer counts, since some write weights that they do not own, from masters
    gradients are being accumulated  weight.grad is not None: a first micro-batch always casts anew; frozen weights are
                                     cast once a step
    the same recipe

A write through .data outside any optimizer moves none of them: octavo.nn.invalidate is for that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.autograd.casts import WEIGHT, Operands, State, cast_role
from octavo.scaling.recipe import Recipe
from octavo.step_count import OPTIMIZER_STEPS, version_of


class _Seen(NamedTuple):
    """A weight as it was; ``step`` and ``by_hand``: see OPTIMIZER_STEPS."""

    id: int
    storage: StorageWeakRef
    version: int
    step: int
    by_hand: int


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
        self._kept: tuple[Recipe, Operands, Tensor, tuple[Any, ...] | None] | None = None
        self._scaled_for: _Seen | None = None  # the weight that a delayed scale is for
        self.replaced = False  # whether the layer was given another parameter since, perhaps at the same address

    def keep(self, recipe: Recipe, operands: Operands, weight: Tensor, captured: bool) -> None:
        """Use these under this recipe until the weight may have changed: see KeptWeights.

        Args:
            recipe: the recipe in force.
            operands: what ``weight`` was cast into.
            weight: the layer's parameter.
            captured: whether the cast was only recorded in a CUDA graph; then only what is captured too may use it.
        """
        self._kept = recipe, operands, weight, None if captured else self._full_key(weight, recipe)

    def kept(self, weight: Tensor, recipe: Recipe, traced: bool) -> Operands | None:
        """What ``keep`` was given, if it was this weight under this recipe, as it is now.

        Args:
            weight: what the layer computes with: its parameter, or what was put in its place.
            recipe: the recipe in force.
            traced: whether a graph is being compiled or captured, which runs again without asking.
        """
        if self._kept is None or self._kept[0] is not recipe or self._kept[2] is not weight:
            return None
        return self._kept[1] if traced or self._kept[3] == self._full_key(weight, recipe) else None

    def written_since(self, weight: Tensor, local: Tensor) -> bool:
        """Whether the weight was written by anything but an optimizer that owns it since this was last asked.

        Args:
            weight: the parameter.
            local: this rank's part of it, or itself; other storage is another weight.
        """
        before, replaced, self.replaced = self._scaled_for, self.replaced, False
        step, by_hand = OPTIMIZER_STEPS.of(weight), OPTIMIZER_STEPS.by_hand(weight)
        now = self._scaled_for = _Seen(
            id(weight), StorageWeakRef(local.untyped_storage()), version_of(local), step, by_hand
        )
        if before is None:
            return False
        if replaced or before.id != now.id or before.by_hand != by_hand:
            return True
        return before.step == step and (before.storage.cdata != now.storage.cdata or before.version != now.version)

    def operands(
        self, weight_NK: Tensor, weight: Tensor, recipe: Recipe, transposed: bool, state: State | None, reusable: bool
    ) -> Operands:
        """The operands of a plain weight in training: those kept, those cached, or cast now.

        Args:
            weight_NK: [N, K], a view of ``weight``.
            weight: what the layer computes with: its parameter, or what was put in its place.
            recipe: the recipe in force.
            transposed: whether backward will need the transposed operand.
            state: read by Delayed casts.
            reusable: whether the parameter tells of writes. A gathered one (FSDP2) does not tell of those to shards.
        """
        # a captured graph runs again without asking whether the weight is the same, and so does a compiled one
        traced = torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        kept = self.kept(weight, recipe, traced)
        if kept is not None:
            return kept
        # Read without gradients too: a reentrant checkpoint's first pass must see what its second will. Not a weight
        # that a parametrization computes.
        caching = reusable and not traced and weight.is_leaf and not weight.is_inference()
        cached = self.get(weight, recipe, transposed) if caching else None
        if cached is not None:
            return cached
        operands = cast_role(weight_NK.detach(), recipe, WEIGHT, True, transposed, state)
        if caching and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self.put(weight, recipe, operands)
        return operands

    def get(self, weight: Tensor, recipe: Recipe, transposed: bool) -> Operands | None:
        """The cached operands, no longer fresh, or None where the weight must be cast.

        Args:
            weight: the parameter itself, a leaf.
            recipe: the recipe in force.
            transposed: whether backward will need the transposed operand.
        """
        if self._operands is None or self._storage is None or (weight.grad is None and weight.requires_grad):
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
        return weight.data_ptr(), weight.stride(), version_of(weight), OPTIMIZER_STEPS.count, id(recipe)

    @classmethod
    def _full_key(cls, weight: Tensor, recipe: Recipe) -> tuple[Any, ...]:
        """With the storage, for a weight that is not let go while the key is held."""
        return weight.untyped_storage()._cdata, *cls._key_of(weight, recipe)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()


def invalidate(model: nn.Module) -> None:
    """Make every layer cast its weight anew at the next forward.

    Needed only after code of yours wrote weights through ``.data`` outside any torch.optim.Optimizer, of a frozen layer
    in training or while gradients are being accumulated; nothing else can leave a stale FP8 weight behind. Not needed
    under FSDP2 (there it costs a cast on every rank, so call it on all of them).

    Args:
        model: any module.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> _ = layer.weight.data.mul_(2)
        >>> octavo.nn.invalidate(layer)
    """
    for module in model.modules():
        cache = module.__dict__.get("_weight_cache")
        if isinstance(cache, WeightCache):
            cache.clear()
            # of a sharded weight; every rank does so, as they find scales together
            module.gather.generation += 1  # type: ignore[union-attr, operator]
