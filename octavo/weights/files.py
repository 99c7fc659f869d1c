"""State dicts of weights that live in FP8: which tensors they hold, and how every kind of module loads them.

In a state_dict such a weight is ``weight``, the bytes of the codes as uint8 [N, 1, K], of experts [E, N, 1, K], beside
``weight_scale_inv``, of E8M0 the bytes too; a parameter of another name has that in place of ``weight``. The dimension
of 1 is for readers who know nothing of codes: a shape that is not the weight's is an error everywhere, with
strict=False, in from_pretrained and in copy_ too, where codes [N, K] would be taken for values. Bytes are what every
backend of torch.distributed sends. Either kind of module loads either kind of file, and float8 codes [N, K], as
fine-grained FP8 checkpoints have them under the same keys.

Of a sharded weight ``weight`` is a DTensor of the bytes; ``weight_scale_inv`` is plain and the same on every rank, or a
DTensor of the scales of blocks or experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.granularity import Granularity
from octavo.numerics import E8M0
from octavo.tensor.collectives import maximum_over_ranks
from octavo.weights.fsdp2 import like_sharded, on_this_rank, own_slices, whole, without_hooks
from octavo.weights.storable import granularity_of_scales
from octavo.weights.stored import StoredWeight, agree_on_scale, local_stored

SCALE_INV = "_scale_inv"  # after a weight's name


def save_as_tensors(destination: dict[str, Any], key: str, keep_vars: bool) -> None:
    """Make a state_dict's weight of this key plain; of a weight in FP8, codes and scales under two keys; in place."""
    weight: Any = destination.get(key)
    if (stored := local_stored(weight)) is None:
        if not keep_vars and weight is not None and type(weight) is not Tensor:
            destination[key] = without_hooks(weight)
        return
    destination[key], destination[f"{key}{SCALE_INV}"] = _saved_pair(weight, stored)


def _saved_pair(weight: Tensor, stored: StoredWeight) -> tuple[Tensor, Tensor]:
    """Return (codes, scale_inv) as a state_dict holds them; ``stored``: the weight itself, or this rank's shard."""
    agree_on_scale(weight)
    codes, scale_inv = stored.qdata.detach().view(torch.uint8).unsqueeze(-2), stored.scale_inv.detach()
    scale_inv = scale_inv.view(torch.uint8) if scale_inv.dtype == E8M0 else scale_inv
    if stored is not weight:
        shape = weight.shape
        codes = like_sharded(codes, weight, torch.Size((*shape[:-1], 1, shape[-1])), columns_dim=weight.ndim)
        if not stored.has_one_scale:
            scale_inv = like_sharded(scale_inv, weight, stored.scales_shape(shape))
    return codes, scale_inv


def whole_pair(weight: Tensor, shard: StoredWeight) -> tuple[Tensor, Tensor]:
    """Return (codes [N, K] or [E, N, K], scale_inv) of the whole weight that ``shard`` is part of; collective."""
    codes, scale_inv = map(whole, _saved_pair(weight, shard))
    return codes.squeeze(-2).view(shard.qdata.dtype), scale_inv.view(shard.scale_inv.dtype)


def load_stored(weight: Tensor | None, state_dict: dict[str, Any], key: str) -> None:
    """Replace codes and scale_inv in a state_dict by a tensor that the weight of this key can load; in place.

    weight               codes become                                     values become
    in high precision    their values                                     stay: torch copies them
    in FP8               a StoredWeight of these codes; of newly cast     stay: copying them casts them
                         ones where it may not have their scales
    a shard in FP8       the same, as a DTensor                           a DTensor of codes, cast here: collective

    A StoredWeight, somebody's parameter, stays too.
    """
    entry, scale_inv = state_dict.get(key), _scales_of(state_dict.pop(f"{key}{SCALE_INV}", None))
    if not isinstance(entry, Tensor):
        return  # torch says which key is missing or wrong
    stored = local_stored(weight)
    if weight is None or stored is None or stored is weight:
        state_dict[key] = _for_whole(weight, entry, scale_inv, key)
    else:
        state_dict[key] = _for_shard(weight, stored, entry, scale_inv, key)


def _for_whole(weight: Tensor | None, entry: Tensor, scale_inv: Any, key: str) -> Tensor:
    """Return what a weight that is no shard in FP8 can load of a state_dict's ``entry``."""
    local = on_this_rank(entry)
    if isinstance(local, StoredWeight) or (codes := _checked_codes(entry, scale_inv, key)) is None:
        return entry
    loaded = StoredWeight(codes, on_this_rank(scale_inv), torch.float32 if weight is None else weight.dtype)
    if not isinstance(weight, StoredWeight) or local is not entry:
        return like_sharded(loaded.dequantize(), entry, _shape_of(entry), columns_dim=codes.ndim - 1)
    return loaded if weight.may_have(scale_inv) else StoredWeight.cast(loaded.dequantize(), weight.granularity)


def _for_shard(weight: Tensor, shard: StoredWeight, entry: Tensor, scale_inv: Any, key: str) -> Tensor:
    """Return a DTensor that ``weight``, of which ``shard`` is this rank's, can load of an ``entry``; collective."""
    local = on_this_rank(entry)
    codes: Tensor | None
    if _has_codes_of_first_rank(entry, local, weight):
        codes = shard.qdata if (codes_in_entry := _codes_of(local)) is None else codes_in_entry
        scale_inv = _scales_of_first_rank(weight, shard, scale_inv, key).to(codes.device)
    elif isinstance(local, StoredWeight):
        return entry
    else:
        codes = _checked_codes(entry, scale_inv, key)
    shape = local.shape if codes is None else codes.shape
    if local is entry or shape != shard.shape:
        raise ValueError(
            f"a sharded weight {tuple(weight.shape)}, here {tuple(shard.shape)}, is loaded from one that is sharded "
            f"alike, not from a {type(entry).__name__} of {tuple(shape)}: use set_model_state_dict of "
            "torch.distributed.checkpoint.state_dict, or octavo.distributed.checkpoint.load_checkpoint"
        )
    values = local
    if codes is not None:
        scales = on_this_rank(scale_inv)
        if scales is scale_inv and scales.shape != (1, 1):  # a full state dict has the scales of all ranks' blocks
            scales = scales[own_slices(scales.shape, weight)]
        if scales.shape == shard.scale_inv.shape and shard.may_have(scales):
            loaded = StoredWeight(codes, scales, shard.dtype, shard.granularity, is_shard=True)
            return like_sharded(loaded, weight, weight.shape)
        values = StoredWeight(codes, scales, shard.dtype).dequantize()
    cast = StoredWeight.cast(values, shard.granularity, weight.requires_grad, weight)
    return like_sharded(cast, weight, weight.shape)


def _scales_of(entry: Any) -> Any:
    """Return a state_dict's scales in their dtype, E8M0 from its bytes; or None."""
    if entry is None or (local := on_this_rank(entry)).dtype != torch.uint8:
        return entry
    return local.view(E8M0) if local is entry else like_sharded(local.view(E8M0), entry, entry.shape)


def _has_codes_of_first_rank(entry: Tensor, local: Tensor, weight: Any) -> bool:
    """Whether torch has sent an entry's codes from the first rank: into the weight, or a DTensor of its shape.

    If torch wrote codes into the weight itself, its scales are NaN; else the entry is a uint8 DTensor of the weight's
    shape.
    """
    if local is on_this_rank(weight):
        return bool(local.scale_inv.isnan().any())  # type: ignore[attr-defined]
    return local is not entry and local.dtype == torch.uint8 and entry.shape == weight.shape


def _scales_of_first_rank(weight: Any, shard: StoredWeight, scale_inv: Tensor | None, key: str) -> Tensor:
    """Return the first rank's scales of codes that torch has sent without them (``broadcast_from_rank0``).

    Collective; only the first rank passes ``scale_inv``.
    """
    mesh, shape = weight.device_mesh, tuple(shard.scales_shape(weight.shape))
    scales = torch.zeros(shape, device=mesh.device_type, dtype=torch.float32)
    if scale_inv is not None and tuple(scale_inv.shape) == shape:
        is_its_own = scale_inv.data_ptr() == shard.scale_inv.data_ptr()  # as torch's state dict has it: NaN by now
        scales.copy_(shard.facts.replaced_scale if is_its_own and shard.facts.replaced_scale is not None else scale_inv)
    shard.facts.replaced_scale = None
    scales = maximum_over_ranks(scales, *mesh.get_all_groups())
    if not bool((scales > 0).all()):
        raise ValueError(f"{key} holds FP8 codes, but the first rank no {key}{SCALE_INV} of shape {shape}; give both")
    check_scales(scales, f"{key}{SCALE_INV}")
    return scales


def check_scales(scale_inv: Tensor, name: str) -> None:
    """Raise ValueError for scales that no cast can have written."""
    values = on_this_rank(scale_inv).float()
    if not values.is_meta and not bool((values.isfinite() & (values > 0)).all()):
        raise ValueError(f"{name} holds scales that are not finite and positive: the checkpoint is damaged")


def checked_granularity(shape: torch.Size, scale_inv: Tensor, name: str) -> Granularity:
    """Return which codes, of a tensor of this shape in a file, share one of the scales called ``name`` there.

    Raises:
        ValueError: for scales of another shape, or that no cast can have written.
    """
    if (granularity := granularity_of_scales(shape, scale_inv.shape)) is None:
        raise ValueError(f"{name} of shape {tuple(scale_inv.shape)} does not fit {tuple(shape)}")
    check_scales(scale_inv, name)
    return granularity


def _checked_codes(entry: Tensor, scale_inv: Tensor | None, key: str) -> Tensor | None:
    """Return this rank's codes in a state_dict's ``entry``; None if it holds values.

    Raises:
        ValueError: for codes without a scale_inv that fits them, or a scale_inv beside values.
    """
    if (codes := _codes_of(on_this_rank(entry))) is None and scale_inv is None:
        return None
    if codes is None:
        raise ValueError(
            f"{key} beside {key}{SCALE_INV} is {entry.dtype} {tuple(entry.shape)}, neither uint8 [N, 1, K] nor "
            "torch.float8_e4m3fn [N, K]"
        )
    if scale_inv is None:
        raise ValueError(f"{key} holds FP8 codes, but there is no {key}{SCALE_INV}; give both")
    checked_granularity(_shape_of(entry), scale_inv, f"{key}{SCALE_INV}")
    return codes


def _codes_of(entry: Tensor) -> Tensor | None:
    """Return the codes [N, K], of experts [E, N, K], in a state_dict's tensor, uint8 [..., 1, K] or float8; or None."""
    if entry.dtype == torch.uint8 and entry.ndim in (3, 4) and entry.shape[-2] == 1:
        return entry.squeeze(-2).view(torch.float8_e4m3fn)
    return entry if entry.dtype == torch.float8_e4m3fn and entry.ndim in (2, 3) else None


def _shape_of(entry: Tensor) -> torch.Size:
    """Return the shape of the weight whose codes a state_dict's tensor holds."""
    return entry.shape[:-2] + entry.shape[-1:] if entry.dtype == torch.uint8 else entry.shape
