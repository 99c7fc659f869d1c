"""The sharded weights that FSDP2 gathers in FP8: what ranks were told alike, and the casts and scales they agree on.

All shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight is
missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send the
same codes again. A gathered weight's codes and scales are always written together, also into what a forward saved.

Under Delayed a weight that was written by other than its optimizer takes the scale of its own amax.

Weights whose two layouts are scaled differently (rows, 1 x 32), and blocks that reach over several ranks' rows, are
cast each for itself (ShardCast). There ranks first agree on the amax of each block. Each casts its rows with a row of
such amaxes beside them, which makes a block's scale that of the whole block; that row's codes are not sent. Other
scales are sent beside the codes, unless ranks have different numbers of rows: FSDP2 then takes tensors of the shard's
shape alone, and ranks agree on all.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo import kernels
from octavo.autograd.casts import WEIGHT
from octavo.granularity import ALL, Tile, scale_shape
from octavo.kernels.arguments import lie_by_columns
from octavo.kernels.layouts import contraction_multiple, with_padding
from octavo.nn.tensor_parallel import sending_of
from octavo.nn.weight import stored_as, weight_of
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.scaling.recipe import Cast, RoleCasts
from octavo.step_count import OPTIMIZER_STEPS
from octavo.tensor.collectives import agree, bytes_of, largest, scales_from
from octavo.tensor.fsdp2 import groups_of, on_this_rank, padded_rows, rows_of_rank, rows_on_each_rank
from octavo.tensor.pair import Operands, operands_of, transposed_pair

Gathers = list[Any]  # of octavo.nn.gather.Gather


def told_of(module: Any, name: str) -> dict[str, object]:
    """What a RecipeModule was told, by this name: its recipe, how its weight is stored, how it sends tokens."""
    recipe, sending, exchange = module.recipe, sending_of(module), getattr(module, "exchange", None)
    told = {f"recipe.{field.name}": getattr(recipe, field.name) for field in fields(recipe) if field.compare}
    weights = module.gather.parameter, weight_of(module), *getattr(module, "weights", ())  # of splits on several ranks
    weight = next((weight for weight in weights if weight is not None), None)
    if weight is not None:
        granularity = stored_as(weight)
        told["weight_storage"] = weight.dtype if granularity is None else f"fp8 {granularity}"
    if sending is not None:
        told |= {"exact": sending.exact, "reduction in FP8": sending.reduce is not None}
    if exchange is not None:
        told |= {"exact": exchange.exact, "average": exchange.average}
    return {f"{name}: {what}": value for what, value in told.items()}


def ask_of(told: Mapping[str, object], mesh: Any) -> None:
    """Ask the ranks of a mesh, all together, whether they were told the same."""
    agree(told, [mesh.get_group(dim) for dim in range(mesh.ndim)])


def ask(modules: Sequence[Any], mesh: Any, **told: object) -> None:
    """Ask the ranks of a mesh about these RecipeModules, unless they have agreed since the last change of any.

    All of them call it with the same modules; ``told``: what else is to be alike. A compiled graph does not ask.

    Raises:
        RanksDifferError: on all ranks, naming layer and option, where one was told something else.
    """
    if torch.compiler.is_compiling() or all(module.gather.agreed for module in modules):
        return
    for number, module in enumerate(modules):
        told |= told_of(module, module.gather.name or f"{type(module).__name__} {number}")
    ask_of(told, mesh)
    for module in modules:
        module.gather.agreed = True


class GatherGroup:
    """The sharded weights of one ``octavo.convert``: their scales are found together, in one collective."""

    def __init__(self, told: dict[str, object] | None = None) -> None:
        self.told = {} if told is None else told  # of all layers then; ranks are asked when the first is sharded
        self._asked: set[Any] = set()  # meshes
        self._modules: list[weakref.ref[Any]] = []  # those whose weights they are
        self.backwards = 0  # how often a weight was gathered for backward
        self._cast: Any = None  # a CUDA event: the last casts are done

    def add(self, module: Any) -> None:
        """Take in a module whose weight was sharded; ranks do it in one order."""
        if all(reference() is not module for reference in self._modules):
            self._modules.append(weakref.ref(module))

    def ask(self, mesh: Any) -> None:
        """Ask the ranks of a mesh, once, whether they have converted one model alike."""
        if mesh not in self._asked:
            ask_of(self.told, mesh)
            self._asked.add(mesh)

    def modules_on(self, mesh: Any) -> list[Any]:
        """The modules whose weights are sharded over a mesh, in one order on all ranks."""
        found: list[Any] = [module for reference in self._modules if hasattr(module := reference(), "gather")]
        return [one for one in found if one.gather.group is self and one.gather.parameter.device_mesh == mesh]

    def refresh(self, gather: Any, mesh: Any) -> None:
        """Find scales anew and cast all shards that lie on this one's mesh; ``mesh``: that of its gather."""
        together: dict[tuple[Any, ...], Gathers] = {}
        alone: Gathers = []
        for module in self.modules_on(gather.parameter.device_mesh):
            other = module.gather
            if not other.begin_in_fp8(module):
                continue
            if other.shard_cast is not None:
                alone.append(other)
                continue
            shard, cast = on_this_rank(other.parameter), module.recipe.weight_casts.as_is
            together.setdefault((cast, shard.dtype, shard.device), []).append(other)
        per_tensor = [(cast, found) for (cast, *_), found in together.items() if cast.tile == (ALL, ALL)]
        if per_tensor or alone:
            _find_scales(per_tensor, alone, mesh)
        for (cast, *_), found in together.items():
            _cast_shards(found, cast, mesh)
        self._cast = torch.cuda.current_stream().record_event() if mesh.device_type == "cuda" else None

    def wait(self) -> None:
        """Let the current stream read what another one may have cast: FSDP2 gathers on its own and on the user's."""
        if self._cast is not None:
            torch.cuda.current_stream().wait_event(self._cast)

    def __reduce__(self) -> tuple[Any, ...]:  # copies are empty, and the same for all modules copied together
        return GatherGroup, (self.told,)


def _matrices(gather: Any) -> int:
    """How many matrices, each with a scale of its own, the weight is: of experts one each."""
    return gather.shape[0] if gather.parameter.ndim == 3 else 1


def _first(gather: Any, mesh: Any) -> int:
    """The number of this rank's first expert, of a weight of experts."""
    return rows_of_rank(gather.shape[0], mesh.size(), mesh.get_local_rank()).start


def _amax_of(gather: Any, mesh: Any) -> Tensor:
    """What this rank knows of the amax of each of a weight's matrices: 0 of those that it has nothing of."""
    shard = on_this_rank(gather.parameter)
    if shard.ndim == 2:
        return kernels.amax(shard, (ALL, ALL)).reshape(1)
    amax = shard.new_zeros(gather.shape[0], dtype=torch.float32)
    if len(shard):
        begin = _first(gather, mesh)
        amax[begin : begin + len(shard)] = kernels.amax(shard.flatten(0, 1), (1, ALL)).view(shard.shape[:2]).amax(1)
    return amax


def _find_scales(groups: list[tuple[Cast, Gathers]], alone: Gathers, mesh: Any) -> None:
    """The scale and global amax of every matrix cast per tensor: one collective, under tensor parallelism two.

    What those that are cast ``alone`` have to agree on is in it, and they are cast.
    """
    gathers = [gather for _, some in groups for gather in some]
    shards = [on_this_rank(gather.parameter) for gather in alone]
    known = [gather.shard_cast.amax(shard) for gather, shard in zip(alone, shards, strict=True)]
    amax = torch.cat([*(_amax_of(gather, mesh) for gather in gathers), *known])
    if len(amax):
        ranks = dict.fromkeys(group for gather in (*gathers, *alone) for group in groups_of(gather.parameter))
        amax = largest(amax, *ranks, device=mesh.device_type)
    sizes = [sum(map(_matrices, some)) for _, some in groups]
    found = amax.split([*sizes, *map(len, known)])
    for (cast, gathers), maxima in zip(groups, found, strict=False):
        _take_scales(gathers, maxima, cast)
    for gather, shard, maxima in zip(alone, shards, found[len(groups) :], strict=True):
        gather.cast_alone = gather.shard_cast.cast(shard, maxima)


def _take_scales(gathers: Gathers, amax: Tensor, cast: Cast) -> None:
    """Give gathers of one cast their scales, and the amax of the whole weight, which all its experts' history has."""
    count, counts, whole, kept = len(gathers), [_matrices(gather) for gather in gathers], amax, None
    if len(amax) > count:
        whole = torch.stack([each.amax() for each in amax.split(counts)])
    if cast.is_delayed:
        states = [gather.delayed_scale for gather in gathers]
        zero = amax.new_zeros(1)
        kept = torch.cat([zero if scales is None else scales[WEIGHT : WEIGHT + 1].to(amax.device) for scales in states])
        # Such writes move no version: without a step of its optimizer a weight's amax has changed, or it is more than
        # twice too large.
        steps = [OPTIMIZER_STEPS.of(gather.parameter) for gather in gathers]
        unstepped = [float(gather.steps == now) for gather, now in zip(gathers, steps, strict=True)]
        before = torch.cat([gather.amax.view(-1)[:1] if gather.amax.numel() else zero for gather in gathers])
        moved = (whole.new_tensor(unstepped) > 0) & (whole != before)
        written = (moved | (kept * whole > 2 * cast.format.max)) & whole.isfinite()
        for gather, now in zip(gathers, steps, strict=True):
            gather.steps = now
        kept = torch.where(written, 0, kept)
        if len(amax) > count:
            kept = torch.cat([scale.expand(size) for scale, size in zip(kept.split(1), counts, strict=True)])
    scale = scale_from_amax(amax, cast.format.max, cast.power_of_two, cast.margin, kept)
    scale_inv = scale_inv_from_scale(scale)
    split = (scale.split(counts), whole.view(count, 1, 1).unbind(), scale_inv.split(counts))
    for gather, own_scale, own_amax, own_inv in zip(gathers, *split, strict=True):
        gather.scale, gather.amax = own_scale, own_amax
        gather.scale_inv = own_inv.view((-1, 1, 1) if gather.parameter.ndim == 3 else (1, 1))


def _cast_shards(gathers: Gathers, cast: Cast, mesh: Any) -> None:
    """Cast shards of one dtype by one cast: one launch."""
    per_tensor = cast.tile == (ALL, ALL)
    shards, codes, scale_inv, scales = (list[Tensor]() for _ in range(4))
    for gather in gathers:
        shard = on_this_rank(gather.parameter)
        shape = rows_on_each_rank(gather.shape[0], mesh.size()), *gather.shape[1:]
        if gather.codes is None:
            gather.codes = torch.zeros(shape, dtype=torch.uint8, device=shard.device)
            if not per_tensor:
                of_blocks = *shape[:-2], *scale_shape(shape[-2:], cast.tile)
                gather.scale_inv = shard.new_ones(of_blocks, dtype=cast.scale_inv_dtype)
        if shard.numel() == 0:
            continue
        experts, written = shard.ndim == 3, gather.codes[: shard.shape[0]].view(cast.format.dtype)
        matrices = shard.unbind() if experts else [shard]
        shards += matrices
        codes += written.unbind() if experts else [written]
        if per_tensor:
            begin = _first(gather, mesh) if experts else 0
            scales += gather.scale[begin : begin + len(matrices)].split(1)
            scale_inv += [shard.new_empty(1, 1, dtype=torch.float32) for _ in matrices]
        elif experts:
            scale_inv += gather.scale_inv.unbind()
        else:  # of whole blocks; rows that a last rank has not are zeros, and their scale 1
            scale_inv.append(gather.scale_inv[: -(-shard.shape[0] // cast.tile[0])])
    if shards:
        amax = [torch.empty_like(one, dtype=torch.float32) for one in scale_inv]
        how = cast.tile, cast.power_of_two, cast.margin
        kernels.multi_tensor_cast(shards, codes, [], scale_inv, amax, scales if per_tensor else [], 0, *how, None)


class _CastLayout(NamedTuple):
    """A cast, its tile of the weight as it lies, the shape of the scales that ranks agree on; None: they are sent."""

    cast: Cast
    tile: Tile
    grid: tuple[int, ...] | None


class ShardCast:
    """How one rank casts its rows of a weight [N, K] of this shape, and reads all ranks'.

    The casts are Dynamic; of the two layouts one at most has blocks of several rows.
    """

    def __init__(self, casts: RoleCasts, shape: torch.Size, ranks: int, rank: int) -> None:
        assert casts.as_is is not None and casts.transposed is not None
        self.shape, self.ranks, part = shape, ranks, rows_on_each_rank(shape[0], ranks)
        self.begin = rows_of_rank(shape[0], ranks, rank).start
        layouts = [(casts.as_is, casts.as_is.tile), (casts.transposed, casts.transposed.tile[::-1])]
        self.layouts = list[_CastLayout]()
        for cast, tile in layouts[: 1 if casts.once else 2]:
            apart = shape[0] == part * ranks and tile[0] != ALL and part % tile[0] == 0
            self.layouts.append(_CastLayout(cast, tile, None if apart else scale_shape(shape, tile)))

    def amax(self, shard: Tensor) -> Tensor:
        """What this rank knows of the amax of all blocks that ranks agree on, one after the other; float32."""
        found = [shard.new_zeros(0, dtype=torch.float32)]
        for _, tile, grid in self.layouts:
            if grid is not None:
                blocks = shard.new_zeros(grid, dtype=torch.float32)
                if len(shard):
                    first, before = (0, 0) if tile[0] == ALL else divmod(self.begin, tile[0])
                    own = kernels.amax(functional.pad(shard, (0, 0, before, 0)) if before else shard, tile)
                    blocks[first : first + len(own)] = own
                found.append(blocks.view(-1))
        return torch.cat(found)

    def cast(self, shard: Tensor, amax: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """(What this rank sends, uint8 of as many rows as every rank's; the scale_inv that ranks have agreed on).

        Args:
            shard: this rank's rows, bf16, fp16 or fp32.
            amax: the largest that ranks know, of all that ``amax`` gives.
        """
        x, before, sent, known = shard, 0, list[Tensor](), list[Tensor]()
        for cast, tile, grid in self.layouts:
            if grid is not None:
                blocks, amax = amax[: math.prod(grid)].view(grid), amax[math.prod(grid) :]
                scale = scale_from_amax(blocks, cast.format.max, cast.power_of_two, cast.margin)
                known.append(scale_inv_from_scale(scale).to(cast.scale_inv_dtype))
                if tile[0] != 1:
                    x, before = self._beside(shard, blocks, tile)
        (first, *_), *others = self.layouts
        second = others[0].cast.as_second if others else {}
        q, q2, scale_inv, scale_inv2, *_ = kernels.cast(x, None, WEIGHT, *first.arguments, **second)
        for (cast, _, grid), codes, scales in zip(self.layouts, (q, q2), (scale_inv, scale_inv2), strict=False):
            own = codes.view(torch.uint8)[before : before + len(shard)]
            sent.append(padded_rows(own, self.shape, self.ranks))
            if grid is None:  # of rows alone where others are beside them
                sent.append(bytes_of(scales[before : before + len(shard)], cast.power_of_two))
        return sent, known

    def _beside(self, shard: Tensor, blocks: Tensor, tile: Tile) -> tuple[Tensor, int]:
        """(The shard with rows of the amaxes of blocks that other ranks have rows of, how many are before it)."""
        columns, end = shard.shape[1], self.begin + len(shard)
        wide = blocks.to(shard.dtype).repeat_interleave(columns if tile[1] == ALL else tile[1], 1)[:, :columns]
        if tile[0] == ALL:
            return torch.cat([shard, wide]), 0
        if not len(shard):
            return shard, 0
        (first, before), (last, after) = divmod(self.begin, tile[0]), divmod(end if end < self.shape[0] else 0, tile[0])
        rows = wide[first : first + 1].expand(before, columns), shard, wide[last : last + 1][:after]
        return torch.cat(rows) if before or after else shard, before

    def read(self, received: Sequence[Tensor], known: Sequence[Tensor], pads: bool) -> Operands:
        """What products read, of all ranks' ``sent``, and what ``cast`` gave besides."""
        left, agreed, pairs = iter(received), iter(known), list[tuple[Tensor, Tensor]]()
        for cast, tile, grid in self.layouts:
            q = next(left)[: self.shape[0]].view(cast.format.dtype)
            scales = scales_from(next(left), cast.power_of_two, tile) if grid is None else next(agreed)
            # with the strides that products want, see kernels/signatures.py
            pairs.append((q, scales.t().contiguous().t() if lie_by_columns(tile) else scales))
        if len(pairs) == 1:
            return operands_of(*pairs[0], pads)
        (q, scale_inv), (q2, scale_inv2) = pairs
        pad = contraction_multiple(q.device) if pads else 1
        return Operands((with_padding(q, pad), scale_inv), transposed_pair(q2, scale_inv2, pads))
