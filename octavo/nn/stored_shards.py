"""Weights that live in FP8 under FSDP2: how a module gathers them, and what files hold of them.

What is sent is the codes as they are, 1 byte an element, and the scales of blocks. Per tensor every rank has the whole
weight's scale already (octavo.optim keeps it so), so no collective but the gather runs in forward and backward.

In a state_dict ``weight`` is a DTensor of the codes' bytes [N, 1, K]; ``weight_scale_inv`` is plain and the same on
every rank, or a DTensor of the blocks' scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.granularity import PerTensor
from octavo.nn.gather import lay_out, no_amax, note_use
from octavo.nn.gather_group import AS_STORED
from octavo.tensor.scaled_tensor import ScaledTensor
from octavo.tensor.sharded_weight import (
    After,
    GatheredWeight,
    Parts,
    like_sharded,
    on_this_rank,
    padded_rows,
    rows_on_each_rank,
)
from octavo.tensor.stored_parts import cast_part
from octavo.tensor.stored_weight import GRANULARITIES, StoredWeight, has_powers_of_two

if TYPE_CHECKING:
    from octavo.nn.recipe_module import RecipeModule


def before_stored_gather(
    module: RecipeModule, part: StoredWeight, mesh: Any, outer_size: torch.Size
) -> tuple[tuple[Tensor, ...], After]:
    """What FSDP2's first hook does of a weight that is stored in FP8: codes, and scales of blocks."""
    note_use(module, AS_STORED)
    codes = padded_rows(part.qdata.view(torch.uint8), rows_on_each_rank(outer_size[0], mesh.size()))
    scale_inv = part.scale_inv.clone()  # what belongs to these codes, whenever the next step writes
    if part.granularity == PerTensor() or mesh.size() == 1:  # on one rank FSDP2 hands on the first tensor only
        return (codes,), _take_codes(module, outer_size, part.qdata.dtype, scale_inv)
    return (codes, scale_inv), _take_codes(module, outer_size, part.qdata.dtype, None)


def _take_codes(module: RecipeModule, shape: torch.Size, dtype: torch.dtype, scale_inv: Tensor | None) -> After:
    recipe = module.recipe

    def after(outputs: tuple[Tensor, ...], wide: torch.dtype, out: Any) -> Any:
        q = outputs[0][: shape[0]].view(dtype)
        scales = outputs[1] if scale_inv is None else scale_inv
        laid, transposed = (q, q.t()) if recipe.is_high_precision else lay_out(q, recipe)
        parts = Parts(laid, scales, transposed, scales.t(), no_amax(module, q))
        if out is not None:
            return out.refill(parts)
        own = q.untyped_storage().data_ptr()
        inner = tuple(part for part in (laid, transposed) if part.untyped_storage().data_ptr() != own)
        return GatheredWeight(parts, shape, wide, recipe.weight_casts), inner

    return after


def as_bytes(codes: Tensor) -> Tensor:
    """Codes [N, K] as a state_dict holds them: uint8 [N, 1, K], over the same storage."""
    return codes.view(torch.uint8).unsqueeze(1)


def codes_of(given: Tensor) -> Tensor | None:
    """The codes [N, K] in a state_dict's tensor, or None where it holds none: uint8 [N, 1, K], or float8 [N, K]."""
    if given.dtype == torch.uint8 and given.ndim == 3 and given.shape[1] == 1:
        return given.squeeze(1).view(torch.float8_e4m3fn)
    return given if given.dtype == torch.float8_e4m3fn and given.ndim == 2 else None


def save_shard(weight: Tensor, part: StoredWeight, destination: dict[str, Any], keys: tuple[str, str]) -> None:
    """Put a sharded weight's codes and scale_inv into a state_dict.

    Args:
        weight: the DTensor.
        part: what this rank has of it.
        destination: the state_dict.
        keys: of the codes and of scale_inv.
    """
    shape = torch.Size((weight.shape[0], 1, weight.shape[1]))
    destination[keys[0]] = like_sharded(as_bytes(part.qdata.detach()), weight, shape)
    scale_inv = part.scale_inv.detach()
    if part.granularity != PerTensor():
        scale_inv = like_sharded(scale_inv, weight, torch.Size(part.granularity.scale_shape(tuple(weight.shape))))
    destination[keys[1]] = scale_inv


def as_shard(weight: Tensor, part: StoredWeight, given: Tensor, scale_inv: Tensor | None) -> Tensor:
    """What a sharded weight can be loaded from. All ranks call it: values need one scale for all.

    Args:
        weight: the DTensor.
        part: what this rank has of it.
        given: codes, as ``save_shard`` puts them, or high-precision values, sharded as ``weight`` is.
        scale_inv: of codes, as ``save_shard`` puts it; None for values.

    Returns:
        a DTensor like ``weight``.

    Raises:
        ValueError: if ``given`` is sharded otherwise.
    """
    local = on_this_rank(given)
    if (codes := codes_of(local)) is not None:
        local = codes
    if on_this_rank(given) is given or local.shape != part.shape:
        raise ValueError(
            f"a sharded weight {tuple(weight.shape)}, here {tuple(part.shape)}, is loaded from one that is sharded "
            f"alike, not from a {type(given).__name__} of {tuple(local.shape)}: use set_model_state_dict of "
            "torch.distributed.checkpoint.state_dict, or octavo.distributed.checkpoint.load_checkpoint"
        )
    if scale_inv is None:
        return like_sharded(cast_part(local, weight, part.granularity, part.dtype), weight, weight.shape)
    scales = on_this_rank(scale_inv)
    if scales is scale_inv and scales.shape != (1, 1):  # of a full state dict: those of all ranks' blocks
        mesh = weight.device_mesh  # type: ignore[attr-defined]
        scales = scales.chunk(mesh.size(mesh.ndim - 1))[mesh.get_local_rank(mesh.ndim - 1)]
    if scales.shape == part.scale_inv.shape and has_powers_of_two(scales):
        kept = StoredWeight(local, scales, part.dtype, part.granularity, is_part=True)
        return like_sharded(kept, weight, weight.shape)
    values = ScaledTensor(local, scales, GRANULARITIES[scales.shape != (1, 1)], part.dtype).dequantize()
    return like_sharded(cast_part(values, weight, part.granularity, part.dtype), weight, weight.shape)
