"""What is recorded of weights themselves: what their casts do, how far a step moves them, and their moments' codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.autograd.casts import WEIGHT
from octavo.distributed.ranks import Ranks
from octavo.granularity import ALL
from octavo.inspect.rows import RecordedRole
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.stored_weights import weight_of
from octavo.numerics import scale_from_amax
from octavo.tensor.sharded_weight import local_shard, on_this_rank
from octavo.tensor.stored_weight import StoredWeight

# what is recorded of each weight's update, all but the first two divided by their number
MOVED = ("elements", "moments", "update", "grid", "changed", "first_flushed", "second_flushed")
SAMPLED = 4096  # of a weight's elements


def count_weights(weights: Sequence[RecordedRole], ranks: Ranks) -> None:
    """Count what the casts of weights do, as the next forward will make them: of a sharded weight this rank's rows."""
    whole = _scales_of_whole(weights, ranks)
    for (module, recipe, _, counts), scales in zip(weights, whole, strict=True):
        weight = weight_of(module)
        if weight is None or module.recipe is not recipe:
            continue
        local = on_this_rank(weight).detach()
        if isinstance(local, StoredWeight):  # its codes are what there is: nothing is cast
            if counts[0] is not None:
                tile = local.granularity.tile
                kernels.cast_statistics(local.dequantize(), local.qdata, local.scale_inv, tile, *counts[0])
            continue
        x = _laid(module, weight)
        casts = recipe.weight_casts
        for cast, laid, counted in ((casts.as_is, x, counts[0]), (casts.transposed, x.t(), counts[1])):
            if cast is not None and counted is not None:
                delayed = scales if cast.tile == (ALL, ALL) else None
                q, _, scale_inv, *_ = kernels.cast(laid, delayed, WEIGHT, *cast.arguments)
                kernels.cast_statistics(laid, q, scale_inv, cast.tile, *counted)


def _laid(module: RecipeModule, weight: nn.Parameter) -> Tensor:
    """This rank's rows of a weight [N, K]."""
    shard = local_shard(weight).detach()
    return shard if isinstance(module, nn.Linear) else shard.t()


def _scales_of_whole(weights: Sequence[RecordedRole], ranks: Ranks) -> list[Tensor | None]:
    """For casts per tensor: the delayed scales, or those that all ranks' rows together ask for; None: the own amax."""
    found: list[Tensor | None] = [getattr(module, "delayed_scale", None) for module, *_ in weights]
    sharded = [i for i, (module, *_) in enumerate(weights) if found[i] is None and _is_sharded_per_tensor(module)]
    if sharded:
        shards = [_laid(weights[i].module, weight_of(weights[i].module)) for i in sharded]  # type: ignore[arg-type]
        amax = ranks.largest(torch.cat([kernels.amax(shard, (ALL, ALL)).reshape(1) for shard in shards]))
        for i, own in zip(sharded, amax, strict=True):
            cast = next(c for c in weights[i].module.recipe.weight_casts[:2] if c is not None and c.tile == (ALL, ALL))
            found[i] = scale_from_amax(own, cast.format.max, cast.power_of_two, cast.margin).expand(3).contiguous()
    return found


def _is_sharded_per_tensor(module: RecipeModule) -> bool:
    weight, casts = weight_of(module), module.recipe.weight_casts[:2]
    if weight is None or on_this_rank(weight) is weight or isinstance(on_this_rank(weight), StoredWeight):
        return False
    return any(cast is not None and cast.tile == (ALL, ALL) for cast in casts)


class WeightSamples:
    """Some elements of each weight, from before a step."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []

    @torch.no_grad()
    def take(self, weights: Sequence[RecordedRole]) -> None:
        """Keep them."""
        self._before = [_sample(found.module)[0] for found in weights]

    def moved(self, weights: Sequence[RecordedRole], optimizer: torch.optim.Optimizer | None) -> Tensor:
        """MOVED of each weight, summed over its sample: float64 [weights, 7]."""
        found = []
        for before, (module, *_) in zip(self._before, weights, strict=True):
            after, grid = _sample(module)
            update = (after - before).double()
            elements = torch.full((), float(update.numel()), dtype=torch.float64, device=update.device)
            flushed = _flushed(weight_of(module), optimizer)
            sums = update.square().sum(), grid.double().square().sum(), (update != 0).sum(dtype=torch.float64)
            found.append(torch.stack([elements, *(part.to(elements) for part in (flushed[0], *sums, *flushed[1:]))]))
        self._before = []
        return torch.stack(found)


def _sample(module: RecipeModule) -> tuple[Tensor, Tensor]:
    """Elements of a module's weight, float32, and the distance between numbers of its dtype there."""
    weight = weight_of(module)
    if weight is None:
        return torch.zeros(0), torch.zeros(0)
    local = on_this_rank(weight).detach()
    stored = local if isinstance(local, StoredWeight) else None
    flat = (stored.qdata.view(torch.uint8) if stored is not None else local_shard(weight).detach()).reshape(-1)
    step = max(1, flat.numel() // SAMPLED)
    places = torch.arange(0, flat.numel(), step, device=flat.device)[:SAMPLED]
    if stored is None:
        values = flat[places].float()
        exponent = torch.frexp(values).exponent - 1
        return values, torch.ldexp(torch.full_like(values, torch.finfo(weight.dtype).eps), exponent)
    rows, cols = places // stored.shape[1], places % stored.shape[1]
    height, width = (
        size if tile == ALL else tile for size, tile in zip(stored.shape, stored.granularity.tile, strict=True)
    )
    scale_inv = stored.scale_inv[rows // max(height, 1), cols // max(width, 1)]
    values = flat[places].view(stored.qdata.dtype).float()
    exponent = (torch.frexp(values).exponent - 1).clamp_(min=-6)  # E4M3's smallest normal is 2^-6
    return values * scale_inv, torch.ldexp(scale_inv, exponent - 3)


def _flushed(weight: nn.Parameter | None, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Of two moments in codes their elements, and how many of each are 0 where the other's are not."""
    state = {} if optimizer is None or weight is None else optimizer.state.get(weight, {})
    names = [name for name in state if name.endswith("_codes")]
    zero = torch.zeros((), dtype=torch.float64)
    if len(names) != 2:
        return [zero, zero, zero]
    first, second = (on_this_rank(state[name]).view(torch.uint8) for name in sorted(names, key=len))
    no_first, no_second = first & 0x7F == 0, second == 0
    counts = [part.sum(dtype=torch.float64) for part in (no_first & ~no_second, no_second & ~no_first)]
    return [zero + first.numel(), *counts]
