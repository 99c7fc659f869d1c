"""KeptWeights: FP8 weights cast on demand, in one launch, into lasting buffers; for compiled graphs and CUDA graphs.

Frozen: no new features until a GPU shows what they gain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.autograd.cast_together import MatrixToCast, cast_together
from octavo.granularity import scale_shape
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes, padded_size
from octavo.scaling.recipe import WEIGHT
from octavo.tensor.pair import Operands
from octavo.weights.operands import WeightOwner, forget_if_written, weight_of
from octavo.weights.shard_cast import is_square
from octavo.weights.writes import KeptOperands


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
        names: list[str] = []
        self._launches: dict[tuple[Any, ...], list[tuple[Any, KeptOperands]]] = {}  # the layers that each casts
        for name, layer in model.named_modules():
            if isinstance(layer, WeightOwner) and (buffers := _buffers_for(layer)) is not None:
                names.append(name)
                weight: Any = layer.weight
                self._launches.setdefault((weight.dtype, weight.device, buffers.cast), []).append((layer, buffers))
        if not names:
            raise ValueError(
                "no layer's weight can be kept; convert the model with dynamic(), delayed() or blockwise() "
                "(weights that are stored in FP8 need no cast; those that FSDP or ZeRO-3 shard can't be kept)"
            )
        self.names = tuple(names)

    @torch.no_grad()
    def cast(self, skip: Tensor | None = None) -> None:
        """Cast the weights as they are now; one launch (two under Dynamic) for all of one dtype, device and cast.

        Args:
            skip: one int32 element on the weights' device, or None; where it is not 0, all stays as it is.

        Raises:
            ValueError: if a weight is no longer on the device, or of the dtype, that it was on.
        """
        for (dtype, device, cast), layers_and_buffers in self._launches.items():
            launch = [(layer, buffers) for layer, buffers in layers_and_buffers if layer.recipe is buffers.recipe]
            if any(layer.weight.dtype != dtype or layer.weight.device != device for layer, _ in launch):
                raise ValueError("the model was moved or converted; make its KeptWeights anew")
            captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            # whether the cast will happen, and now
            is_certain = skip is None and not captured and not torch.compiler.is_compiling()
            for layer, _ in launch if cast.is_delayed and is_certain else ():
                forget_if_written(layer, layer.weight)
            cast_together([_matrix_of(layer, buffers) for layer, buffers in launch], cast, WEIGHT, skip)
            for layer, buffers in launch:
                buffers.were_cast(layer.weight, captured, layer.fp8.state)
                layer.fp8.kept_operands = buffers  # each time: moving a layer removes them

    def remove(self) -> None:
        """Let every layer cast its own weight again."""
        for layers_and_buffers in self._launches.values():
            for layer, _ in layers_and_buffers:
                layer.fp8.kept_operands = None


def _matrix_of(layer: Any, buffers: KeptOperands) -> MatrixToCast:
    """Return a layer's weight, and its buffers, for a launch."""
    (codes, scale_inv), (transposed_codes, _) = buffers.pairs.as_is, buffers.pairs.transposed  # type: ignore[misc]
    scale = layer.delayed_scale if buffers.cast.is_delayed else None
    transposed = transposed_codes if needs_transposed_codes(codes.device) else None  # else it is a view
    return MatrixToCast(layer.weight.detach().contiguous(), codes, scale_inv, scale, transposed, buffers.amax)


def _buffers_for(layer: Any) -> KeptOperands | None:
    """Return buffers for a layer's weight; None if it is no plain parameter or its two layouts need different casts."""
    if layer.weight_readers != {"weight": layer}:  # its parts read its weights
        return None
    recipe, weight = layer.recipe, weight_of(layer)
    if type(weight) is not nn.Parameter or weight.ndim != 2 or layer.stores_transposed or recipe.has_e2m1:
        return None
    as_is, second, coincide = recipe.weight_casts
    cast = as_is or second
    if cast is None or (as_is and second and not coincide) or not (cast.has_one_scale or is_square(cast.tile)):
        return None
    (rows, cols), new = weight.shape, weight.detach().new_zeros
    pad, dtype = contraction_multiple(weight.device, recipe.may_pad), cast.format.dtype
    qdata = new(rows, padded_size(cols, pad), dtype=dtype)
    transposed = new(cols, padded_size(rows, pad), dtype=dtype) if needs_transposed_codes(weight.device) else qdata.t()
    scales_shape = scale_shape(weight.shape, cast.tile)
    scale_inv, amax = new(scales_shape, dtype=cast.scale_inv_dtype), new(scales_shape, dtype=torch.float32)
    return KeptOperands(recipe, cast, Operands((qdata, scale_inv), (transposed, scale_inv.t())), amax)
