"""Modules whose weight is a StoredWeight: how products read it, which recipes can, and what files hold of it.

In a state_dict it is ``weight``, the bytes of the codes as uint8 [N, 1, K], beside ``weight_scale_inv``. The dimension
between is for readers who know nothing of codes: a shape that is not the weight's is an error everywhere, with
strict=False, in from_pretrained and in copy_ too, where codes [N, K] would be taken for values. Bytes are what every
backend of torch.distributed sends. Either kind of module loads either kind of file, and float8 codes [N, K], as
fine-grained FP8 checkpoints have them under the same keys. Sharded ones are in nn/stored_shards.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.autograd.casts import Operands
from octavo.formats import E4M3
from octavo.granularity import Granularity, PerTensor, granularity_of
from octavo.kernels.layouts import needs_transposed_codes
from octavo.nn.gather import lay_out, with_padding
from octavo.nn.stored_shards import as_bytes, as_shard, codes_of, save_shard
from octavo.scaling.recipe import Recipe
from octavo.tensor.parameters import put_into
from octavo.tensor.sharded_weight import GatheredWeight, ShardHooks, like_sharded, on_this_rank
from octavo.tensor.stored_weight import GRANULARITIES, StoredWeight, dequantized, has_powers_of_two, stored_part

SCALE_INV = "weight_scale_inv"
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


def in_high_precision(weight: Tensor) -> Tensor:
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
    part = stored_part(weight)
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


def save_stored(weight: Tensor, part: StoredWeight, destination: dict[str, Any], prefix: str) -> None:
    """Put codes and scale_inv into a state_dict in place of the weight, of which this rank has ``part``."""
    keys = f"{prefix}weight", f"{prefix}{SCALE_INV}"
    if part is not weight:
        return save_shard(weight, part, destination, keys)
    destination[keys[0]], destination[keys[1]] = as_bytes(part.qdata.detach()), part.scale_inv.detach()


def load_stored(weight: Tensor | None, state_dict: dict[str, Any], prefix: str) -> None:
    """Make of codes and scale_inv in a state_dict what the module's weight can be loaded from; in place.

    Raises:
        ValueError: if they don't fit together, or codes come without their scale_inv.
    """
    given, scale_inv = state_dict.get(f"{prefix}weight"), state_dict.pop(f"{prefix}{SCALE_INV}", None)
    if not isinstance(given, Tensor):
        return  # torch says what is missing, or wrong
    part = stored_part(weight)
    sharded = weight is not None and part is not None and part is not weight
    local = on_this_rank(given)
    codes = codes_of(local)
    if codes is not None or scale_inv is not None:
        _check_pair(given, scale_inv, prefix)
    elif not sharded:
        return
    if sharded:
        assert weight is not None and part is not None
        state_dict[f"{prefix}weight"] = as_shard(weight, part, given, scale_inv)
        return
    assert codes is not None
    dtype = torch.float32 if weight is None else weight.dtype
    if local is not given:
        granularity = GRANULARITIES[scale_inv.shape != (1, 1)]
        values = StoredWeight(codes, on_this_rank(scale_inv), dtype, granularity).dequantize()
        state_dict[f"{prefix}weight"] = like_sharded(values, given, torch.Size((given.shape[0], given.shape[-1])))
        return
    stored = StoredWeight(codes, scale_inv, dtype)
    if part is not None and not has_powers_of_two(scale_inv):
        stored = StoredWeight.cast(stored.dequantize(), part.granularity)
    state_dict[f"{prefix}weight"] = stored if part is not None else stored.dequantize()


def _check_pair(given: Tensor, scale_inv: Tensor | None, prefix: str) -> None:
    """Raise ValueError unless these are codes [N, K] or their bytes, and their scale_inv."""
    if codes_of(on_this_rank(given)) is None:
        raise ValueError(
            f"{prefix}weight beside {prefix}{SCALE_INV} is {given.dtype} {tuple(given.shape)}, neither uint8 [N, 1, K] "
            "nor torch.float8_e4m3fn [N, K]"
        )
    if scale_inv is None:
        raise ValueError(f"{prefix}weight holds FP8 codes, but there is no {prefix}{SCALE_INV}; give both")
    shape = given.shape[0], given.shape[-1]
    if not any(granularity.scale_shape(shape) == tuple(scale_inv.shape) for granularity in GRANULARITIES):
        raise ValueError(f"{prefix}{SCALE_INV} of shape {tuple(scale_inv.shape)} does not fit {shape}")
