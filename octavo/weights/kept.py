"""KeptWeights: FP8 weights cast on demand, in one launch, into lasting buffers; for compiled graphs and CUDA graphs.

Frozen: no new features until a GPU shows what they gain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo import kernels
from octavo.granularity import ALL, scale_shape
from octavo.kernels.layouts import contraction_multiple, is_small_block, needs_transposed_codes, padded
from octavo.scaling.delayed import State
from octavo.scaling.recipe import WEIGHT, Cast, Recipe
from octavo.step_count import OPTIMIZER_STEPS, version_of
from octavo.tensor.pair import Operands
from octavo.weights.plain import WeightOwner, notice_writes, weight_of


class KeptOperands:
    """The buffers into which KeptWeights casts a layer's weight, by the recipe at the time. A copied layer has none.

    ``lays``: whether codes are laid out twice; ``captured``: whether the last cast is only recorded in a CUDA graph, so
    that only captured forwards may read it. Under Delayed the operands have the amax, which backward commits.
    """

    def __init__(self, recipe: Recipe, cast: Cast, operands: Operands, lays: bool, amax: Tensor) -> None:
        OPTIMIZER_STEPS.watch()
        self.recipe, self.cast, self.lays, self.amax = recipe, cast, lays, amax
        self.pairs = operands._replace(amax=amax) if cast.is_delayed else operands

    def were_cast(self, weight: Tensor, captured: bool, state: State | None) -> None:
        """Note that the buffers were just cast from this weight, by this delayed state."""
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
    of_scale = None if state is None else (id(state.scale), version_of(state.scale))
    return weight.data_ptr(), weight.shape, weight.stride(), version_of(weight), OPTIMIZER_STEPS.count, of_scale


class KeptWeights:
    """The FP8 weights of a model, cast by ``cast()`` and at no other time.

    Any other layer casts its weight in each forward, as no counter shows every write. Kept weights are cast where the
    caller says: ``cast()`` once after each optimizer step, and every forward in training reads what it wrote, compiled
    or captured too. In a capture, ``skip`` is a flag on the device, so that one graph serves all micro-batches:

        kept, later = octavo.nn.KeptWeights(model), torch.zeros(1, dtype=torch.int32, device="cuda")
        with torch.cuda.graph(graph):
            kept.cast(skip=later)
            loss_of(model, batch).backward()
        for micro_batch in range(4):
            later.fill_(micro_batch > 0)
            graph.replay()

    Forwards without compilation or capture check: a layer whose weight may have changed since ``cast()``
    (a step, a write, another parameter, ``functional_call``), one in evaluation and one that took another recipe cast
    their own weights. A compiled or captured graph can't check, and computes with the codes that ``cast()`` wrote last.

    Under a Delayed recipe each backward pass moves the weight's scale. So the layers of later micro-batches, too, cast
    their own weights; compiled or captured they read the codes as ``cast()`` has scaled them.

    Args:
        model: a converted model. Kept are the weights that one cast serves (per tensor, or square blocks of powers of
            two up to 128); the others (rows, 1 x 32, experts) go on as before.

    Attributes:
        names: of the layers whose weights are kept.

    Raises:
        ValueError: where there is no weight to keep.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> kept = octavo.nn.KeptWeights(layer)
        >>> kept.cast()
        >>> layer(torch.randn(8, 64)).sum().backward()
        >>> kept.remove()
    """

    def __init__(self, model: nn.Module) -> None:
        layers_and_buffers: dict[str, tuple[Any, KeptOperands]] = {
            name: (layer, buffers)
            for name, layer in model.named_modules()
            if isinstance(layer, WeightOwner) and (buffers := _kept(layer)) is not None
        }
        if not layers_and_buffers:
            raise ValueError(
                "no layer's weight can be kept; convert the model with dynamic(), delayed() or blockwise() "
                "(weights that are stored in FP8 need no cast; those that FSDP or ZeRO-3 shard can't be kept)"
            )
        self.names = tuple(layers_and_buffers)
        self._groups: dict[tuple[Any, ...], list[Any]] = {}
        for layer, buffers in layers_and_buffers.values():
            key = layer.weight.dtype, layer.weight.device, buffers.cast, buffers.lays
            self._groups.setdefault(key, []).append((layer, buffers))

    @torch.no_grad()
    def cast(self, skip: Tensor | None = None) -> None:
        """Cast the weights as they are now; one launch (two under Dynamic) for all of one dtype, device and cast.

        Args:
            skip: one int32 element on the weights' device, or None; where it is not 0, all stays as it is.

        Raises:
            ValueError: if a weight is no longer on the device, or of the dtype, that it was on.
        """
        for (dtype, device, cast, lays), everything in self._groups.items():
            group = [(layer, buffers) for layer, buffers in everything if layer.recipe is buffers.recipe]
            if not group:
                continue
            layers = [layer for layer, _ in group]
            if any(layer.weight.dtype != dtype or layer.weight.device != device for layer in layers):
                raise ValueError("the model was moved or converted; make its KeptWeights anew")
            captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            # whether the cast will happen, and now
            is_certain = skip is None and not captured and not torch.compiler.is_compiling()
            for layer in layers if cast.is_delayed and is_certain else ():
                notice_writes(layer, layer.weight)
            as_is = [buffers.pairs.as_is for _, buffers in group]
            kernels.multi_tensor_cast(
                [layer.weight.detach().contiguous() for layer in layers],
                [qdata for qdata, _ in as_is],
                [buffers.pairs.transposed[0] for _, buffers in group] if lays else [],
                [scale_inv for _, scale_inv in as_is],
                [buffers.amax for _, buffers in group],
                [layer.delayed_scale for layer in layers] if cast.is_delayed else [],
                WEIGHT,
                cast.tile,
                cast.power_of_two,
                cast.margin,
                skip,
            )
            for layer, buffers in group:
                buffers.were_cast(layer.weight, captured, layer.fp8.state)
                layer.fp8.kept_operands = buffers  # each time: moving a layer removes them

    def remove(self) -> None:
        """Let every layer cast its own weight again."""
        for group in self._groups.values():
            for layer, _ in group:
                layer.fp8.kept_operands = None


def _kept(layer: Any) -> KeptOperands | None:
    """Return buffers for a layer's weight; None if it is no plain parameter or its two layouts need different casts."""
    if layer.weight_readers != {"weight": layer}:  # its parts read its weights
        return None
    recipe, weight = layer.recipe, weight_of(layer)
    casts = recipe.weight_casts
    cast = casts.as_is or casts.transposed
    if (
        type(weight) is not nn.Parameter
        or weight.ndim != 2
        or layer.stores_transposed
        or cast is None
        or recipe.packs
        or (casts.as_is and casts.transposed and not casts.once)
        or (cast.tile != (ALL, ALL) and not (cast.tile[0] == cast.tile[1] and is_small_block(cast.tile)))
    ):
        return None
    rows, cols = weight.shape
    pad = contraction_multiple(weight.device, recipe.pads)
    shape, lays = scale_shape(weight.shape, cast.tile), needs_transposed_codes(weight.device)
    new = weight.detach().new_zeros
    qdata, scale_inv = new(rows, padded(cols, pad), dtype=cast.format.dtype), new(shape, dtype=cast.scale_inv_dtype)
    transposed = new(cols, padded(rows, pad), dtype=cast.format.dtype) if lays else qdata.t()
    operands = Operands((qdata, scale_inv), (transposed, scale_inv.t()))
    return KeptOperands(recipe, cast, operands, lays, new(shape, dtype=torch.float32))
