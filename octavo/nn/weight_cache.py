"""A layer's FP8 weight, kept while micro-batches share it.

Reuse is only right while nothing can have changed the weight. All of these must hold:

    the same storage and layout      p.data = t swaps them; the storage is held by a weak reference, so none can recur
    the same version                 in-place operations and load_state_dict move it
    no optimizer step since          fused optimizers and those that write p.data do not move the version; the step of
                                     any optimizer counts, since some write weights that they do not own, from masters
    gradients are being accumulated  weight.grad is not None: a first micro-batch always casts anew; frozen weights are
                                     cast once a step
    the same recipe                  setting one brings a cache of its own

A write through .data outside any optimizer moves none of them: octavo.nn.invalidate is for that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.autograd.casts import WEIGHT, State, cast_role
from octavo.scaling.recipe import Recipe
from octavo.step_count import OPTIMIZER_STEPS, version_of
from octavo.tensor.pair import Operands


class _Entry(NamedTuple):
    """Operands, and what tells that a weight is still the one that they were cast from."""

    operands: Operands
    storage: StorageWeakRef
    key: tuple[Any, ...]

    @staticmethod
    def of(weight: Tensor, operands: Operands) -> _Entry:
        """Operands just cast from ``weight``; used again, they are not rolled into the history again."""
        return _Entry(operands._replace(fresh=False), StorageWeakRef(weight.untyped_storage()), _key_of(weight))

    def is_of(self, weight: Tensor) -> bool:
        """Whether nothing can have changed the weight since; see above, besides gradients."""
        return self.storage.cdata == weight.untyped_storage()._cdata and self.key == _key_of(weight)


def _key_of(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.stride(), version_of(weight), OPTIMIZER_STEPS.count


class WeightCache:
    """One layer's cached operands under one recipe. A copy or pickle of it is empty."""

    def __init__(self) -> None:
        OPTIMIZER_STEPS.watch()
        self.clear()

    def clear(self) -> None:
        """Forget what is cached."""
        self._cached: _Entry | None = None
        self._kept: tuple[Tensor, _Entry, bool] | None = None  # the arguments of ``keep``
        self._scaled_for: tuple[Any, ...] | None = None  # the weight that a delayed scale is for
        self.replaced = False  # whether the layer was given another parameter since, perhaps at the same address

    def keep(self, weight: Tensor, operands: Operands, captured: bool) -> None:
        """Use these operands of the layer's weight until it may have changed: see KeptWeights.

        ``captured``: they are only recorded in a CUDA graph, and to be read by what is captured too.
        """
        self._kept = weight, _Entry.of(weight, operands), captured

    def written_since(self, weight: Tensor, local: Tensor) -> bool:
        """Whether the weight was written by anything but an optimizer that owns it since this was last asked.

        ``local``: this rank's rows of it, or itself; other storage is another weight.
        """
        before, replaced, self.replaced = self._scaled_for, self.replaced, False
        storage = StorageWeakRef(local.untyped_storage())
        identity = id(weight), OPTIMIZER_STEPS.by_hand(weight)
        place = OPTIMIZER_STEPS.of(weight), storage.cdata, version_of(local)
        self._scaled_for = identity, place, storage
        if before is None:
            return False
        by_step = before[1][0] != place[0]  # which may change storage and version
        return replaced or before[0] != identity or not (by_step or before[1] == place)

    def operands(
        self, weight_NK: Tensor, weight: Tensor, recipe: Recipe, transposed: bool, state: State | None, reusable: bool
    ) -> Operands:
        """The operands of a plain weight in training: those kept, those cached, or cast now.

        ``weight_NK`` is a view of ``weight``, what the layer computes with: its parameter, or what stands in its place.
        ``reusable``: whether that tells of writes. A gathered one (FSDP2) does not tell of those to shards.
        """
        # a captured graph runs again without asking whether the weight is the same, and so does a compiled one
        traced = torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        if self._kept is not None and self._kept[0] is weight:
            _, entry, captured = self._kept
            if traced or (not captured and entry.is_of(weight)):
                return entry.operands
        # Read without gradients too: a reentrant checkpoint's first pass must see what its second will. Not a weight
        # that a parametrization computes.
        caching = reusable and not traced and weight.is_leaf and not weight.is_inference()
        cached = self._cached
        if caching and cached is not None and (weight.grad is not None or not weight.requires_grad):
            if cached.is_of(weight) and not (transposed and cached.operands.transposed is None):
                return cached.operands
        operands = cast_role(weight_NK.detach(), recipe, WEIGHT, True, transposed, state)
        if caching and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._cached = _Entry.of(weight, operands)
        return operands

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
