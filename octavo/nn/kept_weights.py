"""FP8 weights cast on demand, all in one launch, into buffers that stay: for compiled graphs and CUDA graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.autograd.casts import WEIGHT
from octavo.granularity import ALL, scale_shape
from octavo.kernels.layouts import contraction_multiple, is_small_block, needs_transposed_codes, padded
from octavo.nn.linear import Linear
from octavo.scaling.recipe import Cast, Delayed, Recipe
from octavo.tensor.pair import Operands


class _Kept(NamedTuple):
    """A layer and the buffers that its weight is cast into; ``transposed`` where codes are laid out twice."""

    layer: Linear
    cast: Cast
    recipe: Recipe
    qdata: Tensor
    transposed: Tensor | None
    scale_inv: Tensor
    amax: Tensor


class KeptWeights:
    """The FP8 weights of a model, cast when told to and at no other time.

    A layer casts its weight once an optimizer step, by what Python sees of it: the parameter's version, the
    optimizer's steps. A compiled graph and a captured CUDA graph run without Python, so there the weight is cast in
    every forward. Kept weights are cast where the caller says: ``cast()`` once after each optimizer step, and every
    forward in training reads what it wrote, compiled or captured. In a capture, ``skip`` is a flag on the device, so
    that one graph serves all micro-batches:

        kept, later = octavo.nn.KeptWeights(model), torch.zeros(1, dtype=torch.int32, device="cuda")
        with torch.cuda.graph(graph):
            kept.cast(skip=later)
            loss_of(model, batch).backward()
        for micro_batch in range(4):
            later.fill_(micro_batch > 0)
            graph.replay()

    What runs without compilation or capture looks for itself: a layer whose weight may have changed since ``cast()``
    (a step, a write, another parameter, ``functional_call``), one in evaluation and one that took another recipe cast
    their own weights. A compiled or captured graph can't look, and computes with what ``cast()`` wrote last.

    Under a Delayed recipe a cast also rolls the weight's history, as backward of a first micro-batch otherwise does.

    Args:
        model: a converted model. Kept are the weights that one cast serves (per tensor, or square blocks of powers of
            two up to 128); the others (rows, 1 x 32) go on as before.

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
        found = {name: _kept(module) for name, module in model.named_modules() if isinstance(module, Linear)}
        self._kept = {name: kept for name, kept in found.items() if kept is not None}
        if not self._kept:
            raise ValueError(
                "no layer's weight can be kept; convert the model with dynamic(), delayed() or blockwise() "
                "(weights that are stored in FP8 need no cast)"
            )
        self.names = tuple(self._kept)
        self._groups: dict[tuple[object, ...], list[_Kept]] = {}
        for kept in self._kept.values():
            weight, cast = kept.layer.weight, kept.cast
            self._groups.setdefault((weight.dtype, weight.device, cast, kept.transposed is None), []).append(kept)

    @torch.no_grad()
    def cast(self, skip: Tensor | None = None) -> None:
        """Cast the weights as they are now; one launch (two under Dynamic) for all of one dtype, device and cast.

        Args:
            skip: one int32 element on the weights' device, or None; where it is not 0, all stays as it is.

        Raises:
            ValueError: if a weight is no longer on the device, or of the dtype, that it was on.
        """
        for (dtype, device, *_), group in self._groups.items():
            if any(kept.layer.weight.dtype != dtype or kept.layer.weight.device != device for kept in group):
                raise ValueError("the model was moved or converted; make its KeptWeights anew")
            delayed = isinstance(group[0].cast.rule, Delayed)
            captured = group[0].layer.weight.is_cuda and torch.cuda.is_current_stream_capturing()
            known = skip is None and not captured and not torch.compiler.is_compiling()  # that this cast will happen
            for kept in group if delayed and known else ():
                kept.layer.notice_writes(kept.layer.weight, kept.layer.weight)
            kernels.multi_tensor_cast(
                [kept.layer.weight.detach() for kept in group],
                [kept.qdata for kept in group],
                [kept.transposed for kept in group if kept.transposed is not None],
                [kept.scale_inv for kept in group],
                [kept.amax for kept in group],
                [kept.layer.delayed_scale for kept in group] if delayed else [],
                WEIGHT,
                group[0].cast.tile,
                group[0].cast.power_of_two,
                group[0].cast.margin,
                skip,
            )
            for kept in group:
                if delayed:
                    _roll(kept, skip)
                # every time: what moves, converts or copies a layer makes its cache anew
                kept.layer._weight_cache.keep(kept.layer.weight, kept.recipe, _operands(kept), captured)

    def remove(self) -> None:
        """Let every layer cast its own weight again."""
        for kept in self._kept.values():
            cache = kept.layer.__dict__.get("_weight_cache")
            if cache is not None:
                cache.clear()


def _kept(layer: Linear) -> _Kept | None:
    """The buffers for a layer's weight, or None where it is no plain one or one cast does not serve both layouts."""
    recipe, weight = layer.recipe, layer.weight
    casts = recipe.weight_casts
    cast = casts.as_is or casts.transposed
    if type(weight) is not nn.Parameter or cast is None or (casts.as_is and casts.transposed and not casts.once):
        return None
    if cast.tile != (ALL, ALL) and not (cast.tile[0] == cast.tile[1] and is_small_block(cast.tile)):
        return None
    rows, cols = weight.shape
    pad = contraction_multiple(weight.device) if recipe.pads else 1
    new = weight.detach().new_zeros
    shape = scale_shape(weight.shape, cast.tile)
    lays = needs_transposed_codes(weight.device)
    return _Kept(
        layer,
        cast,
        recipe,
        new(rows, padded(cols, pad), dtype=cast.format.dtype),
        new(cols, padded(rows, pad), dtype=cast.format.dtype) if lays else None,
        new(shape, dtype=torch.float32),
        new(shape, dtype=torch.float32),
    )


def _operands(kept: _Kept) -> Operands:
    transposed = kept.qdata.t() if kept.transposed is None else kept.transposed
    return Operands((kept.qdata, kept.scale_inv), (transposed, kept.scale_inv.t()), None, None, fresh=False)


def _roll(kept: _Kept, skip: Tensor | None) -> None:
    """Roll the weight's history by the amax just found, unless skipped: then both states are written and one chosen."""
    scale, history = kept.layer.delayed_scale, kept.layer.delayed_amax_history
    assert scale is not None and history is not None
    state = scale, history
    if skip is None:
        kernels.delayed_update(*state, None, kept.amax, None, *kept.recipe.delayed_update)
        return
    rolled = [part.clone() for part in state]
    kernels.delayed_update(*rolled, None, kept.amax, None, *kept.recipe.delayed_update)
    for part, new in zip(state, rolled, strict=True):
        part.copy_(torch.where(skip.reshape(()) != 0, part, new))
