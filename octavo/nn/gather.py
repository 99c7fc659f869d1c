"""How a converted module's weight is gathered under FSDP2 (fully_shard), and the scales that its ranks share.

Three ways, chosen for each weight by ``gather_group.way``:

    in FP8      the shard is cast, codes are sent: half of bf16's bytes. Per tensor the scale is that of the whole
                weight: one collective finds the amax of all weights of the model together. Blocks of which each lies on
                one rank need none; their scales are sent beside the codes.
    cast after  the shard is sent in the parameter's dtype (or the mixed-precision policy's), and cast once an unshard:
                recipes whose two layouts are scaled differently (rows, 1 x 32), where codes would be sent twice.
    as it is    a weight that a product reads in high precision, or that another kind of module shares.

A weight that lives in FP8 is gathered as stored, whatever the recipe: see nn/stored_shards.py.

What is cast, and when: nn/gather_group.py.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo.autograd.casts import WEIGHT, Operands, State, cast_role
from octavo.granularity import ALL
from octavo.kernels.layouts import needs_transposed_codes, padded
from octavo.nn.gather_group import AS_IT_IS, CAST_AFTER, codes_of, way
from octavo.scaling.recipe import Delayed, Recipe
from octavo.tensor.sharded_weight import (
    After,
    GatheredWeight,
    Parts,
    gather_as_it_is,
    padded_rows,
    rows_on_each_rank,
)

if TYPE_CHECKING:
    from octavo.nn.recipe_module import RecipeModule


def note_use(module: RecipeModule, kind: str) -> None:
    """Note how a weight is gathered.

    Raises:
        RuntimeError: if FSDP2 has gathered it otherwise before.
    """
    gather, used = module.gather, (kind, module.recipe.weight_casts)
    if gather.used is not None and gather.used != used:
        raise RuntimeError(
            "a weight under FSDP2 took another recipe than it was gathered by; call octavo.set_recipe on the module "
            "that fully_shard was applied to, or one that holds it"
        )
    gather.used = used


def before_gather(
    module: RecipeModule, shard: Tensor, mesh: Any, outer_size: torch.Size, mp_policy: Any
) -> tuple[tuple[Tensor, ...], After]:
    """What FSDP2's first hook does: see ShardedWeight.fsdp_pre_all_gather."""
    gather, recipe = module.gather, module.recipe
    chosen = way(module).kind
    note_use(module, chosen)
    if chosen == AS_IT_IS:
        return gather_as_it_is(shard, mesh, outer_size, mp_policy)
    for_backward = torch._C._current_graph_task_id() != -1  # also of a forward that a checkpoint computes again
    if chosen == CAST_AFTER:
        if not for_backward:
            gather.begin(module)
        sent = padded_rows(shard, rows_on_each_rank(outer_size[0], mesh.size()))
        # where nothing is sent, what several ranks would send in FP8 is cast from its own dtype, as there
        alone = mesh.size() == 1 and recipe.weight_casts.once
        dtype = shard.dtype if alone else mp_policy.param_dtype or shard.dtype
        return (sent.to(dtype),), _cast_after(module, outer_size)
    group = gather.group
    assert group is not None
    if for_backward and gather.codes is not None:
        group.backwards += 1
    else:
        if gather.ready != group.ready(module):
            group.refresh(module, mesh)
        gather.ready = None
    codes = codes_of(module).to(shard.device, non_blocking=True)
    if gather.scale_inv.numel() == 1 and recipe.weight_casts.as_is.tile == (ALL, ALL):  # type: ignore[union-attr]
        return (codes,), _take_codes(module, outer_size, gather.scale_inv.to(shard.device), gather.amax)
    return (codes, gather.scale_inv.to(shard.device, non_blocking=True)), _take_codes(module, outer_size, None, None)


def _take_codes(module: RecipeModule, shape: torch.Size, scale_inv: Tensor | None, amax: Tensor | None) -> After:
    recipe = module.recipe
    cast = recipe.weight_casts.as_is
    assert cast is not None

    def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
        q = outputs[0][: shape[0]].view(cast.format.dtype)
        scales = outputs[1] if scale_inv is None else scale_inv
        found = amax.to(q.device) if amax is not None and isinstance(cast.rule, Delayed) else no_amax(module, q)
        laid, transposed, inner = _laid(q, recipe, out)
        parts = Parts(laid, scales, transposed, scales.t(), found)
        if out is not None:
            return out.refill(parts)
        return GatheredWeight(parts, shape, dtype, recipe.weight_casts), inner

    return after


def no_amax(module: RecipeModule, like: Tensor) -> Tensor:
    """What stands for an amax where no rule asks for one."""
    gather = module.gather
    if gather.no_amax is None or gather.no_amax.device != like.device:
        gather.no_amax = like.new_empty(0, dtype=torch.float32)
    return gather.no_amax


def _laid(q: Tensor, recipe: Recipe, out: GatheredWeight | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Gathered codes in both layouts, and those of them that are not the gathered storage."""
    laid, transposed = lay_out(q, recipe)
    inner = [part for part in (laid, transposed) if part.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()]
    return laid, transposed, tuple(inner) if out is None else ()


def lay_out(q: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Codes [N, K] as the products read them: as they lie and transposed, contractions padded as the device wants."""
    if not needs_transposed_codes(q.device):
        return q, q.t()
    return with_padding(q, recipe), with_padding(q.view(torch.uint8).t().contiguous().view(q.dtype), recipe)


def with_padding(q: Tensor, recipe: Recipe) -> Tensor:
    """Codes [N, K] with zeros behind the contraction, as a device wants it that needs transposed codes."""
    padding = padded(q.shape[1], 16 if recipe.pads else 1) - q.shape[1]
    return nn.functional.pad(q.view(torch.uint8), (0, padding)).view(q.dtype) if padding else q


def _cast_after(module: RecipeModule, shape: torch.Size) -> After:
    recipe, gather = module.recipe, module.gather

    def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
        wide = outputs[0][: shape[0]]
        state = None
        if recipe.delayed is not None:
            assert module.delayed_scale is not None and module.delayed_amax_history is not None
            scale = torch.zeros_like(module.delayed_scale) if gather.delayed_scale is None else gather.delayed_scale
            state = State(scale, module.delayed_amax_history)
        operands = cast_role(wide, recipe, WEIGHT, True, True, state)
        assert operands.as_is is not None and operands.transposed is not None
        amax = operands.amax if operands.amax is not None else no_amax(module, wide)
        parts = Parts(*operands.as_is, *operands.transposed, amax)
        if out is not None:
            return out.refill(parts)
        inner = {part.untyped_storage().data_ptr(): part for part in (parts.qdata, parts.transposed_qdata)}
        return GatheredWeight(parts, shape, dtype, recipe.weight_casts), tuple(inner.values())

    return after


def gathered_operands(module: RecipeModule, weight: GatheredWeight, rolls: bool) -> Operands:
    """The operands of a gathered weight; ``rolls``: this forward's backward may roll the weight's history."""
    recipe = module.recipe
    if weight.casts is not recipe.weight_casts and weight.casts != recipe.weight_casts:
        raise RuntimeError(
            "the weight was gathered by other casts than this layer's recipe has: layers that share a weight need one "
            "recipe, and octavo.set_recipe waits until no forward is under way"
        )
    amax = weight.found_amax if weight.found_amax.numel() else None
    fresh = True
    if not torch.compiler.is_compiling():  # a graph would be bound to one of the two, as to a cast of its own
        gather = module.gather
        gather.unsharded = weakref.ref(weight)
        if rolls and not gather.for_training:  # it stayed gathered after evaluation
            gather.begin(module)
        fresh = gather.rolled != gather.casts[0]
        if rolls:
            gather.rolled = gather.casts[0]
    as_is, transposed = (weight.qdata, weight.scale_inv), (weight.transposed_qdata, weight.transposed_scale_inv)
    return Operands(as_is, transposed, amax, None, fresh, refilled=True)
