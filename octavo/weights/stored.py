"""StoredWeight: a parameter that lives in FP8, with no wider copy.

It is a pair behind the facade of a high-precision matrix, to which gradients flow. Products read its codes as they are;
octavo's optimizers write codes and scale_inv together. Nothing else changes it, and nothing dequantises it silently; an
adapter may be merged into a frozen one.

**It keeps 8 bits that its cast rounded away (``extra_bits``) while it requires gradients or an optimizer waits for
it, until that one's first step takes them into its master.** Restore and another convert, which read all known bits,
read them too, products read codes alone. So a forward changes nothing, and a frozen weight has a byte an element.

FSDP2 (fully_shard) cuts it into shards of rows, tensor parallelism by rows or columns; each is a StoredWeight too. Per
tensor every shard has the scale of the whole; blocks have to lie on one rank each.

The matrices of a mixture's experts are one weight [E, N, K], each of them with scales of its own, as E weights [N, K]
would have. It is cut between experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import operands_of_codes
from octavo.errors import UnsupportedOpError
from octavo.formats import E4M3
from octavo.granularity import ALL, Granularity, PerTensor, tiles_along
from octavo.kernels.reference.optimizer_state import remainder_of, values_with
from octavo.numerics import E8M0, scale_from_amax, scale_inv_from_scale
from octavo.private import hooks_of, is_dtensor, set_hooks, set_local_tensor, swap_tensor_impl
from octavo.scaling.recipe import WEIGHT, Recipe
from octavo.tensor.pair import Operands, Pair, operands_of
from octavo.tensor.scaled_tensor import ScaledTensor, dequantized, quantize
from octavo.weights.bucket import FLATTENED
from octavo.weights.fsdp2 import (
    FirstHookResult,
    ShardHooks,
    Unshard,
    like_sharded,
    maximum_over_shards,
    on_this_rank,
)
from octavo.weights.reader import WeightReader
from octavo.weights.storable import (
    FROZEN_ONLY,
    STORABLE,
    first_reason,
    granularity_of_scales,
    stored_granularity,
)
from octavo.weights.stored_ops import RULES

aten = torch.ops.aten


@dataclass(eq=False)
class TrainingFacts:
    """Facts about how a weight in FP8 is trained, besides its pair. Its aliases, ``.data`` say, share one object.

    field           what it holds                                      who writes it
    extra_bits      int8 [N, K]: the bits of the cast values that      ``cast``, ``write`` and adapters, with the codes;
                    the codes do not hold                              an optimizer's first step and freezing drop them
    awaited         whether an optimizer will take extra_bits into     octavo's optimizers when the weight is added to
                    its master; False for copies                       them, or stored later (octavo/optim/)
    is_frozen       whether the parameter is not trained               ``freeze``; the setter of ``requires_grad``
    scale_is_local  whether this rank chose its shard's scale by       ``write``; ``agree_on_scale`` ends it, before the
                    itself, so that ranks have to agree on one         next gather or save
    replaced_scale  the scales that NaN has replaced, until            ``write`` of a file's codes; weights/files.py
                    load_state_dict reads those of the codes           empties it
    """

    extra_bits: Tensor | None = None
    awaited: bool = False
    is_frozen: bool = False
    scale_is_local: bool = False
    replaced_scale: Tensor | None = field(default=None, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingFacts, (self.extra_bits, False, self.is_frozen, self.scale_is_local)


class StoredWeight(ShardHooks, Pair):
    """A weight [N, K] in E4M3 codes; its scale is a power of two, of the weight or of each block of 128 x 128.

    Of experts, [E, N, K], each one's matrix has its scale, or those of its blocks.

    A frozen one that was loaded may have other scales: only the optimizers need powers of two. It may also have a scale
    for each row or block of 1 x 32: forward reads its codes, and backward what is cast from their values.

    Args:
        qdata: float8_e4m3fn [N, K] or [E, N, K], contiguous.
        scale_inv: float32 [1, 1] or [ceil(N / 128), ceil(K / 128)]; of experts [E, ...]. Of a frozen one also [N, 1]
            or, E8M0, [N, ceil(K / 32)].
        dtype: what it stands for, and its gradient's.
        granularity: which elements of a matrix share a scale; by default as the scales' shape says.
        is_shard: whether this is a rank's shard of a weight; [1, 1] is then the whole one's scale.
    """

    granularity: Granularity
    is_shard: bool
    facts: TrainingFacts
    # all that __new__, torch and octavo.convert put in its __dict__; any other attribute is a user's, see put_into
    OWN_ATTRIBUTES = frozenset(("qdata", "scale_inv", "granularity", "is_shard", "facts", "layer_name", "_is_param"))
    REMEDY = (
        "of a weight that is stored in FP8. Optimize it with octavo.optim.AdamW, which writes codes and scales "
        "together (torch.optim can't); read it with .dequantize(), to average weights (EMA), say, and write it "
        "with .copy_(values) under torch.no_grad(); initialise it so, or before octavo.convert, by functions of "
        "several steps (orthogonal_, trunc_normal_ of timm and of torch before 2.13); or keep it in high precision, "
        "which models that read a weight without calling its layer (BEiT, adapters like DoRA) need: "
        "octavo.convert(..., select=) leaves the layer out, weight_storage=None all; merge with safe_merge=True after "
        "octavo.restore(model)"
    )

    @staticmethod
    def __new__(
        cls,
        qdata: Tensor,
        scale_inv: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        granularity: Granularity | None = None,
        is_shard: bool = False,
        **attributes: Any,
    ) -> StoredWeight:
        if scale_inv is None or attributes:  # accelerate passes one tensor and a parameter's attributes, by name
            raise UnsupportedOpError(
                "a weight in FP8 can't be made anew from one tensor, as accelerate's cpu_offload and device_map do: "
                "offload it in high precision (octavo.restore(model), or octavo.convert without weight_storage)"
            )
        self = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)
        self.qdata, self.scale_inv, self.is_shard, self.facts = qdata, scale_inv, is_shard, TrainingFacts()
        if granularity is None and (granularity := granularity_of_scales(qdata.shape, scale_inv.shape)) is None:
            raise ValueError(f"scales {tuple(scale_inv.shape)} do not fit codes {tuple(qdata.shape)}")
        self.granularity = granularity
        return self

    def validate(self) -> None:
        """Raise TypeError or ValueError if codes, scales or extra bits are none that such a weight has."""
        if self.qdata.dtype != E4M3.dtype or self.ndim not in (2, 3) or self.granularity not in STORABLE + FROZEN_ONLY:
            raise ValueError(f"{self} of {self.qdata.dtype} is no weight in FP8, E4M3 [N, K] or [E, N, K]")
        if (bits := self.extra_bits) is not None and (bits.dtype, bits.shape) != (torch.int8, self.shape):
            raise ValueError(f"{self} has extra bits {bits.dtype} {tuple(bits.shape)}, not int8 of its shape")
        self.pair()  # which checks the rest: shapes, dtypes, devices

    @staticmethod
    def why_not_storable(recipe: Recipe, trained: bool = True) -> str | None:
        """Return why a recipe's weights can't be stored, or None; ``trained``: whether an optimizer writes them."""
        as_is, transposed, coincide = recipe.weight_casts
        if as_is is None or transposed is None:
            return "a product reads the weight in high precision"
        is_for_frozen = as_is.granularity in FROZEN_ONLY
        too_coarse = "so that all of a weight would be in its optimizer's master"
        layouts_differ = "its two layouts have different scales, so that one set of codes can't serve both"
        is_storable = is_for_frozen or as_is.granularity in STORABLE
        return first_reason(
            (recipe.has_e2m1, f"E2M1's neighbours lie 33 to 50 % apart, {too_coarse}: leave out weight_storage"),
            (not coincide and not is_for_frozen, layouts_differ),
            (not coincide and trained, f"{layouts_differ}; weights that are frozen before can be stored so"),
            (as_is.format != E4M3, f"its weights are {as_is.format}, and stored ones E4M3"),
            (not is_storable, f"its weights are scaled {as_is.granularity}, and stored ones per tensor or 128 x 128"),
        )

    @classmethod
    def cast(
        cls,
        weight: Tensor,
        granularity: Granularity = STORABLE[0],
        keep_extra_bits: bool = False,
        like: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> StoredWeight:
        """Cast a high-precision matrix [N, K], or experts' [E, N, K], to FP8; ValueError for other granularities.

        ``keep_extra_bits``: keep bits that rounding takes away, to 12 in all: an optimizer's master begins from them;
        ``like``: has the result's dtype. If it is a DTensor, ``weight`` is this rank's shard of it, and a scale per
        tensor is from the whole weight's amax: collective; ``amax``: [1, 1] in its place, the same on all ranks.
        """
        if granularity not in STORABLE + FROZEN_ONLY:
            raise ValueError(
                f"weights are stored per tensor or in blocks of 128 x 128, not {granularity}: only then does one set "
                "of codes serve the forward product and its gradient; frozen ones by rows or 1 x 32, too"
            )
        like = weight if like is None else like
        is_shard = amax is not None or is_dtensor(like)
        weight, tile = weight.detach().contiguous(), granularity.tile
        if is_shard and granularity == PerTensor() and weight.ndim == 2:
            amax = maximum_over_shards(kernels.amax(weight, tile), like) if amax is None else amax
            scale = scale_from_amax(amax, E4M3.max, power_of_two=True, margin=0)
            qdata, scale_inv = torch.empty_like(weight, dtype=E4M3.dtype), scale_inv_from_scale(scale).view(1, 1)
            if weight.numel():
                qdata, *_ = kernels.cast(weight, scale.view(1), 0, E4M3.dtype, tile, True, 0)
        else:
            pair = quantize(weight, E4M3, granularity.of_matrices(weight.shape), power_of_two=True)
            qdata, scale_inv = pair.qdata, pair.scale_inv.clone(memory_format=torch.contiguous_format)
        stored_by = granularity if is_shard else stored_granularity(granularity, weight.shape)
        stored = cls(qdata, scale_inv, like.dtype, stored_by, is_shard)
        if keep_extra_bits and granularity in STORABLE and not weight.is_meta:
            stored.extra_bits = remainder_of(weight, qdata.view(torch.uint8), scale_inv)
        return stored

    @property
    def extra_bits(self) -> Tensor | None:
        return self.facts.extra_bits

    @extra_bits.setter
    def extra_bits(self, bits: Tensor | None) -> None:
        self.facts.extra_bits = bits

    @property
    def requires_grad(self) -> bool:
        """Whether it needs a gradient, as for any tensor; set to False it is also frozen, see ``freeze``."""
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, trains: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, trains)  # type: ignore[attr-defined]
        if trains:
            self.facts.is_frozen = False
        else:
            self.freeze()

    def freeze(self) -> None:
        """Note that it is no longer trained, and drop ``extra_bits``, unless an optimizer waits for them.

        A tensor that is no parameter gets facts of its own, and leaves its aliases theirs: torch makes a frozen
        parameter of it, perhaps beside one that is trained.
        """
        if not isinstance(self, torch.nn.Parameter):
            self.facts = TrainingFacts()
        self.facts.is_frozen = True
        if not self.facts.awaited:
            self.extra_bits = None

    def requires_grad_(self, requires_grad: bool = True) -> StoredWeight:
        """Set ``requires_grad``, see there, and return the weight."""
        self.requires_grad = requires_grad
        return self

    def data_ptr(self) -> int:
        """Return the address of its codes, which tells parameters apart; the facade itself has no memory."""
        return self.qdata.data_ptr()

    @property
    def data(self) -> Tensor:
        """Return a detached alias; a tensor of the same values can be set, of another dtype or on another device."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: Tensor) -> None:
        if not (isinstance(other, StoredWeight) and self.equals(other)):
            raise UnsupportedOpError(f"weight.data = ... {self.REMEDY}. {FLATTENED}")
        if (other.dtype, other.device) != (self.dtype, self.device):
            self.become(other)

    def become(self, other: StoredWeight) -> None:
        """Make this parameter hold these tensors, moved perhaps; whoever awaits its ``extra_bits`` still does."""
        facts = replace(other.facts, awaited=self.facts.awaited)
        put_into(self, other)  # type: ignore[arg-type]
        self.facts = facts

    @property
    def has_one_scale(self) -> bool:
        """Whether the whole weight, with other ranks' shards of it, has one scale."""
        return self.granularity == PerTensor() and self.ndim == 2

    def scales_shape(self, shape: Sequence[int]) -> torch.Size:
        """Return the shape of the scales of a weight of this shape whose elements share them as this one's do."""
        return torch.Size(self.granularity.of_matrices(shape).scale_shape(shape))

    def pair(self) -> ScaledTensor:
        """Return the pair, over the same codes."""
        return ScaledTensor(self.qdata, self.scale_inv, self.granularity.of_matrices(self.shape), self.dtype)

    def dequantize(self) -> Tensor:
        """Return the values as a plain tensor; gradients flow through."""
        return dequantized(self)

    def before_cast(self) -> Tensor:
        """Return its values as far as they are known: to 12 bits while it has ``extra_bits``. No gradients flow."""
        if self.extra_bits is None:
            return self.pair().dequantize()
        return values_with(self.qdata.view(torch.uint8), self.scale_inv, self.extra_bits).to(self.dtype)

    def operands(self, module: WeightReader, transposed: bool) -> Operands:
        """Return its codes for the module's products; on some devices also transposed, if backward needs that."""
        if self.granularity in FROZEN_ONLY:
            return operands_of_codes((self.qdata, self.scale_inv), module.fp8.recipe, WEIGHT, transposed, amax=None)
        swaps = module.stores_transposed
        operands = operands_of(self.qdata, self.scale_inv, module.fp8.recipe.may_pad, transposed or swaps)
        return operands.swapped() if swaps else operands

    def gather_without_recipe(self, unshard: Unshard, module: torch.nn.Module) -> FirstHookResult:
        """Raise UnsupportedOpError: only octavo's modules read codes."""
        raise UnsupportedOpError(
            f"a {type(module).__name__} can't read a weight that is stored in FP8; octavo.convert(model, recipe, "
            "weight_storage='fp8') before fully_shard, and no octavo.restore after it"
        )

    def other_arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        return dtype, self.granularity, self.is_shard

    def moved(self, move: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> StoredWeight:
        """Return a copy with its tensors moved."""
        copied = self.with_tensors(move(self.qdata), move(self.scale_inv), move, dtype=dtype)
        copied.facts.awaited = False
        return copied

    def alias(self) -> StoredWeight:
        """Return a new object over the same memory."""
        view = self.with_tensors(aten.alias(self.qdata), aten.alias(self.scale_inv))
        view.facts = self.facts
        return view

    def with_tensors(
        self, qdata: Tensor, scale_inv: Tensor, make_extra_bits: Any = None, dtype: Any = None, is_shard: Any = None
    ) -> StoredWeight:
        """Return a weight of these tensors that is else like this one, but for a dtype or ``is_shard`` that is given.

        ``make_extra_bits``: makes its extra bits of this one's, if this one has any; None: it has none.
        """
        is_shard = self.is_shard if is_shard is None else is_shard
        weight = StoredWeight(qdata, scale_inv, dtype or self.dtype, self.granularity, is_shard)
        extra_bits = None if make_extra_bits is None or self.extra_bits is None else make_extra_bits(self.extra_bits)
        weight.facts = replace(self.facts, extra_bits=extra_bits)
        vars(weight).update({name: vars(self)[name] for name in ("part", "layer_name") if name in vars(self)})
        return weight

    def shard(self, start: int, stop: int, dim: int = 0) -> StoredWeight:
        """Return rows (columns: ``dim`` 1) start to stop, with the same scale per tensor; rows share the codes."""

        def cut(tensor: Tensor, first: int = start, last: int = stop) -> Tensor:
            return tensor.narrow(dim, first, last - first).contiguous()

        scale_inv = self.scale_inv
        if self.ndim == 3:
            scale_inv = cut(scale_inv)
        elif (step := self.granularity.tile[dim]) != ALL:
            if start % step or (stop % step and stop != self.shape[dim]):
                what = "rows" if dim == 0 else "columns"
                raise UnsupportedOpError(f"{what} {start} to {stop} of {self} are no whole blocks")
            scale_inv = cut(scale_inv, start // step, tiles_along(stop, step))
        return self.with_tensors(cut(self.qdata), scale_inv, cut, is_shard=True)

    def rows(self, start: int, stop: int) -> StoredWeight:
        """Return a copy of rows start to stop as a weight of its own; its scale per tensor is this one's at first."""
        part = self.shard(start, stop)  # over this one's memory
        return part.with_tensors(part.qdata.clone(), part.scale_inv.clone(), torch.clone, is_shard=False)

    def equals(self, other: StoredWeight) -> bool:
        """Whether another one has the same values, as far as they are known."""
        if self.is_meta or other.is_meta:
            return (self.device, self.shape) == (other.device, other.shape)
        extra_bits = [one.extra_bits.to(self.device) for one in (self, other) if one.extra_bits is not None]
        same = torch.equal(*extra_bits) if len(extra_bits) == 2 else not any(bits.any() for bits in extra_bits)
        pairs = [(one.qdata.view(torch.uint8), one.scale_inv.float()) for one in (self, other)]
        return same and all(torch.equal(a, b.to(a.device)) for a, b in zip(*pairs, strict=True))

    def may_have(self, scale_inv: Tensor) -> bool:
        """Whether it may have these scales: a frozen parameter any that its dtype holds, others powers of two."""
        return (self.facts.is_frozen and self.scale_inv.dtype != E8M0) or has_powers_of_two(scale_inv)

    def write(self, other: Any) -> StoredWeight:
        """Write another's values, unless the weight has them: its scale then stays, on which a master's rest depends.

        other                          what is written        the scale of a shard that is per tensor is then
        a stored weight whose scales   its codes and scales   the whole weight's, if ``other`` is a shard that has
        this one may have                                     it; else this rank's own
        any other stored weight, or    what they are cast to  this rank's own
        values
        uint8, for a shard             a file's codes         NaN, until load_state_dict reads the file's
        """
        if self.is_meta:
            return self
        is_stored = isinstance(other, StoredWeight)
        takes_scales = is_stored and other.scale_inv.shape == self.scale_inv.shape and self.may_have(other.scale_inv)
        # ranks of one scale get the same answer, since they hold the same scales; a rank that cast alone says so
        has_scale_of_whole = takes_scales and other.is_shard and not other.facts.scale_is_local
        self.facts.scale_is_local = self.is_shard and self.has_one_scale and not has_scale_of_whole
        if takes_scales:
            if not self.equals(other):
                self._write_stored(other)
        elif self.is_shard and other.dtype == torch.uint8:
            self._write_codes(other)
        else:
            values = (other.before_cast() if is_stored else other).to(self.device).expand(self.shape)
            if not torch.equal(self.before_cast(), values.to(self.dtype)):
                self._write_stored(StoredWeight.cast(values, self.granularity, not self.facts.is_frozen))
        return self

    def _write_stored(self, other: StoredWeight) -> None:
        """Copy a stored weight's codes, scales and extra bits; broadcast or refuse another shape as any copy_ does."""
        self.qdata.view(torch.uint8).copy_(other.qdata.view(torch.uint8))
        self.scale_inv.copy_(other.scale_inv)
        if self.extra_bits is not None and other.extra_bits is not None:
            self.extra_bits.copy_(other.extra_bits)  # of a view of rows, as FSDP2 fills its shards
        elif self.extra_bits is not None:
            self.extra_bits.zero_()
        elif other.extra_bits is not None and not self.facts.is_frozen:
            self.extra_bits = torch.empty_like(self.qdata, dtype=torch.int8).copy_(other.extra_bits)
        torch.autograd.graph.increment_version([self.qdata])  # which does not happen by itself below autograd

    def _write_codes(self, codes: Tensor) -> None:
        """Write a file's codes from torch.distributed.checkpoint: all is NaN until load_state_dict reads scales."""
        if codes.shape[:-2] + codes.shape[-1:] != self.shape:
            raise UnsupportedOpError(
                f"codes {tuple(codes.shape)} are no {tuple(self.shape)}: torch cuts a full state dict's codes by rows, "
                "and this weight is sharded by columns. Give its values (octavo.restore before state_dict), or load by "
                "octavo.export.load_fp8 or octavo.distributed.checkpoint"
            )
        self.qdata.view(torch.uint8).copy_(codes.squeeze(-2))
        self.facts.replaced_scale = self.scale_inv.clone()
        self.scale_inv.fill_(torch.nan)
        self.extra_bits = None
        torch.autograd.graph.increment_version([self.qdata])

    def share_memory_(self) -> StoredWeight:
        """Move its tensors to shared memory."""
        for tensor in filter(lambda one: one is not None, (self.qdata, self.scale_inv, self.extra_bits)):
            tensor.share_memory_()  # type: ignore[union-attr]
        return self

    def is_shared(self) -> bool:
        """Whether its codes are in shared memory; the facade itself has no memory."""
        return self.qdata.is_shared()

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeight:
        if id(self) not in memo:  # torch's own takes a tensor with an address for one with memory
            if not self.is_leaf:
                raise RuntimeError("only weights that are leaves of autograd's graph can be copied: detach() it first")
            copied = memo[id(self)] = self.moved(lambda tensor: tensor).requires_grad_(self.requires_grad)
            copied.__dict__ = copy.deepcopy(self.__dict__, memo)
            if self.grad_dtype != self.dtype:  # else it follows the weight's dtype
                copied.grad_dtype = self.grad_dtype
            copied.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredWeight({tuple(self.shape)}, {self.dtype}, {self.granularity})"


def has_powers_of_two(scale_inv: Tensor) -> bool:
    """Whether all scales are powers of two, as those of a weight that is trained must be."""
    return scale_inv.is_meta or bool((torch.frexp(scale_inv.float())[0] == 0.5).all())


def local_stored(weight: Any) -> StoredWeight | None:
    """Return a weight that is a StoredWeight, or this rank's shard of a sharded one; else None."""
    local = on_this_rank(weight)
    return local if isinstance(local, StoredWeight) else None


def _read_values(func: Any, *args: Any) -> Tensor:
    """Apply the rule of comparisons, which trunc_normal_ of torch >= 2.13 makes: to values of all known bits."""
    return func(*(one.before_cast() if isinstance(one, StoredWeight) else one for one in args))


StoredWeight.RULES = {
    **RULES,
    aten.copy_.default: lambda _, to, other, *__: to.write(other) if isinstance(to, StoredWeight) else NotImplemented,
    **dict.fromkeys((aten.lt.Scalar, aten.gt.Scalar, aten.where.self), _read_values),
}
torch.serialization.add_safe_globals([StoredWeight, TrainingFacts])


def agree_on_scale(param: Tensor, just_cut: bool = False) -> None:
    """Give this rank's shard of a weight the scale of the whole, if its scale is this rank's alone; collective.

    Ranks choose their own where FSDP2 has ``just_cut`` it, as they may have begun with other values, and in writes.
    """
    if (shard := local_stored(param)) is None or shard.is_meta:
        return
    if shard.has_one_scale and (just_cut or shard.facts.scale_is_local):
        largest, negated_smallest = maximum_over_shards(torch.cat([shard.scale_inv, -shard.scale_inv]), param)
        if largest != -negated_smallest:
            value = shard.before_cast()
            amax = maximum_over_shards(kernels.amax(value.contiguous(), PerTensor().tile), param)
            keep_extra_bits = shard.extra_bits is not None or param.requires_grad
            shard.write(StoredWeight.cast(value, PerTensor(), keep_extra_bits, param, amax))
    shard.facts.scale_is_local = False


def stored_as(weight: Tensor | None) -> Granularity | None:
    """Return which elements of a weight in FP8 share a scale; None for a weight in high precision."""
    return getattr(local_stored(weight), "granularity", None)


def store(param: torch.nn.Parameter | None, granularity: Granularity | None) -> None:
    """Put a weight without a master into FP8, or back (None), unless it is so; of a sharded one all ranks call it."""
    if param is None or stored_as(param) == granularity:
        return
    stored = local_stored(param)
    values = on_this_rank(param).detach() if stored is None else stored.before_cast()
    if granularity is not None:
        values = StoredWeight.cast(values, granularity, param.requires_grad, param)
    put_into(param, values)


def put_into(parameter: torch.nn.Parameter, tensor: Tensor) -> None:
    """Make a parameter hold other values, of another class or dtype perhaps (a plain weight as a StoredWeight).

    The object stays, and so do its hooks, its gradient, ``requires_grad`` and whatever attributes a user gave it. Weak
    references to it hold too, which is why this isn't torch.utils.swap_tensors. A backward pass of a forward that read
    the old values raises RuntimeError: its gradient would reach nobody.

    ``parameter`` is a leaf; it takes the memory of ``tensor``, which is of its shape. Of a sharded one, which keeps all
    the rest, ``tensor`` is this rank's shard.
    """
    if is_dtensor(parameter):
        set_local_tensor(parameter, tensor)
        return
    other = torch.nn.Parameter(tensor.detach(), parameter.requires_grad)
    grad, grad_dtype = parameter.grad, parameter.grad_dtype
    chose_grad_dtype = grad_dtype != parameter.dtype  # else it follows the parameter's dtype
    hooks = hooks_of(parameter)
    of_class = getattr(type(parameter), "OWN_ATTRIBUTES", ("_is_param",))
    attributes = {name: value for name, value in vars(parameter).items() if name not in of_class}  # of its user
    if parameter.requires_grad:
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_refuse)
    parameter.__class__, other.__class__ = type(other), type(parameter)
    parameter.__dict__, other.__dict__ = vars(other) | attributes, dict(vars(parameter))
    swap_tensor_impl(parameter, other)
    set_hooks(parameter, hooks)
    if parameter.requires_grad and chose_grad_dtype:
        parameter.grad_dtype = grad_dtype
    parameter.grad = grad


def _refuse(gradients: Any) -> NoReturn:
    raise RuntimeError(
        "a backward pass reached a parameter that holds another tensor since the forward (its storage changed): run "
        "forward again. DistributedDataParallel has to be made after such a change"
    )


@torch.no_grad()
def take_values(target: Tensor, values: Tensor) -> None:
    """Copy this rank's part of new values into a tensor; a parameter on the meta device takes them as they are."""
    if on_this_rank(target).is_meta:
        put_into(target, values)  # type: ignore[arg-type]
    else:
        target.copy_(like_sharded(values, target, target.shape))
