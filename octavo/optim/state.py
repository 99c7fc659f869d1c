"""An optimizer's state of a weight: how it begins, is sharded, described, loaded, converted and passed to kernels.

step                                 how many steps the weight has had, float32
exp_avg, exp_avg_sq;                 a moment in float32 or bf16, of the weight's shape; one in FP8 has in its place
SGD's and Muon's momentum_buffer     NAME_codes, uint8, and NAME_scale_inv, float32; by the last step's
                                     amax also NAME_amax (optim/moment.py)
master_rest                          what the master keeps besides the weight (optim/masters.py)
master_amax                          of a weight that lives in FP8: the amax from which its next scale comes
master_kind                          the master's kind, as several have equal names and dtypes
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.formats import E4M3, E4M4, E5M2, Format
from octavo.granularity import BLOCK, PerTensor
from octavo.kernels.reference.optimizer_state import MASTER_KINDS, Master, MomentTensors, pieces
from octavo.kernels.reference.optimizer_step import LARGEST_SQUARE, WeightUpdate
from octavo.optim.layout import (
    check_layout,
    is_fp8_experts,
    is_sharded_vector,
    like_param,
    place_of,
    ranks_share_blocks,
)
from octavo.optim.masters import MasterForm
from octavo.optim.moment import MOMENT_GRANULARITIES, Moment, as_matrix
from octavo.private import is_dtensor
from octavo.tensor.collectives import maximum_over_ranks
from octavo.tensor.stored_gradient import StoredGradient
from octavo.weights.fsdp2 import is_sharded, like_sharded, on_this_rank, own_slices
from octavo.weights.stored import StoredWeight, local_stored

WeightState = dict[str, Any]  # of one weight
_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E4M4)}


def data_of(weight: Tensor) -> Tensor:
    """Return the tensor that a step writes: the weight, or the codes of a stored one."""
    return weight.qdata if isinstance(weight, StoredWeight) else weight


def matrix_of(weight: Tensor) -> Tensor:
    """Return a weight, or a stored one's codes, as the contiguous [R, C] that kernels take; copied only if needed."""
    data = weight.qdata.view(torch.uint8) if isinstance(weight, StoredWeight) else weight.detach().contiguous()
    return as_matrix(data, is_fp8_experts(weight))


class Settings(NamedTuple):
    """An optimizer's settings for weights: its moments with their names, and the ``master`` argument."""

    moments: tuple[Moment, ...]
    names: tuple[str, ...]
    master: str | None

    def moments_by_name(self, param: Tensor) -> dict[str, Moment]:
        """Return a parameter's moments by name; where ranks share blocks, bf16 (a vector: float32) replaces codes."""
        moments = dict(zip(self.names, self.moments, strict=True))
        if ranks_share_blocks(param):
            for name, moment in moments.items():
                if isinstance(moment.format, Format):
                    moments[name] = Moment("fp32") if param.ndim < 2 else Moment("bf16", rounding=moment.rounding)
        return moments

    def only(self, names: Collection[str]) -> Settings:
        """Return these settings with the moments of these names alone."""
        moments = {name: moment for name, moment in zip(self.names, self.moments, strict=True) if name in names}
        return Settings(tuple(moments.values()), tuple(moments), self.master)

    def in_state(self, state: WeightState) -> Settings:
        """Return these settings without the moments that a state lacks, as SGD's before its group has a momentum."""
        return self.only({str(key).removesuffix("_codes") for key, value in state.items() if value is not None})


def check_weight(param: Tensor, settings: Settings, bounds_update: bool) -> None:
    """Raise ValueError for a weight that can't be updated; ``bounds_update``: whether steps bound its updates."""
    if local_stored(param) is not None and not bounds_update:
        raise ValueError(
            "a weight that is stored in FP8 is written with a scale that the largest update gives: use "
            "octavo.optim.AdamW or Adam, with clip_update on, or Muon for its matrices"
        )
    if param.is_complex() or param.is_sparse:
        raise ValueError("octavo's optimizers are for dense real weights")
    MasterForm.of(param, settings.master)
    check_layout(param)
    for moment in settings.moments if param.ndim > 1 and is_sharded(param) else ():
        if isinstance(moment.format, Format) and moment.granularity == PerTensor():
            raise ValueError(f"{moment} has one scale, which sharded weights do not share: use PerBlock(1, {BLOCK})")


def largest_gradient(gradients: list[Tensor]) -> Tensor:
    """Return all gradients' largest absolute value on all ranks, inf if any is not finite; the host does not wait."""
    amax = torch.zeros((), device=on_this_rank(gradients[0]).device, dtype=torch.float32)
    if shards := [shard for gradient in gradients if (shard := on_this_rank(gradient.detach())).numel()]:
        amax = torch.nn.utils.get_total_norm(shards, math.inf, foreach=True).float().nan_to_num(math.inf, math.inf)
    meshes: Any = dict.fromkeys(gradient.device_mesh for gradient in gradients if is_dtensor(gradient))  # type: ignore[attr-defined]
    for mesh in meshes:
        amax = maximum_over_ranks(amax.to(mesh.device_type), *mesh.get_all_groups())
    return amax


def with_codes(update: WeightUpdate, gradient: StoredGradient) -> WeightUpdate:
    """Return an update by a gradient in codes; RuntimeError if its blocks are not those of the weight's rows."""
    codes, shape = gradient.qdata.view(torch.uint8), update.master.weight.shape
    if codes.shape != shape and not (len(codes) == shape[1] == 1):  # a sharded vector is seen as a column
        raise RuntimeError(
            "experts were stored in FP8, or back as plain tensors, after gradients were rounded: do it before backward"
        )
    return update._replace(gradient=codes.view(shape), gradient_scale_inv=gradient.scale_inv)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def unscale(gradients: list[Tensor], scale: Tensor, skip: Tensor | None) -> None:
    """Divide gradients by a GradScaler's scale, as torch's fused optimizers do, unless ``skip`` is not 0."""
    divisor = scale if skip is None else torch.where(skip.to(scale.device) != 0, 1.0, scale)
    shards = [on_this_rank(gradient) for gradient in gradients]
    shards = [shard.scale_inv if isinstance(shard, StoredGradient) else shard for shard in shards]
    for device in {shard.device for shard in shards}:
        torch._foreach_div_([shard for shard in shards if shard.device == device], divisor.to(device).view(()))


def describe(settings: Settings, seed: int) -> dict[str, Any]:
    """Describe how a state is to be read, in numbers and strings; moments are by their names."""
    moments = {
        name: vars(moment) | {"format": str(moment.format), "granularity": str(moment.granularity)}
        for name, moment in zip(settings.names, settings.moments, strict=True)
    }
    return {"moments": moments, "master": str(settings.master), "seed": seed}


def has_form_of(description: dict[str, Any], settings: Settings) -> bool:
    """Whether a state of this description has the tensors that these settings keep; moments may differ in rounding."""
    wanted = describe(settings, 0)
    forms = [{name: m | {"rounding": ""} for name, m in each["moments"].items()} for each in (description, wanted)]
    return forms[0] == forms[1] and description["master"] == wanted["master"]


def moment_from(description: dict[str, Any]) -> Moment:
    """Return the Moment that ``description`` describes; ValueError if its granularity is none of a moment."""
    fmt: Any = _FORMATS.get(description["format"], description["format"])
    granularities = {str(granularity): granularity for granularity in MOMENT_GRANULARITIES}
    if (granularity := granularities.get(description["granularity"])) is None:
        choices = ", ".join(granularities)
        raise ValueError(f"the state's moments are in {description['granularity']!r}, which none here is: {choices}")
    return Moment(**description | {"format": fmt, "granularity": granularity})


def as_fp32(name: str, moment: Moment, saved_state: WeightState) -> Tensor:
    """Return this rank's values of a moment in float32, read from a saved state; ValueError if that lacks it.

    Scales beside sharded codes are those of all rows, unless they are sharded too.
    """
    tensors = {key: value for key, value in saved_state.items() if isinstance(value, Tensor)}
    if name in tensors:
        return on_this_rank(tensors[name]).to(torch.float32)
    if f"{name}_codes" not in tensors or not isinstance(moment.format, Format):
        remedy = "; docs/migrate.md reads a state of bitsandbytes back to float32" if "qmap1" in saved_state else ""
        raise ValueError(f"the state holds neither {name} nor {name}_codes, only {sorted(saved_state)}{remedy}")
    codes, scale_inv = tensors[f"{name}_codes"], tensors[f"{name}_scale_inv"]
    shard, row, column = on_this_rank(codes), 0, 0
    if not is_dtensor(scale_inv):
        place = place_of(codes)  # a vector's elements are one row
        row, column = (place.first_row, place.first_column) if codes.ndim > 1 else (0, place.first_row)
    return moment.read_codes(shard, on_this_rank(scale_inv).to(shard.device), row, column)


def convert_moment(param: Tensor, name: str, old: Moment, new: Moment, state: WeightState) -> dict[str, Tensor]:
    """Convert a parameter's moment in a state from ``old`` to ``new``, rounded to nearest; return its tensors."""
    values = as_fp32(name, old, state).to(on_this_rank(param).device)
    if is_sharded(param) and values.shape == param.shape:  # from a full state dict
        values = values[own_slices(param.shape, param)]
    if values.shape != on_this_rank(param).shape:
        raise ValueError(f"{name} of shape {tuple(values.shape)} does not fit a weight of {tuple(param.shape)}")
    fp8_experts = is_fp8_experts(param)
    tensors = new.new_state(name, values.shape, values.device, fp8_experts)
    if new.root:
        values = values.clamp(max=LARGEST_SQUARE)
    whole = new.for_kernel(name, tensors, fp8_experts)
    matrices = values.unbind() if fp8_experts else [as_matrix(values.contiguous())]
    for index, matrix in enumerate(matrices):
        stored = whole.matrix(index, len(matrices))
        if stored.fmt is not None and new.granularity == PerTensor():
            amax = matrix.abs().amax().reshape(1, 1) if matrix.numel() else matrix.new_zeros(1, 1)
            stored.begin(amax.sqrt() if new.root else amax)
        for piece in pieces(*matrix.shape):
            stored.write(piece, piece.of(matrix).clone(), None)
        stored.end()
    return sharded_like(tensors, param)


def new_state(param: nn.Parameter, settings: Settings) -> WeightState:
    """Return a parameter's state before its first step; the state of a sharded weight is sharded alike."""
    weight = on_this_rank(param.detach())
    step = torch.zeros((), dtype=torch.float32, device=weight.device)
    moments = new_moments(settings.moments_by_name(param), weight)
    return {"step": step} | sharded_like(moments, param) | new_master(param, settings.master)


def new_moments(moments: dict[str, Moment], weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a weight's moments, all zeros."""
    tensors: dict[str, Tensor] = {}
    for name, moment in moments.items():
        tensors |= moment.new_state(name, weight.shape, weight.device, is_fp8_experts(weight))
    return tensors


def new_master(param: nn.Parameter, master: str | None) -> dict[str, Tensor]:
    """Return a weight's master in its state, and its kind's index, as several kinds have equal names and dtypes."""
    chosen = MasterForm.of(param, master)
    state = sharded_like(chosen.new_state(on_this_rank(param.detach())), param)
    if state:
        state["master_kind"] = torch.tensor([*MASTER_KINDS].index(chosen.kind), dtype=torch.uint8, device="cpu")
    return state


def renew_master(param: nn.Parameter, state: WeightState, master: str | None) -> None:
    """Begin a plain weight's master anew, as the weight, where its dtype has changed since the state was made."""
    if local_stored(param) is not None or "master_amax" in state:
        return  # the storage has changed, which ``for_kernel`` refuses
    has_low_bits = MasterForm.of(param, master).low_bits_dtype is not None
    if has_low_bits != ("master_rest" in state):
        for name in [name for name in state if name.startswith("master_")]:
            del state[name]
        state.update(new_master(param, master))


def sharded_like(tensors: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """Shard this rank's tensors of a state as the weight is sharded, so that checkpoints can reshard them."""
    shard, amax = local_stored(param), tensors.get("master_amax")
    sharded = {name: value if value is amax else like_param(value, param) for name, value in tensors.items()}
    if amax is not None and shard is not None and not shard.has_one_scale:  # there is an amax for each scale
        sharded["master_amax"] = like_sharded(amax, param, shard.scales_shape(param.shape))
    return sharded


def for_kernel(
    param: nn.Parameter, weight: Tensor, state: WeightState, settings: Settings
) -> tuple[Master, tuple[MomentTensors, ...]]:
    """Return master and moments of ``weight``, this rank's shard of ``param``, as kernels take them, over its state.

    RuntimeError if the state was made while the weight was stored otherwise.
    """
    tensors = {name: on_this_rank(value) for name, value in state.items() if isinstance(value, Tensor)}
    scale_inv = weight.scale_inv if isinstance(weight, StoredWeight) else None
    # weights in FP8 have an amax for each scale
    if getattr(scale_inv, "shape", None) != getattr(tensors.get("master_amax"), "shape", None):
        raise RuntimeError(
            f"a weight {tuple(weight.shape)} is not stored as it was when the optimizer's state of it was made: "
            "octavo.convert(..., weight_storage=...) or octavo.restore came between two steps. Let an "
            "octavo.schedule.PrecisionSchedule change the storage: the state follows; or make the optimizer anew"
        )
    master = MasterForm.of(param, settings.master)
    moments = settings.moments_by_name(param)
    fp8_experts = is_fp8_experts(weight)
    if isinstance(weight, StoredWeight) and weight.is_shard and weight.shape[0] == 0 and not fp8_experts:
        # a row of zeros stands in for a shard without rows: its update keeps the scale the same as on other ranks
        codes = torch.zeros(1, weight.shape[1], dtype=torch.uint8, device=weight.device).view(weight.qdata.dtype)
        weight = StoredWeight(codes, weight.scale_inv, weight.dtype, weight.granularity, is_shard=True)
        tensors = new_moments(moments, weight) | master.new_state(weight) | {"master_amax": tensors["master_amax"]}
    matrix = matrix_of(weight)
    if is_sharded_vector(param):  # one element a row, so that its index is that in the whole vector
        tensors |= {name: value.view(-1, 1) for name, value in tensors.items() if name in moments}
        matrix = matrix.view(-1, 1)
    stored = tuple(moment.for_kernel(name, tensors, fp8_experts) for name, moment in moments.items())
    return master.for_kernel(matrix, tensors, scale_inv), stored


# --- a saved state that is loaded: does it fit, what is copied, what is converted, and the warning about that --------


class LoadedState(NamedTuple):
    """A parameter's state as it was loaded, and what of it is not as it was saved.

    Attributes:
        state: the parameter's state.
        moments_converted: whether its moments were saved in another form.
        lost_master: a sentence on its master, which begins anew as the weight; None: it was loaded.
    """

    state: WeightState
    moments_converted: bool
    lost_master: str | None


def groups_to_load(saved_groups: list[dict[str, Any]], optimizer: Any) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the options of saved ones; options that were not saved stay as they are.

    ValueError if the saved groups don't fit the optimizer's parameters.
    """
    present_groups = optimizer.param_groups
    old_counts, counts = ([len(group["params"]) for group in some] for some in (saved_groups, present_groups))
    if old_counts != counts:
        raise ValueError(f"the state is of groups of {old_counts} parameters, and the optimizer has groups of {counts}")
    groups = []
    for saved, present in zip(saved_groups, present_groups, strict=True):
        if saved.get("amsgrad"):
            raise ValueError("the state is of amsgrad=True, whose largest second moments octavo does not keep")
        group = {**present, **copy.deepcopy(saved), "params": present["params"]}
        for param in group["params"]:
            optimizer.check_weight(param, group, optimizer.settings)
        groups.append(group)
    return groups


def load_state(
    param: nn.Parameter, saved: WeightState, description: dict[str, Any] | None, same_form: bool, settings: Settings
) -> LoadedState:
    """Load a parameter's saved state into a new one of these settings.

    ``description``: how the saved state is to be read; None: it is torch's. ``same_form``: whether it keeps moments as
    ``settings`` do.
    """
    if description is None and any(str(name).endswith("_codes") for name in saved):
        raise ValueError("the state holds codes, but its groups no 'octavo', which says how these are to be read")
    state = new_state(param, settings)
    saved_state = _without_stale_moments(saved, settings.names, state)
    state["step"].copy_(torch.as_tensor(saved_state.get("step", 1.0), dtype=torch.float32))  # torch's SGD keeps none
    old_kind, new_kind = (int(each.get("master_kind", -1)) for each in (saved_state, state))
    lost_master = None
    if old_kind != new_kind or not _copy(state, saved_state, [name for name in state if name.startswith("master_")]):
        kinds = [*MASTER_KINDS, "none"]
        lost_master = f"masters that were {kinds[old_kind]} begin anew as the weights are: {kinds[new_kind]}"
    names = [name for name in state if name != "step" and not name.startswith("master_")]
    if same_form and _copy(state, saved_state, names):
        return LoadedState(state, False, lost_master)
    old_moments = dict(zip(settings.names, settings.moments, strict=True))
    if description is not None:
        old_moments = {name: moment_from(moment) for name, moment in description["moments"].items()}
    if missing := [name for name in settings.names if name not in old_moments]:
        raise ValueError(f"the state's moments are {[*old_moments]}, and this optimizer keeps {', '.join(missing)} too")
    for name, new in settings.moments_by_name(param).items():
        state |= convert_moment(param, name, old_moments[name], new, saved_state)
    return LoadedState(state, True, lost_master)


def conversion_warning(description: dict[str, Any] | None, settings: Settings, lost_masters: set[str | None]) -> str:
    """Return the warning about a converted state; ``lost_masters``: those of all LoadedStates."""
    old = "torch's"
    if description is not None:
        old = f"{tuple(map(moment_from, description['moments'].values()))}, master {description['master']}"
    new = "; ".join([f"{settings.moments}, master {settings.master}", *sorted(filter(None, lost_masters))])
    if old == new:
        old, new = "other blocks, or moments in codes on one side alone", "as they are kept here, to nearest"
    return f"the optimizer's state was converted: from {old} to {new}"


def _without_stale_moments(saved_state: WeightState, names: Iterable[str], state: WeightState) -> WeightState:
    """Return a saved state without this optimizer's moments, which torch leaves beside those of a full state dict.

    Where a moment is there twice, in codes and not, the form that this optimizer does not keep was saved.
    """
    twice = {name for name in names if name in saved_state and f"{name}_codes" in saved_state}
    stale = {name if name in state else f"{name}_codes" for name in twice}
    return {key: value for key, value in saved_state.items() if key not in stale}


def _copy(state: WeightState, saved_state: WeightState, names: list[str]) -> bool:
    """Copy named tensors, plain or sharded, from a saved state if dtypes and shapes match; return whether they do."""
    pairs = [(on_this_rank(state[name]), saved_state.get(name)) for name in names]
    for into, other in pairs:
        if not isinstance(other, Tensor) or other.dtype != into.dtype or on_this_rank(other).shape != into.shape:
            return False
    for into, other in pairs:
        into.copy_(on_this_rank(other))  # type: ignore[arg-type]
    return True
