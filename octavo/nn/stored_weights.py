"""Modules whose weight is a StoredWeight: how products read it, and which recipes can."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.autograd.casts import Operands
from octavo.formats import E4M3
from octavo.granularity import Granularity, PerTensor, granularity_of
from octavo.kernels.layouts import needs_transposed_codes, padded
from octavo.scaling.recipe import Recipe
from octavo.tensor.parameters import put_into
from octavo.tensor.sharded_weight import GatheredWeight, ShardHooks, on_this_rank
from octavo.tensor.stored_weight import GRANULARITIES, StoredWeight, dequantized, local_stored

TENSOR_PARALLEL = "DTensors: convert before fully_shard; octavo does not compute under tensor parallelism yet"


def stored_operands(weight: StoredWeight, recipe: Recipe, transposed: bool) -> Operands:
    """The operands of a stored weight: its codes; on some devices also laid out transposed, if backward needs them.

    A weight that is used without gradients, and that no optimizer waits for, gives up what it was cast from.
    """
    if not torch.compiler.is_compiling() and weight.rest is not None and not weight.awaited:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            weight.rest = None
    if transposed or not needs_transposed_codes(weight.qdata.device):
        q, q_t = lay_out(weight.qdata, recipe)
        return Operands((q, weight.scale_inv), (q_t, weight.scale_inv.t()), None, None, False)
    return Operands((with_padding(weight.qdata, recipe), weight.scale_inv), None, None, None, False)


def lay_out(q: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Codes [N, K] as the products read them: as they lie and transposed, contractions padded as the device wants."""
    if not needs_transposed_codes(q.device):
        return q, q.t()
    return with_padding(q, recipe), with_padding(q.view(torch.uint8).t().contiguous().view(q.dtype), recipe)


def with_padding(q: Tensor, recipe: Recipe) -> Tensor:
    """Codes [N, K] with zeros behind the contraction, as a device wants it that needs transposed codes."""
    padding = padded(q.shape[1], 16 if recipe.pads else 1) - q.shape[1]
    return nn.functional.pad(q.view(torch.uint8), (0, padding)).view(q.dtype) if padding else q


def widened(weight: Tensor) -> Tensor:
    """A weight for a product in high precision; stored ones are dequantised, and gradients flow to them."""
    return dequantized(weight) if isinstance(weight, StoredWeight | GatheredWeight) else weight


def why_not_stored(recipe: Recipe) -> str | None:
    """Why weights can't be stored in FP8 under a recipe, or None."""
    casts = recipe.weight_casts
    if casts.as_is is None or casts.transposed is None:
        return "a product reads the weight in high precision"
    if not casts.once:
        return "its two layouts have different scales, so that one set of codes can't serve both"
    if casts.as_is.format != E4M3:
        return f"its weights are {casts.as_is.format}, and stored ones E4M3"
    if granularity_of(casts.as_is.tile) not in GRANULARITIES:
        return f"its weights are scaled {granularity_of(casts.as_is.tile)}, and stored ones per tensor or 128 x 128"
    return None


def why_unreadable(weight: Tensor) -> str | None:
    """What keeps FP8 products from reading a weight, by its class ("weights that are ..."); or None."""
    kind, local = type(weight), on_this_rank(weight)
    if not hasattr(kind, "__tensor_flatten__") or isinstance(weight, StoredWeight | GatheredWeight):
        return None
    if local is weight:
        return f"{kind.__module__}.{kind.__qualname__} (another library's, quantised perhaps)"
    if isinstance(local, ShardHooks):  # of fully_shard, which gathers it before products read it
        return None
    return TENSOR_PARALLEL


def check_recipe(recipe: Recipe, weight: Tensor | None) -> None:
    """Raise ValueError where a recipe can't read a weight as it is stored."""
    if weight is not None and not recipe.is_high_precision and (what := why_unreadable(weight)):
        raise ValueError(
            f"the recipe {recipe.name!r} can't read weights that are {what}. Take this layer out of FP8 first: "
            "octavo.restore(layer), or octavo.set_recipe(layer, octavo.recipes.high_precision())"
        )
    part = local_stored(weight)
    if part is not None and weight is not None:
        check_granularity(recipe, weight.shape, part.granularity)


def check_granularity(recipe: Recipe, shape: torch.Size, stored: Granularity) -> None:
    """Raise ValueError where a recipe can't read a weight that is stored so."""
    if recipe.is_high_precision:
        return
    if reason := why_not_stored(recipe):
        raise ValueError(f"the recipe {recipe.name!r} can't read weights that are stored in FP8: {reason}")
    wanted = stored_granularity(recipe, shape)
    if wanted.scale_shape(tuple(shape)) != stored.scale_shape(tuple(shape)):
        raise ValueError(
            f"the recipe {recipe.name!r} reads weights scaled {wanted}, but they are stored {stored}; "
            "octavo.convert(model, recipe, weight_storage='fp8') stores them anew"
        )


def stored_granularity(recipe: Recipe, shape: torch.Size) -> Granularity:
    """How a weight is stored that a recipe can read; PerTensor() where one block is all."""
    cast = recipe.weight_casts.as_is
    assert cast is not None
    granularity = granularity_of(cast.tile)
    return PerTensor() if granularity.scale_shape(tuple(shape)) == (1, 1) else granularity


def store_weight(module: nn.Module, recipe: Recipe) -> None:
    """Put a module's weight into FP8, unless it is stored so already; the parameter stays the same object."""
    weight = module.get_parameter("weight")
    granularity = stored_granularity(recipe, weight.shape)
    if isinstance(weight, StoredWeight):
        if weight.granularity != granularity:
            put_into(weight, StoredWeight.cast(weight.detach().dequantize(), granularity))
    else:
        put_into(weight, StoredWeight.cast(weight.detach(), granularity, keep_rest=weight.requires_grad))


def widen_weight(module: nn.Module) -> None:
    """Put a stored weight back into its high precision; the parameter stays the same object."""
    weight = module._parameters.get("weight")
    if isinstance(weight, StoredWeight):
        put_into(module.get_parameter("weight"), weight.detach().dequantize())
