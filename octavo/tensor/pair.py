"""Pair: the base of the tensors that are FP8 codes behind the facade of a high-precision tensor.

    ScaledTensor      the pair that a user sees, of any granularity
    StoredWeight      a parameter that lives in FP8
    StoredGradient    a gradient that waits in FP8

OperandsFacade (the operands of products) and UsedGradient (a norm alone) are facades too. Each says in its ``RULES``
what torch may do with it. Any other op raises: nothing dequantises silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from octavo.errors import UnsupportedOpError
from octavo.formats import Format, format_of
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes, with_padding
from octavo.kernels.layouts import transposed as transposed_copy
from octavo.numerics import E8M0
from octavo.private import no_torch_function

aten = torch.ops.aten

# Takes the op and its arguments; returns the op's result, or NotImplemented for arguments that it has none for.
AtenRule = Callable[..., Any]


class WeightSource(NamedTuple):
    """The tensor that backward casts a weight's transposed codes from, if the weight is freed after forward.

    ``tensor`` is saved: the weight [..., N, K], or [..., K, N] if ``is_swapped``. ``delayed_scale`` [3]: the scales
    that forward's cast read; None where the weight's own amax gave its scale.
    """

    tensor: Tensor
    is_swapped: bool
    delayed_scale: Tensor | None


class NormResults(NamedTuple):
    """The results of a norm of x [T, K] beside its pairs: each row's mean (of a layer norm) and rstd, and y if kept."""

    mean: Tensor
    rstd: Tensor
    y: Tensor | None


class Operands(NamedTuple):
    """A tensor as two products read it, and what its cast computed in the same read; None where it isn't needed.

    Tensors that backward reads are saved as they are: FSDP2 may refill a gathered weight's while a backward reads them.

    Attributes:
        as_is, transposed: for products: the pair (qdata, scale_inv) as the tensor lies, and of its transpose.
        amax: for the delayed state: [1, 1] fp32, of a Delayed cast.
        column_sum: for a bias's gradient: [C] of the tensor's dtype, where the cast could compute it.
        norm: for a norm's gradient, or its readers: the norm's other results.
        recast_scale, recast_codes: of an activation that backward casts again, see autograd/casts.py, Recast.
        source: of a weight that is freed after forward: what backward casts ``transposed`` from.
    """

    as_is: tuple[Tensor, Tensor] | None = None
    transposed: tuple[Tensor, Tensor] | None = None
    amax: Tensor | None = None
    column_sum: Tensor | None = None
    norm: NormResults | None = None
    recast_scale: Tensor | None = None
    recast_codes: Tensor | None = None
    source: WeightSource | None = None

    def swapped(self) -> Operands:
        """Return the operands of the tensor's transpose: the same, each in the other's place."""
        return self._replace(as_is=self.transposed, transposed=self.as_is)


def transposed_pair(qdata: Tensor, scale_inv: Tensor, may_pad: bool) -> tuple[Tensor, Tensor]:
    """Return a pair [..., R, C] as the product reads it that contracts R; on some devices a view.

    ``may_pad``: whether the contraction may be padded, as the device wants it.
    """
    if not needs_transposed_codes(qdata.device):
        return qdata.mT, scale_inv.mT
    return with_padding(transposed_copy(qdata), contraction_multiple(qdata.device, may_pad)), scale_inv.mT


def operands_of(qdata: Tensor, scale_inv: Tensor, may_pad: bool, transposed: bool = True) -> Operands:
    """Return the operands of one pair [..., R, C]; ``transposed``: whether that is needed where it is no view."""
    pad = contraction_multiple(qdata.device, may_pad)
    has_transposed = transposed or not needs_transposed_codes(qdata.device)
    pair_t = transposed_pair(qdata, scale_inv, may_pad) if has_transposed else None
    return Operands((with_padding(qdata, pad), scale_inv), pair_t)


class Facade(Tensor):
    """A tensor that has a shape, a dtype and a device, and no memory of its own."""

    RULES: ClassVar[dict[Any, AtenRule]]
    REMEDY: ClassVar[str]  # the message of an op without a rule, after the op's name
    layer_name: str = ""  # of the layer whose weight it is, where that is known

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        # composites (mT, chunk, to) arrive whole in inference mode
        result = cls.RULES.get(func, func.__class__.decompose)(func, *args, **(kwargs or {}))
        if result is NotImplemented:
            names = [f"{one.layer_name}: " for one in args if isinstance(one, Facade) and one.layer_name]
            raise UnsupportedOpError(f"{''.join(names[:1])}{func} {cls.REMEDY}")
        return result

    # torch functions go straight to aten: the rules decide there
    __torch_function__ = no_torch_function

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the facade of the tensors that ``move`` makes of those behind this one."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"


class OperandsFacade(Facade):
    """A facade that has the operands of products alone, and to which gradients flow.

    Each tensor of its operands is an attribute, or None: so compiled graphs, which hold tensors alone, take it apart.
    ``shape`` and ``dtype`` are those of the tensor that they stand for; ``operands_amax`` is Operands' ``amax``, a name
    that tensors have for a method; ``casts``: a weight's Casts, as text.
    """

    qdata: Tensor
    scale_inv: Tensor
    transposed_qdata: Tensor | None
    transposed_scale_inv: Tensor | None
    operands_amax: Tensor | None
    column_sum: Tensor | None
    casts: str

    @staticmethod
    def __new__(cls, operands: Operands, shape: Sequence[int], dtype: torch.dtype, casts: str = "") -> Self:
        assert operands.as_is is not None
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=operands.as_is[0].device)
        tensors = *operands.as_is, *(operands.transposed or (None, None)), operands.amax, operands.column_sum
        vars(self).update(zip(_TENSORS, tensors, strict=True), casts=casts)
        return self

    def read(self) -> Operands:
        """Return the operands that products read."""
        pair_t: Any = None if self.transposed_qdata is None else (self.transposed_qdata, self.transposed_scale_inv)
        return Operands((self.qdata, self.scale_inv), pair_t, self.operands_amax, self.column_sum)

    def moved(self, move: Any) -> Self:
        """Return a new facade of the very same tensors; ``move`` is an op of MOVES, an alias."""
        assert move in MOVES
        return type(self)(self.read(), self.shape, self.dtype, self.casts)

    def with_shape(self, shape: Sequence[int]) -> Self:
        """Return a new facade of the very same tensors, for a tensor of another shape.

        torch infers a size of -1, and raises RuntimeError for another number of elements.
        """
        if math.prod(shape) != self.numel():
            shape = torch.empty(self.shape, device="meta").view(*shape).shape
        return type(self)(self.read(), shape, self.dtype, self.casts)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in _TENSORS if getattr(self, name) is not None], (self.dtype, self.casts)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any) -> Self:
        q, scale_inv, q_t, scale_inv_t, amax, column_sum = map(inner.get, _TENSORS)
        pair_t = None if q_t is None else (q_t, scale_inv_t)
        return cls(Operands((q, scale_inv), pair_t, amax, column_sum), outer_size, *context)  # type: ignore[arg-type]


_TENSORS = "qdata", "scale_inv", "transposed_qdata", "transposed_scale_inv", "operands_amax", "column_sum"


class Pair(Facade):
    """A facade of ``qdata``, float8, and ``scale_inv``, which its class takes first.

    Its class has a method ``validate``, which raises TypeError or ValueError if these do not fit.
    """

    qdata: Tensor
    scale_inv: Tensor

    def other_arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the arguments that its class takes after the pair, to read back to ``dtype``."""
        raise NotImplementedError

    @property
    def format(self) -> Format:
        """Return the format of the codes."""
        return format_of(self.qdata.dtype)

    def moved(self, move: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """Return the pair of codes and scale_inv after ``move``, perhaps to read back to another dtype."""
        return type(self)(move(self.qdata), move(self.scale_inv), *self.other_arguments(dtype or self.dtype))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["qdata", "scale_inv"], self.other_arguments(self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], arguments: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> Self:
        return cls(inner["qdata"], inner["scale_inv"], *arguments)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # as bytes: plain pickle can't load a float8 storage (torch 2.13)
        codes, scale_inv = self.qdata.detach().view(torch.uint8), self.scale_inv.detach()
        scale_inv = scale_inv.view(torch.uint8) if scale_inv.dtype == E8M0 else scale_inv
        kind = self.requires_grad, isinstance(self, torch.nn.Parameter)
        arguments = type(self), codes, self.qdata.dtype, scale_inv, self.other_arguments(self.dtype), *kind
        others = {name: value for name, value in vars(self).items() if name not in ("qdata", "scale_inv")}
        return rebuild_pair, (*arguments, others)


def rebuild_pair(
    kind: type[Pair],
    codes: Tensor,
    code_dtype: torch.dtype,
    scale_inv: Tensor,
    arguments: tuple[Any, ...],
    requires_grad: bool,
    is_parameter: bool,
    others: dict[str, Any] | None = None,
) -> Tensor:
    """Unpickle a pair from its two tensors and its other attributes, a user's too; raise for tensors that do not fit.

    A stranger may have written the file, and kernels read as many scales as the codes' shape says.
    """
    scale_inv = scale_inv.view(E8M0) if scale_inv.dtype == torch.uint8 else scale_inv
    pair: Any = kind(codes.view(code_dtype), scale_inv, *arguments)
    pair = torch.nn.Parameter(pair, requires_grad) if is_parameter else pair.requires_grad_(requires_grad)
    vars(pair).update(others or {}, qdata=pair.qdata, scale_inv=pair.scale_inv)
    pair.validate()
    return pair


def moves(func: Any, facade: Facade, shape: Sequence[int] | None = None, *_: Any) -> Any:
    """Apply the rule of ops that leave codes and scale_inv where they are: aliases, views of the same shape."""
    if shape is None:
        return facade.moved(func)
    return facade.moved(aten.alias.default) if tuple(shape) == tuple(facade.shape) else NotImplemented


def copies(func: Any, pair: Pair, *, dtype: torch.dtype | None = None, **options: Any) -> Pair:
    """Apply the rule of copies, perhaps to another device or another dtype to read back to; the codes stay."""
    memory_format = options.pop("memory_format", None) or torch.preserve_format

    def move(tensor: Tensor) -> Tensor:
        # scales too, as views merge leading dimensions of contiguous codes; those of a matrix may lie by columns
        if tensor is pair.qdata or (tensor.ndim > 2 and memory_format == torch.contiguous_format):
            return func(tensor, **options, memory_format=memory_format)
        return func(tensor, **options)

    return pair.moved(move, dtype)


def plain_like(func: Any, facade: Tensor, **options: Any) -> Tensor:
    """Apply the rule of zeros_like and its kind: a plain tensor, for a gradient of zeros or an optimizer's state."""
    options = {"dtype": facade.dtype, "device": facade.device} | options
    options.pop("memory_format", None)
    return _NEW[func](facade.shape, **options)


def gradient_rules(kind: type[Facade], write: AtenRule, add: AtenRule, norm: AtenRule) -> dict[Any, AtenRule]:
    """Return rules for all that torch and trainers do with gradients: accumulate, clip, scale, zero, one or a list.

    ``kind``: the gradients that the rules are for; others in a list are left to torch. ``write(func, gradients)``
    zeroes a list of them, ``write(func, gradients, factor)`` scales it.
    """

    def in_place(func: Any, gradients: Any, *factor: Any) -> Any:
        if isinstance(gradients, Tensor):
            return NotImplemented if write(func, [gradients], *factor) is NotImplemented else gradients
        if write(func, [gradient for gradient in gradients if isinstance(gradient, kind)], *factor) is NotImplemented:
            return NotImplemented
        if others := [gradient for gradient in gradients if not isinstance(gradient, kind)]:
            func(others, *factor)
        return None

    def norms(func: Any, gradients: Sequence[Tensor], ord: Any = 2, dtype: Any = None) -> list[Tensor]:
        return [torch.linalg.vector_norm(gradient, ord, dtype=dtype) for gradient in gradients]

    return {
        **dict.fromkeys((aten.zero_.default, aten._foreach_zero_.default, *MULTIPLICATIONS, *DIVISIONS), in_place),
        **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor), add),
        aten.linalg_vector_norm.default: norm,
        aten._foreach_norm.Scalar: norms,
    }


MULTIPLICATIONS = {aten.mul_.Tensor, aten.mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar}
DIVISIONS = {aten.div_.Tensor, aten.div_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.Scalar}

_NEW: dict[Any, Callable[..., Tensor]] = {
    aten.zeros_like.default: torch.zeros,
    aten.empty_like.default: torch.empty,
    aten.ones_like.default: torch.ones,
}
PLAIN_LIKE: dict[Any, AtenRule] = dict.fromkeys(_NEW, plain_like)

MOVES: dict[Any, AtenRule] = dict.fromkeys((aten.detach.default, aten.alias.default), moves)
COPIES: dict[Any, AtenRule] = dict.fromkeys((aten.clone.default, aten._to_copy.default), copies)

OperandsFacade.RULES = {
    **MOVES,
    # views that leave the features alone
    aten.view.default: lambda _, x, shape: x.with_shape(shape) if shape[-1] == x.shape[-1] else NotImplemented,
    # torch.autograd.detect_anomaly asks it of gradients
    aten.isnan.default: lambda _, x: x.qdata[:, : x.shape[-1]].to(torch.float32).isnan().view(x.shape),
}

torch.serialization.add_safe_globals([rebuild_pair])
