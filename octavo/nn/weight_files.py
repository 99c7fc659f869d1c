"""Files of weights that live in FP8: what a state_dict holds of them, and how any kind of module loads it.

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

from octavo.granularity import PerTensor
from octavo.numerics import E8M0
from octavo.tensor.collectives import maximum_over_ranks
from octavo.tensor.fsdp2 import like_sharded, on_this_rank, own_slices, plain, whole
from octavo.tensor.stored_weight import StoredWeight, agree_on_scale, granularity_of_scales, local_stored

SCALE_INV = "_scale_inv"  # after a weight's name


def save_plain(destination: dict[str, Any], key: str, keep_vars: bool) -> None:
    """Have a state_dict hold plain tensors of the weight under this key, if it has it: of one in FP8 both."""
    weight: Any = destination.get(key)
    if (stored := local_stored(weight)) is None:
        if not keep_vars and weight is not None and type(weight) is not Tensor:
            destination[key] = plain(weight)
        return
    agree_on_scale(weight)
    codes, scale_inv = stored.qdata.detach().view(torch.uint8).unsqueeze(-2), stored.scale_inv.detach()
    scale_inv = scale_inv.view(torch.uint8) if scale_inv.dtype == E8M0 else scale_inv
    if stored is not weight:
        shape = weight.shape
        codes = like_sharded(codes, weight, torch.Size((*shape[:-1], 1, shape[-1])), of_columns=weight.ndim)
        if stored.granularity != PerTensor() or stored.ndim == 3:
            scale_inv = like_sharded(
                scale_inv, weight, torch.Size(stored.granularity.of_matrices(shape).scale_shape(shape))
            )
    destination[key], destination[f"{key}{SCALE_INV}"] = codes, scale_inv


def whole_pair(weight: Tensor, shard: StoredWeight) -> tuple[Tensor, Tensor]:
    """(codes [N, K] or [E, N, K], scale_inv) of a weight of which this rank has ``shard``; all ranks call it."""
    pair: dict[str, Any] = {"": weight}
    save_plain(pair, "", False)
    codes, scale_inv = map(whole, pair.values())
    return codes.squeeze(-2).view(shard.qdata.dtype), scale_inv.view(shard.scale_inv.dtype)


def load_stored(weight: Tensor | None, state_dict: dict[str, Any], key: str) -> None:
    """Make of codes and scale_inv in a state_dict what the weight of this key can be loaded from; in place."""
    given, scale_inv = state_dict.get(key), _scales_of(state_dict.pop(f"{key}{SCALE_INV}", None))
    if not isinstance(given, Tensor):
        return  # torch says what is missing, or wrong
    stored, local = local_stored(weight), on_this_rank(given)
    codes = _codes_of(local)
    if stored is not None and stored is not weight and _is_of_first_rank(given, local, weight):
        codes = stored.qdata if codes is None else codes
        scale_inv = _scales_of_first_rank(weight, stored, scale_inv, key).to(codes.device)
    elif isinstance(local, StoredWeight):
        return  # a parameter, as it is
    elif codes is not None or scale_inv is not None:
        _check_pair(given, codes, scale_inv, key)
    if weight is not None and stored is not None and stored is not weight:
        state_dict[key] = _as_shard(weight, stored, given, codes, scale_inv)
    elif codes is not None:
        dtype = torch.float32 if weight is None else weight.dtype
        pair = StoredWeight(codes, on_this_rank(scale_inv), dtype).pair()
        if local is not given:
            state_dict[key] = like_sharded(
                pair.dequantize(), given, _shape_of(given), of_columns=len(_shape_of(given)) - 1
            )
        elif stored is None:
            state_dict[key] = pair.dequantize()
        elif stored.may_have(scale_inv):
            state_dict[key] = StoredWeight(codes, scale_inv, dtype)
        else:
            state_dict[key] = StoredWeight.cast(pair.dequantize(), stored.granularity)


def _scales_of(given: Any) -> Any:
    """A state_dict's scales, or None; of E8M0 it has the bytes."""
    if given is None or (local := on_this_rank(given)).dtype != torch.uint8:
        return given
    return local.view(E8M0) if local is given else like_sharded(local.view(E8M0), given, given.shape)


def _is_of_first_rank(given: Tensor, local: Tensor, weight: Any) -> bool:
    """Whether these are codes that torch has sent from the first rank: written, or of a DTensor with weight's shape."""
    if local is on_this_rank(weight):
        return bool(local.scale_inv.isnan().any())  # type: ignore[attr-defined]
    return local is not given and local.dtype == torch.uint8 and given.shape == weight.shape


def _scales_of_first_rank(weight: Any, shard: StoredWeight, given: Tensor | None, key: str) -> Tensor:
    """The scales of codes that torch has sent from the first rank (``broadcast_from_rank0``), without these.

    All ranks call it; the first alone is given them.
    """
    mesh, shape = weight.device_mesh, shard.granularity.of_matrices(weight.shape).scale_shape(weight.shape)
    found = torch.zeros(shape, device=mesh.device_type, dtype=torch.float32)
    if given is not None and tuple(given.shape) == shape:
        is_its_own = given.data_ptr() == shard.scale_inv.data_ptr()  # as torch's state dict has it: NaN by now
        found.copy_(shard.known.replaced_scale if is_its_own and shard.known.replaced_scale is not None else given)
    shard.known.replaced_scale = None
    found = maximum_over_ranks(found, *mesh.get_all_groups())
    if not bool((found > 0).all()):
        raise ValueError(f"{key} holds FP8 codes, but the first rank no {key}{SCALE_INV} of shape {shape}; give both")
    check_scales(found, f"{key}{SCALE_INV}")
    return found


def check_scales(scale_inv: Tensor, name: str) -> None:
    """Raise ValueError for scales that no cast can have given."""
    values = scale_inv.float()
    if not values.is_meta and not bool((values.isfinite() & (values > 0)).all()):
        raise ValueError(f"{name} holds scales that are not finite and positive: the checkpoint is damaged")


def _check_pair(given: Tensor, codes: Tensor | None, scale_inv: Tensor | None, key: str) -> None:
    """Raise ValueError unless there are codes in what is given, and a scale_inv that fits them."""
    if codes is None:
        raise ValueError(
            f"{key} beside {key}{SCALE_INV} is {given.dtype} {tuple(given.shape)}, neither uint8 [N, 1, K] nor "
            "torch.float8_e4m3fn [N, K]"
        )
    if scale_inv is None:
        raise ValueError(f"{key} holds FP8 codes, but there is no {key}{SCALE_INV}; give both")
    shape = _shape_of(given)
    if granularity_of_scales(shape, scale_inv.shape) is None:
        raise ValueError(f"{key}{SCALE_INV} of shape {tuple(scale_inv.shape)} does not fit {tuple(shape)}")
    check_scales(on_this_rank(scale_inv), f"{key}{SCALE_INV}")


def _codes_of(given: Tensor) -> Tensor | None:
    """The codes [N, K], of experts [E, N, K], in a state_dict's tensor: uint8 [..., 1, K], or float8; or None."""
    if given.dtype == torch.uint8 and given.ndim in (3, 4) and given.shape[-2] == 1:
        return given.squeeze(-2).view(torch.float8_e4m3fn)
    return given if given.dtype == torch.float8_e4m3fn and given.ndim in (2, 3) else None


def _shape_of(given: Tensor) -> torch.Size:
    """The shape of the weight whose codes a tensor holds."""
    return given.shape[:-2] + given.shape[-1:] if given.dtype == torch.uint8 else given.shape


def _as_shard(
    weight: Tensor, shard: StoredWeight, given: Tensor, codes: Tensor | None, scale_inv: Tensor | None
) -> Tensor:
    """A DTensor like ``weight``, which it can be loaded from. All ranks call it: values need one scale for all.

    This rank has ``shard`` of the weight, and of what is given ``codes``, or, where that is None, values.
    """
    local = on_this_rank(given) if codes is None else codes
    if on_this_rank(given) is given or local.shape != shard.shape:
        raise ValueError(
            f"a sharded weight {tuple(weight.shape)}, here {tuple(shard.shape)}, is loaded from one that is sharded "
            f"alike, not from a {type(given).__name__} of {tuple(local.shape)}: use set_model_state_dict of "
            "torch.distributed.checkpoint.state_dict, or octavo.distributed.checkpoint.load_checkpoint"
        )
    if scale_inv is not None:
        scales = on_this_rank(scale_inv)
        if scales is scale_inv and scales.shape != (1, 1):  # of a full state dict: those of all ranks' blocks
            scales = scales[own_slices(scales.shape, weight)]
        if scales.shape == shard.scale_inv.shape and shard.may_have(scales):
            kept = StoredWeight(local, scales, shard.dtype, shard.granularity, is_shard=True)
            return like_sharded(kept, weight, weight.shape)
        local = StoredWeight(local, scales, shard.dtype).dequantize()
    return like_sharded(StoredWeight.cast(local, shard.granularity, weight.requires_grad, weight), weight, weight.shape)
