"""The ops' flat arguments, unpacked once: what is cast, how, and what is written. signatures.py says what each is.

The reference, the Triton kernels, the fakes and onnx.py take these values, and the first three allocate their
results by the functions here. In this order:

    values       CastSource, NormSource, RotaryHeads (each a Castable), Scaling, Output, CastTarget, Commit;
                 CastLists; CountedCast, WatchedOperand; OperandPair, ProductArguments, GroupedOperands; NormGradient;
                 LossRows, before its parser
    parsing      _unpack_OP: an op's flat arguments to the values that its kernels take, after the checks that need
                 more than one of them; _source_of, _scaling_options and _with_heads each take some of cast's
    by op name   UNPACK and ``unpacking``, by which a kernel of values becomes one of flat arguments
    allocation   NewTensor and ``allocated``; new_OP: an op's results, unwritten; ``_results_of`` has a cast's shapes
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from octavo.formats import E2M1, HIGH_PRECISION, format_of
from octavo.granularity import ALL, NV, Tile, check_packed, granularity_of, scale_shape, tiles_along
from octavo.kernels.activations import cast_shape
from octavo.kernels.checks import (
    WITH_MEMORY,
    check_codes_of_loss,
    check_grid,
    check_norm,
    check_product,
    check_shape,
    check_sizes,
    check_state,
    check_terms,
)
from octavo.kernels.groups import check_offsets_kind, grouped_scale_shape, padded_columns
from octavo.kernels.layouts import padded_size, plain_scales, swizzled_size, unpacked_shape
from octavo.numerics import E8M0, scale_from_amax, scale_inv_dtype


class Counted:
    """The numbers that cast_statistics and note_faults add up or raise; reference/cast_statistics.py explains them."""

    sums = ("elements", "zeros", "flushed", "clipped", "nonfinite", "power", "error")
    extremes = ("amax", "scale_inv", "scale")
    exponents = 64  # bins of the exponents floor(log2 |x|) of finite numbers other than 0
    lowest = -48  # the first bin's exponent; it counts smaller exponents too, and the last bin larger ones
    faults = ("faulty", "rows", "scale_inv", "amax")


class CastSource(NamedTuple):
    """The source of a cast: x itself, an activation of it, or the gradient of an activation's input."""

    x: Tensor
    activation: str = ""
    preactivation: Tensor | None = None
    h_scale_inv: Tensor | None = None
    h_tile: Sequence[int] = (ALL, ALL)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [R, C] of the values that are cast."""
        h = None if self.preactivation is None else self.preactivation.shape
        return cast_shape(self.x.shape, self.activation, h, self.h_scale_inv is not None)

    def part(self, rows: slice, scale_rows: slice) -> CastSource:
        """Return the source of some rows, whose scales in h_scale_inv are these."""
        h = None if self.preactivation is None else self.preactivation[rows]
        scale_inv = None if self.h_scale_inv is None else self.h_scale_inv[scale_rows]
        return CastSource(self.x[rows], self.activation, h, scale_inv, self.h_tile)


class NormSource(NamedTuple):
    """The source of a cast: a norm of x."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    kind: str
    eps: float
    zero_centered: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [R, C] of the values that are cast."""
        return self.x.shape[0], self.x.shape[1]


class RotaryHeads(NamedTuple):
    """Queries, keys and values [B, S, heads, D], and the angles by which the first two are turned, or turned back.

    As the source of a cast these are gradients that are turned back, beside each other as a matrix.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    inverse: bool

    @property
    def x(self) -> Tensor:
        """The first of the tensors, for a device and a dtype."""
        return self.q

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [B S, all heads x D] of the values that are cast."""
        batch, positions, heads, width = self.q.shape
        return batch * positions, (heads + self.k.shape[2] + self.v.shape[2]) * width


Castable = CastSource | NormSource | RotaryHeads


class Scaling(NamedTuple):
    """The codes' dtype, and how their scale is chosen; a delayed_scale is read at its element ``role``.

    ``rotation``, ``seed``, ``place``: of E2M1, see signatures.py.
    """

    dtype: torch.dtype
    tile: Tile
    power_of_two: bool
    margin: int
    delayed_scale: Tensor | None = None
    role: int = 0
    swizzles: bool = False
    rotation: int | None = None
    seed: int | None = None
    place: Sequence[int] = (0, 0)

    @property
    def is_packed(self) -> bool:
        """Whether two codes lie in a byte, along the contraction."""
        return self.dtype is E2M1.dtype

    @property
    def scale_inv_dtype(self) -> torch.dtype:
        """The dtype of scale_inv as it is written."""
        return scale_inv_dtype(self.tile, self.power_of_two, self.is_packed)

    def scale_of(self, amax: Tensor) -> Tensor:
        """Return the delayed scale; else, or where that is 0, the scales of ``amax``. Of E2M1 they are outer scales."""
        delayed = None if self.delayed_scale is None else self.delayed_scale[self.role]
        return scale_from_amax(amax, format_of(self.dtype).limit, self.power_of_two, self.margin, delayed)


class Output(NamedTuple):
    """The results that a cast writes beside the codes as x lies.

    ``transpose``: write transposed codes too; with two scalings the second's codes are written only transposed.
    ``column_sum``: the sums of columns. ``keep``: a norm's y; of what is no norm its one scale. ``as_is``: whether
    codes of rows in groups are written as they lie. ``recast``: the scaling by which a cast of an activation's gradient
    casts the activation too, into one layout.
    """

    transpose: bool = False
    pad: int = 1
    column_sum: bool = False
    keep: bool = False
    as_is: bool = True
    recast: Scaling | None = None
    recast_transposed: bool = False


class CastTarget(NamedTuple):
    """The tensors that a matrix [R, C] is cast into: codes as it lies and transposed, [0, 0] where not asked for.

    ``amax``, like ``scale_inv``, has an element for each of the matrix's tiles, however these lie; of E2M1 one in all.
    """

    scaling: Scaling
    codes: Tensor
    transposed: Tensor
    scale_inv: Tensor
    amax: Tensor


class Commit(NamedTuple):
    """The delayed state that an op rolls, the amax of forward's casts, and how next scales are made."""

    delayed_scale: Tensor
    delayed_amax_history: Tensor
    delayed_before: Tensor
    amax_input: Tensor | None
    amax_weight: Tensor | None
    limits: Sequence[float]
    powers_of_two: Sequence[bool]
    margins: Sequence[int]
    reduce: str


class CastLists(NamedTuple):
    """Tensors to cast at once, their outputs and scales; ``transposed`` and ``delayed_scales`` may be empty."""

    xs: Sequence[Tensor]
    qdata: Sequence[Tensor]
    transposed: Sequence[Tensor]
    scale_inv: Sequence[Tensor]
    amax: Sequence[Tensor]
    delayed_scales: Sequence[Tensor]


class CountedCast(NamedTuple):
    """A tensor and what it was cast into, and the counts to which that cast's are added; see signatures.py."""

    x: Tensor
    qdata: Tensor
    scale_inv: Tensor
    tile: Sequence[int]
    sums: Tensor
    extremes: Tensor
    offsets: Tensor | None = None


class WatchedOperand(NamedTuple):
    """An operand whose faults are looked for by its product's result, and where they are noted; see signatures.py."""

    y: Tensor
    operand: Tensor
    scale_inv: Tensor | None
    amax: Tensor | None
    place: Tensor
    faults: Tensor
    first: Tensor
    offsets: Tensor | None = None


class OperandPair(NamedTuple):
    """An operand of a product, [rows, K]."""

    codes: Tensor
    scale_inv: Tensor
    tile: Tile

    @property
    def scale_inv_dtype(self) -> torch.dtype:
        """The dtype of scale_inv as it is read."""
        return self.scale_inv.dtype

    def plain(self) -> OperandPair:
        """Return the pair with scales that are not swizzled."""
        return OperandPair(self.codes, plain_scales(self.scale_inv, self.codes.shape, self.tile), self.tile)


def have_e8m0_blocks(*operands: Any) -> bool:
    """Whether all operands' scales are E8M0, of blocks along the contraction; each is an OperandPair or a Cast.

    The tensor cores of GPUs after Hopper multiply by such scales themselves.
    """
    return all(one.scale_inv_dtype is E8M0 and one.tile[1] != ALL for one in operands)


class ProductArguments(NamedTuple):
    """The operands that a product multiplies, and the bias that it adds."""

    a: OperandPair
    b: OperandPair
    bias: Tensor | None

    def plain(self) -> ProductArguments:
        """Return the arguments with scales that are not swizzled."""
        if self.a.scale_inv.ndim != 1 and self.b.scale_inv.ndim != 1:
            return self
        return ProductArguments(self.a.plain(), self.b.plain(), self.bias)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the product."""
        return self.a.codes.shape[0], self.b.codes.shape[0]


class GroupedOperands(NamedTuple):
    """The operands of a grouped product: a's rows in groups by b's matrices, or both along a contraction in groups."""

    a: OperandPair
    b: OperandPair
    offsets: Tensor
    bias: Tensor | None
    pad: int = 1

    @property
    def has_ragged_rows(self) -> bool:
        """Whether a's rows are in groups; else the contraction is."""
        return self.b.codes.ndim == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the product."""
        rows = self.a.codes.shape[0]
        if self.has_ragged_rows:
            return rows, self.b.codes.shape[1]
        return self.offsets.shape[0], rows, self.b.codes.shape[0]


class NormGradient(NamedTuple):
    """The arguments that the gradient of a norm is computed from."""

    dy: Tensor
    x: Tensor
    gamma: Tensor
    mean: Tensor
    rstd: Tensor
    kind: str
    zero_centered: bool
    with_beta: bool
    residual: Tensor | None = None


def _source_of(
    x: Tensor,
    transpose: bool = False,
    pad: int = 1,
    column_sum: bool = False,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] = (ALL, ALL),
    *,
    keep: bool = False,
    offsets: Tensor | None = None,
    as_is: bool = True,
    **named: Any,
) -> tuple[CastSource, Output, dict[str, Any]]:
    """Return (x or the function of it that is cast, Output, other named arguments) of the flat arguments of an op."""
    if h_scale_inv is not None:
        h = x if preactivation is None else preactivation
        _check_scales("h_scale_inv", h, h_scale_inv, h_tile, None if offsets is None else offsets.shape[0])
    source = CastSource(x, activation, preactivation, h_scale_inv, h_tile)
    return source, Output(transpose, pad, column_sum, keep, as_is), named


def _unpack_cast(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    *flat: Any,
    offsets: Tensor | None = None,
    **named: Any,
) -> tuple[Any, ...]:
    """Return (source, first scaling, second or None, output, offsets) of the flat arguments of the op ``cast``."""
    if delayed_scale is not None and (delayed_scale.dtype != torch.float32 or not 0 <= role < delayed_scale.numel()):
        raise ValueError(f"delayed_scale {list(delayed_scale.shape)}, {delayed_scale.dtype}: role {role} is no element")
    tensor_source, output, named = _source_of(x, *flat, offsets=offsets, **named)
    first = Scaling(dtype, (tile[0], tile[1]), power_of_two, margin, delayed_scale, role)
    if not (named or output.keep or not output.as_is or offsets is not None or dtype is E2M1.dtype):
        return tensor_source, first, None, output, None
    # ``named`` is this call's own dict: each of these takes its arguments out, and what is left is k, v, cos and sin
    options, second = _scaling_options(named)
    first = Scaling(*first[:6], *options)
    kind, gamma, beta = named.pop("kind", ""), named.pop("gamma", None), named.pop("beta", None)
    eps, zero_centered = named.pop("eps", 0.0), named.pop("zero_centered", False)
    source, output = _with_heads(tensor_source, output, named, gamma=gamma, offsets=offsets)
    column_sum = output.column_sum
    if gamma is not None:
        _refuse("a norm is cast", activation=tensor_source.activation, column_sum=column_sum, offsets=offsets)
        check_norm(x, kind, gamma, beta=(beta, "C"))
        source = NormSource(x, gamma, beta, kind, eps, zero_centered)
    else:
        _refuse("no gamma is given", kind=kind)
    if first.tile != (ALL, ALL) or offsets is not None or second is not None:
        _refuse("there is not one scale", keep=output.keep and gamma is None, recast_scale=output.recast)
    if second is not None:
        _refuse("there are two scalings", delayed_scale=delayed_scale, offsets=offsets)
    if offsets is not None:
        _refuse("rows are in groups", column_sum=column_sum)
        _check_groups(tensor_source, first, offsets)
    elif not output.as_is:
        raise ValueError("as_is=False is not taken where rows are in no groups: cast x.t()")
    # by dtypes, as properties are calls
    if first.swizzles or first.dtype is E2M1.dtype or (second is not None and second.dtype is E2M1.dtype):
        _check_scalings(first, second, output, offsets)
    return source, first, second, output, offsets


def _scaling_options(named: dict[str, Any]) -> tuple[tuple[Any, ...], Scaling | None]:
    """Return (the first Scaling's fields from swizzles on, the second Scaling or None), taken out of ``named``."""
    swizzles, place = named.pop("swizzle", False), named.pop("place", (0, 0))
    first = swizzles, named.pop("rotation", None), named.pop("seed", None), place
    dtype, tile = named.pop("second_dtype", None), named.pop("second_tile", (ALL, ALL))
    power_of_two, margin = named.pop("second_power_of_two", False), named.pop("second_margin", 0)
    others = swizzles, named.pop("second_rotation", None), named.pop("second_seed", None), place
    return first, None if dtype is None else Scaling(dtype, (tile[0], tile[1]), power_of_two, margin, None, 0, *others)


def _check_scalings(first: Scaling, second: Scaling | None, output: Output, offsets: Tensor | None) -> None:
    """Raise ValueError for what has no swizzled scales, or whose codes could not lie in pairs along the contraction."""
    if first.swizzles and (offsets is not None or not have_e8m0_blocks(first, second or first)):
        raise ValueError("swizzle: of rows in no groups, in blocks of 1x32 or 32x1 whose scales are powers of two")
    for scaling, is_transposed in (first, output.transpose and second is None), (second, output.transpose):
        if scaling is None or not scaling.is_packed:
            continue
        tile = scaling.tile[::-1] if is_transposed else scaling.tile
        check_packed(granularity_of(tile), scaling.power_of_two, "transposed, " * is_transposed)
        if output.pad != NV[1] or offsets is not None:
            raise ValueError(f"E2M1, pad={output.pad}: it is cast with pad=16, and not of rows in groups")


def _with_heads(
    source: CastSource, output: Output, named: dict[str, Any], **refused: Tensor | None
) -> tuple[Castable, Output]:
    """Return the source, or gradients of heads, and the output with what the op's ``recast_`` arguments ask for.

    ``named``: the op's named arguments that are left: those two kinds. ``refused``: others that heads don't have.
    """
    if not named:
        return source, output
    scale, dtype, transposed = (named.pop(f"recast_{name}", None) for name in ("scale", "dtype", "transposed"))
    if scale is not None:
        if dtype is None or source.preactivation is None or source.h_scale_inv is not None:
            raise ValueError(
                "recast_scale: give recast_dtype, and an activation's gradient whose preactivation is no codes"
            )
        check_shape("recast_scale", scale, (1,))
        recast = Scaling(dtype, (ALL, ALL), False, 0, scale)
        output = output._replace(recast=recast, recast_transposed=bool(transposed))
    if not (heads := {name: tensor for name, tensor in named.items() if tensor is not None}):
        return source, output
    _refuse("gradients of heads are cast", activation=source.activation, **refused)
    if heads.keys() != {"k", "v", "cos", "sin"}:
        raise ValueError(f"k is cast with x, v, cos and sin: give all of them, not {', '.join(heads)}")
    return _unpack_rotary(source.x, *(heads[name] for name in ("k", "v", "cos", "sin")), True)[0], output


def _refuse(where: str, **arguments: Any) -> None:
    """Raise ValueError for an argument that is a tensor, or true, ``where`` it is not taken."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(f"{name} is not taken where {where}")


def _check_groups(source: CastSource, scaling: Scaling, offsets: Tensor) -> None:
    """Check offsets, without reading them, and that a cast of rows in groups exists for the source and the scaling."""
    check_offsets_kind(offsets, source.x.device)
    if source.h_scale_inv is None and source.x.dtype not in HIGH_PRECISION:
        raise TypeError(f"{source.x.dtype} is not cast: give bfloat16, float16 or float32")
    if scaling.delayed_scale is not None and scaling.tile != (ALL, ALL):
        raise ValueError(f"a delayed scale is one for all, not for tiles of {scaling.tile}: tile is (-1, -1)")


def _unpack_cast_and_commit(x: Tensor, *flat: Any, **named: Any) -> tuple[Any, ...]:
    """Return (source, scaling, commit, output) of the flat arguments of the op ``cast_and_commit``."""
    state_and_amaxes, (dtype, power_of_two, margin), update, others = flat[:5], flat[5:8], flat[8:12], flat[12:]
    check_state(*state_and_amaxes)
    delayed_scale, *_ = state_and_amaxes
    scaling = Scaling(dtype, (ALL, ALL), power_of_two, margin, delayed_scale, role=2)  # grad_output's
    source, output = _with_heads(*_source_of(x, *others, **named))
    return source, scaling, Commit(*state_and_amaxes, *update), output


def _check_scales(name: str, codes: Tensor, scale_inv: Tensor, tile: Sequence[int], groups: int | None = None) -> None:
    """Do ``check_grid`` of tensors."""
    if type(codes) in WITH_MEMORY:
        kinds = (codes.shape, codes.dtype), (scale_inv.shape, scale_inv.dtype)
        check_grid(name, *kinds, (tile[0], tile[1]), groups)


def _unpack_delayed_update(*flat: Any) -> tuple[Commit, Tensor | None]:
    """Return (commit, amax of grad_output or None) of the flat arguments of the op ``delayed_update``."""
    check_state(*flat[:6])
    return Commit(*flat[:5], *flat[6:]), flat[5]


def _unpack_rotary(*flat: Any) -> tuple[RotaryHeads]:
    """Return the heads of the op's flat arguments. Raise ValueError for sizes or dtypes that don't fit q's."""
    heads = RotaryHeads(*flat)
    q, k, v, cos, sin, _ = heads
    batch, positions, _, width = q.shape
    for name, x in (("k", k), ("v", v)):
        if (x.shape[:2], x.shape[3], x.dtype) != (q.shape[:2], width, q.dtype):
            raise ValueError(f"{name} {list(x.shape)} of {x.dtype} needs q's sizes but H: {list(q.shape)}, {q.dtype}")
    if cos.shape[1:] not in ((positions, width), (positions, width // 2)) or cos.shape[0] not in (1, batch):
        raise ValueError(f"cos {list(cos.shape)} needs [1 or {batch}, {positions}, {width} or {width // 2}]")
    check_shape("sin", sin, cos.shape)
    if width % 2:
        raise ValueError(f"heads of {width} elements have no halves")
    return (heads,)


class LossRows(NamedTuple):
    """Rows of logits [T, V], the right column of each [T], and the options of their cross entropy."""

    logits: Tensor
    target: Tensor
    ignore_index: int
    label_smoothing: float
    softcap: float


def _unpack_cross_entropy(*flat: Any) -> tuple[Any, ...]:
    """Return (the rows, the op's other arguments): none; lse, grad; or lse, codes, transposed, first."""
    rows, others = LossRows(*flat[:5]), flat[5:]
    lse, *gradients = others or (None,)
    grad = gradients[0] if len(gradients) == 1 else None
    check_sizes(logits=(rows.logits, "TV"), target=(rows.target, "T"), lse=(lse, "T"), grad=(grad, "T"))
    if rows.target.dtype != torch.int64:
        raise ValueError(f"target of {rows.target.dtype} needs int64, the number of a column for each row of logits")
    if len(gradients) > 1:
        check_codes_of_loss(rows.logits, *gradients)
    return rows, *others


def _unpack_norm(*flat: Any, residual: Tensor | None = None) -> tuple[NormSource, Tensor | None]:
    """Return (source, residual or None) of the flat arguments of the op ``norm``."""
    source, residual = NormSource(*flat[:6]), flat[6] if len(flat) > 6 else residual
    check_norm(source.x, source.kind, source.gamma, beta=(source.beta, "C"), residual=(residual, "RC"))
    return source, residual


def _unpack_norm_backward(*flat: Any, **named: Any) -> tuple[Any, ...]:
    """Return (gradient,) of the flat arguments of the op ``norm_backward``."""
    gradient = NormGradient(*flat, **named)
    dy, x, gamma, mean, rstd, kind, *_, residual = gradient
    statistics = {"mean": (mean if kind == "layer_norm" else None, "R"), "rstd": (rstd, "R")}
    check_norm(x, kind, gamma, dy=(dy, "RC"), residual=(residual, "RC"), **statistics)
    return (gradient,)


def _unpack_matmul(*flat: Any) -> tuple[Any, ...]:
    """Return (operands, out_dtype, fast_accum) of the flat arguments of the op ``matmul``."""
    operands = a, b, bias = _operands(*flat[:7])
    if type(a.codes) in WITH_MEMORY:
        a_kinds = a.codes.shape, a.codes.dtype, a.scale_inv.shape, a.scale_inv.dtype, a.tile
        b_kinds = b.codes.shape, b.codes.dtype, b.scale_inv.shape, b.scale_inv.dtype, b.tile
        check_product(a_kinds, b_kinds, None if bias is None else bias.shape)
    return operands, *flat[7:]


def _unpack_grouped_matmul(*flat: Any, **pad: int) -> tuple[Any, ...]:
    """Return (operands, out_dtype, fast_accum) of the flat arguments of the op ``grouped_matmul``.

    Raises:
        TypeError: for offsets that are not int32.
        ValueError: for operands, scales, a bias or offsets whose shapes don't fit, with both.
    """
    offsets, bias, out_dtype, fast_accum, *pad_by_position = flat[6:]
    a, b, _ = _operands(*flat[:6], bias)
    operands = GroupedOperands(a, b, offsets, bias, *pad_by_position, **pad)
    check_offsets_kind(offsets, a.codes.device)
    groups = offsets.shape[0]
    check_terms((a.codes.shape, a.codes.dtype), (b.codes.shape, b.codes.dtype))
    if operands.has_ragged_rows:
        if b.codes.shape[0] != groups:
            raise ValueError(f"b holds {b.codes.shape[0]} matrices for {groups} groups")
        check_shape("bias", bias, b.codes.shape[:2])
        _check_scales("a's scale_inv", *a, groups)
        check_shape("b's scale_inv", b.scale_inv, (groups, *scale_shape(b.codes.shape[1:], b.tile)))
        return operands, out_dtype, fast_accum
    if bias is not None:
        raise ValueError("a bias is added where a's rows are in groups: b is then [groups, N, K]")
    for name, (codes, scale_inv, tile) in (("a's scale_inv", a), ("b's scale_inv", b)):
        # along the terms there are more blocks than the number of padded codes says
        blocks = groups if tile[1] == ALL else scale_inv.shape[1]
        check_shape(name, scale_inv, (tiles_along(codes.shape[0], tile[0]), blocks))
    return operands, out_dtype, fast_accum


def _operands(*flat: Any) -> ProductArguments:
    """Return the operands of a product's first flat arguments."""
    a, a_scale_inv, a_tile, b, b_scale_inv, b_tile, bias = flat
    return ProductArguments(
        OperandPair(a, a_scale_inv, (a_tile[0], a_tile[1])), OperandPair(b, b_scale_inv, (b_tile[0], b_tile[1])), bias
    )


def _unpack_dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the op's flat arguments with scales that are not swizzled."""
    _check_scales("scale_inv", qdata, scale_inv, tile)
    return qdata, plain_scales(scale_inv, qdata.shape, tile), tile, dtype


def _unpack_cast_statistics(*flat: Any, **offsets_by_name: Any) -> tuple[CountedCast]:
    """Return (the cast, with scales that are not swizzled) of the flat arguments of the op ``cast_statistics``."""
    cast = CountedCast(*flat, **offsets_by_name)
    x, qdata, scale_inv, tile, sums, extremes, offsets = cast
    groups = () if offsets is None else tuple(offsets.shape)
    _check_scales("scale_inv", qdata, scale_inv, tile, *groups)
    rows, cols = unpacked_shape(qdata.shape, qdata.dtype)
    check_shape("x", x, (rows, min(x.shape[1], cols)))
    check_shape("sums", sums, (*groups, len(Counted.sums) + Counted.exponents), is_dense=True)
    check_shape("extremes", extremes, (*groups, len(Counted.extremes)), is_dense=True)
    return (cast._replace(scale_inv=plain_scales(scale_inv, qdata.shape, tile)),)


def _unpack_note_faults(*flat: Any) -> tuple[WatchedOperand]:
    """Return (the operand) of the flat arguments of the op ``note_faults``; y must have as many rows."""
    watched = WatchedOperand(*flat)
    check_shape("y", watched.y, (watched.operand.shape[0], *watched.y.shape[1:]))
    return (watched,)


def _unpack_multi_tensor_cast(*flat: Any) -> tuple[Any, ...]:
    """Return (lists, role, tile, power_of_two, margin, skip or nothing) of the flat arguments of the op."""
    return CastLists(*flat[:6]), *flat[6:]


UNPACK = {name.removeprefix("_unpack_"): unpack for name, unpack in vars().items() if name.startswith("_unpack_")}
UNPACK |= dict.fromkeys(("cross_entropy_backward", "cross_entropy_codes"), _unpack_cross_entropy)


def unpacking(kernels: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return kernels of these values, by their ops' names, as kernels of ops' flat arguments; others as they are."""

    def with_flat_arguments(kernel: Callable[..., Any], unpack: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*arguments: Any, **named: Any) -> Any:
            return kernel(*unpack(*arguments, **named))

        return call

    return {name: with_flat_arguments(k, UNPACK[name]) if name in UNPACK else k for name, k in kernels.items()}


class NewTensor(NamedTuple):
    """A tensor to allocate: its shape and dtype, whether it lies by columns, and whether it begins as zeros."""

    shape: Sequence[int]
    dtype: torch.dtype
    by_columns: bool = False
    zeroed: bool = False


def allocated(x: Tensor, results: Sequence[NewTensor]) -> tuple[Tensor, ...]:
    """Return these tensors on the device of x, unwritten but for those that begin as zeros."""
    tensors = []
    for shape, dtype, by_columns, zeroed in results:
        if zeroed or dtype is E2M1.dtype:  # torch.use_deterministic_algorithms can't fill those of E2M1
            new = x.new_zeros if zeroed else x.new_empty
            tensors.append(new(shape, dtype=torch.uint8).view(dtype))
        elif by_columns:
            tensors.append(x.new_empty(shape[::-1], dtype=dtype).t())
        else:
            tensors.append(x.new_empty(shape, dtype=dtype))
    return tuple(tensors)


def no_codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the empty tensor that an op returns for codes that were not asked for."""
    return x.new_empty((0, 0), dtype=torch.uint8).view(dtype)  # as ``allocated`` makes those of E2M1


def new_cast(
    source: Castable, first: Scaling, second: Scaling | None, output: Output, offsets: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the results of ``octavo::cast``, unwritten but for the padding of swizzled scales."""
    x = source.x
    read: tuple[Any, ...] = (source.kind,) if isinstance(source, NormSource) else ()
    if isinstance(source, CastSource):
        _, activation, h, h_scale_inv, _ = source
        read = activation, None if h is None else h.shape, h_scale_inv is not None
    # sizes of a tensor that is traced may be symbols, which have no hash
    results_of = _results_of if type(x) in (Tensor, Parameter) else _results_of.__wrapped__
    scalings = (*first[:3], first.swizzles), None if second is None else (*second[:3], second.swizzles)
    shape = source.shape if isinstance(source, RotaryHeads) else x.shape
    groups = None if offsets is None else len(offsets)
    others = output if output.recast is None else output._replace(recast=None)
    results = results_of(shape, x.dtype, read, *scalings, others, groups)
    if output.recast is not None:  # of x's shape, as x is the gradient of it
        (rows, cols), pad = x.shape, output.pad
        laid = (cols, padded_size(rows, pad)) if output.recast_transposed else (rows, padded_size(cols, pad))
        results = *results, NewTensor(laid, output.recast.dtype)
    return allocated(x, results)


_Written = tuple[torch.dtype, Tile, bool, bool]  # dtype, tile, power_of_two and swizzles of a Scaling


@functools.lru_cache(maxsize=4096)
def _results_of(
    x_shape: Sequence[int],
    x_dtype: torch.dtype,
    read: tuple[Any, ...],
    first: _Written,
    second: _Written | None,
    output: Output,
    groups: int | None,
) -> tuple[NewTensor, ...]:
    """Return the results of ``octavo::cast``.

    ``x_shape``: of heads, that of their matrix. ``read``: (a norm's kind,), or what cast_shape takes beside the shape.
    ``groups``: of rows in groups, how many.
    """
    is_norm = len(read) == 1
    rows, cols = x_shape if is_norm else cast_shape(x_shape, *read)
    dtype, tile, *_ = first
    shape, laid_shape = (rows, cols), (rows, padded_size(cols, output.pad))
    columns = padded_size(rows, output.pad) if groups is None else padded_columns(rows, groups, output.pad)
    is_packed, no_codes = dtype is E2M1.dtype, NewTensor((0, 0), dtype)
    codes = no_codes if is_packed and tile[1] == 1 else _codes(laid_shape, dtype)
    transposed = _codes((cols, columns), dtype) if output.transpose else no_codes
    if groups is not None:
        grid = grouped_scale_shape(shape, groups, tile)
        scales = _scales(grid, tile, scale_inv_dtype(tile, first[2])), _scales(grid, tile)
        return codes if output.as_is else no_codes, transposed, *scales
    if second is not None:
        second_codes = _codes((cols, columns) if output.transpose else laid_shape, second[0])
        pairs = codes, second_codes, _written_scales(shape, first), _written_scales(shape, second, output.transpose)
    else:
        amax = NewTensor((1, 1), torch.float32) if is_packed else _scales(scale_shape(shape, tile), tile)
        pairs = codes, transposed, _written_scales(shape, first), amax
    if is_norm:
        return *pairs, *_statistics(rows, read[0]), NewTensor(shape if output.keep else (0, 0), x_dtype)
    scale = (NewTensor((1,), torch.float32),) if output.keep else ()
    return *pairs, NewTensor((cols if output.column_sum else 0,), sums_dtype(x_dtype)), *scale


def _codes(shape: tuple[int, int], dtype: torch.dtype) -> NewTensor:
    """Return codes of values of this shape, whose rows are padded."""
    return NewTensor((shape[0], shape[1] // 2) if dtype is E2M1.dtype else shape, dtype)


def _written_scales(shape: tuple[int, int], scaling: _Written, transpose: bool = False) -> NewTensor:
    """Return a scaling's scale_inv, of zeros if it is swizzled and padded."""
    dtype, tile, power_of_two, swizzles = scaling
    grid = scale_shape(shape, tile)
    if swizzles:
        size = swizzled_size(grid, tile)
        return NewTensor((size,), E8M0, zeroed=size != math.prod(grid))
    grid, tile = (grid[::-1], tile[::-1]) if transpose else (grid, tile)
    return _scales(grid, tile, scale_inv_dtype(tile, power_of_two, dtype is E2M1.dtype))


def _scales(grid: Sequence[int], tile: Tile, dtype: torch.dtype = torch.float32) -> NewTensor:
    """Return the scales of a grid of tiles, by columns where products read them so."""
    return NewTensor(grid, dtype, by_columns=lie_by_columns(tile))


def _statistics(rows: int, kind: str) -> tuple[NewTensor, NewTensor]:
    """Return a norm's mean and rstd."""
    return NewTensor((rows if kind == "layer_norm" else 0,), torch.float32), NewTensor((rows,), torch.float32)


def new_scales(x: Tensor, shape: Sequence[int], tile: Tile) -> Tensor:
    """Return float32 scales of a tensor of this shape, one a tile, unwritten."""
    return allocated(x, [_scales(scale_shape(shape, tile), tile)])[0]


def lie_by_columns(tile: Tile) -> bool:
    """Whether scales of this tile are column-major: products read a column of them where tiles are parts of rows."""
    return tile[0] == 1 and tile[1] > 1


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of column sums: that of the tensor that is cast, float32 where that is codes."""
    return torch.float32 if dtype.itemsize == 1 else dtype


def new_norm(source: NormSource, residual: Tensor | None) -> tuple[Tensor, ...]:
    """Return the results of ``octavo::norm``, unwritten."""
    x, shape = source.x, source.shape
    y, total = NewTensor(shape, x.dtype), NewTensor((0, 0) if residual is None else shape, x.dtype)
    return allocated(x, (y, *_statistics(shape[0], source.kind), total))


def new_rotary(heads: RotaryHeads) -> Tensor:
    """Return the result of ``octavo::rotary``, unwritten."""
    return heads.q.new_empty((*heads.q.shape[:2], heads.shape[1]))


def new_losses(rows: LossRows) -> tuple[Tensor, Tensor]:
    """Return the results of ``octavo::cross_entropy``, unwritten."""
    losses = rows.logits.new_empty(len(rows.logits), dtype=torch.float32)
    return losses, torch.empty_like(losses)
