"""The ops' flat arguments, unpacked once: what is cast, how, and what is written. signatures.py says what each is.

The reference, the Triton kernels, the fakes and onnx.py take these values, and the first three allocate their
results by the functions here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from octavo.formats import CAST_FORMATS, E2M1, HIGH_PRECISION
from octavo.granularity import ALL, MX, NV, PACKED_TILES, Tile, scale_shape, tiles_along
from octavo.kernels.activations import cast_shape
from octavo.kernels.groups import check_offsets_kind, grouped_scale_shape, padded_columns
from octavo.kernels.layouts import padded, plain_scales
from octavo.numerics import E8M0, delayed_or, scale_inv_dtype


class Counted:
    """The numbers that cast_statistics and note_faults add up or raise; reference/cast_statistics.py explains them."""

    sums = ("elements", "zeros", "flushed", "clipped", "nonfinite", "power", "error")
    extremes = ("amax", "scale_inv", "scale")
    exponents = 64  # bins of the exponents floor(log2 |x|) of finite numbers other than 0
    lowest = -48  # the first bin's exponent; it counts smaller exponents too, and the last bin larger ones
    faults = ("faulty", "rows", "scale_inv", "amax")


# (the largest number's code, the factor by which a number must exceed it to be more than rounded to it)
LARGEST = {dtype: (fmt.max_code, fmt.overflow / fmt.max) for dtype, fmt in CAST_FORMATS.items()}


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

    @property
    def known_scale(self) -> float:
        """The delayed scale, or 0 where the scale will come from the tensor's own amax."""
        return 0.0 if self.delayed_scale is None else self.delayed_scale.tolist()[self.role]

    def delayed_or(self, scale: Tensor) -> Tensor:
        """Return the delayed scale; where there is none, or it is 0, ``scale``."""
        if self.delayed_scale is None:
            return scale
        return delayed_or(self.delayed_scale[self.role], scale)


class Output(NamedTuple):
    """The results that a cast writes: transposed codes too (the second's of two scalings only so), sums, a norm's y.

    ``keep``: of what is no norm its one scale. ``as_is``: whether codes of rows in groups are written as they lie.
    ``value``: the scaling by which an activation's gradient casts the activation itself too, into one layout.
    """

    transpose: bool = False
    pad: int = 1
    column_sum: bool = False
    keep: bool = False
    as_is: bool = True
    value: Scaling | None = None
    value_transposed: bool = False


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
    """The delayed state that a cast of grad_output rolls, the amax of forward's casts, and how next scales are made."""

    delayed_scale: Tensor
    delayed_amax_history: Tensor
    delayed_before: Tensor
    amax_input: Tensor | None
    amax_weight: Tensor | None
    limits: Sequence[float]
    powers_of_two: Sequence[bool]
    margins: Sequence[int]
    reduce: str


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
        if self.scale_inv.ndim != 1:
            return self
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


def _cast(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    transpose: bool = False,
    pad: int = 1,
    column_sum: bool = False,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] = (ALL, ALL),
    *,
    kind: str = "",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 0.0,
    zero_centered: bool = False,
    keep: bool = False,
    offsets: Tensor | None = None,
    as_is: bool = True,
    second_dtype: torch.dtype | None = None,
    second_tile: Sequence[int] = (ALL, ALL),
    second_power_of_two: bool = False,
    second_margin: int = 0,
    **named: Any,
) -> tuple[Any, ...]:
    """Return (source, first scaling, second or None, output, offsets) of the flat arguments of the op ``cast``."""
    first_options, second_options = _scaling_options(named) if named else ((), ())
    first = Scaling(dtype, (tile[0], tile[1]), power_of_two, margin, delayed_scale, role, *first_options)
    second_options = second_power_of_two, second_margin, None, 0, *second_options
    second = None if second_dtype is None else Scaling(second_dtype, (second_tile[0], second_tile[1]), *second_options)
    is_norm, in_groups = gamma is not None, offsets is not None
    value, heads = _value_to_cast(preactivation, h_scale_inv, named)
    output = Output(transpose, pad, column_sum, keep, as_is, *value)
    if heads or is_norm or in_groups or second or kind or keep or output.value or not as_is:  # else all is taken
        one_scale = first.tile == (ALL, ALL) and not in_groups and second is None
        _refuse(
            ("gradients of heads are cast", heads, {"activation": activation, "gamma": gamma, "offsets": offsets}),
            ("a norm is cast", is_norm, {"activation": activation, "column_sum": column_sum, "offsets": offsets}),
            ("no gamma is given", not is_norm, {"kind": kind}),
            ("there is not one scale", not one_scale, {"keep": keep and not is_norm, "value_scale": output.value}),
            ("there are two scalings", second, {"delayed_scale": delayed_scale, "offsets": offsets}),
            ("rows are in groups", in_groups, {"column_sum": column_sum}),
            ("rows are in no groups: cast x.t()", not in_groups, {"as_is=False": not as_is}),
        )
    if first.swizzles or E2M1.dtype in (dtype, second_dtype):
        _check_scalings(first, second, output, offsets)
    if heads:
        return _heads_to_cast(x, **heads), first, second, output, None
    if gamma is not None:
        check_norm(x, gamma, beta, kind)
        return NormSource(x, gamma, beta, kind, eps, zero_centered), first, second, output, None
    if offsets is not None:
        _check_groups(x, h_scale_inv, first, offsets)
    return CastSource(x, activation, preactivation, h_scale_inv, h_tile), first, second, output, offsets


def _scaling_options(named: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the first and the second Scaling's last fields, from swizzles on, which are taken out of ``named``."""
    swizzle, place = named.pop("swizzle", False), named.pop("place", (0, 0))
    return [
        (swizzle, named.pop(f"{which}rotation", None), named.pop(f"{which}seed", None), place)
        for which in ("", "second_")
    ]


def _check_scalings(first: Scaling, second: Scaling | None, output: Output, offsets: Tensor | None) -> None:
    """Raise ValueError for what has no swizzled scales, or whose codes could not lie in pairs along the contraction."""
    if first.swizzles and (offsets is not None or not have_e8m0_blocks(first, second or first)):
        raise ValueError("swizzle: of rows in no groups, in blocks of 1x32 or 32x1 whose scales are powers of two")
    for scaling, is_transposed in (first, output.transpose and second is None), (second, output.transpose):
        if scaling is None or not scaling.is_packed:
            continue
        tile = scaling.tile[::-1] if is_transposed else scaling.tile
        if tile not in PACKED_TILES or not scaling.power_of_two or output.pad != NV[1] or offsets is not None:
            raise ValueError(
                f"E2M1 in tiles of {scaling.tile}, pad={output.pad}: it is cast in blocks of 1x16, of 16x1 transposed, "
                "or of 16x16, with a power of two as outer scale, pad=16, and not of rows in groups"
            )


def _value_to_cast(
    preactivation: Tensor | None, h_scale_inv: Tensor | None, named: dict[str, Any]
) -> tuple[tuple[Scaling | None, bool], dict[str, Tensor]]:
    """Return (Output's value and value_transposed, the tensors of heads) by the arguments' names."""
    if not named:
        return (None, False), {}
    scale, dtype, transposed = (named.pop(f"value_{name}", None) for name in ("scale", "dtype", "transposed"))
    heads = {name: tensor for name, tensor in named.items() if tensor is not None}
    if scale is None:
        return (None, False), heads
    if dtype is None or preactivation is None or h_scale_inv is not None:
        raise ValueError("value_scale: give value_dtype, and an activation's gradient whose preactivation is no codes")
    return (Scaling(dtype, (ALL, ALL), False, 0, scale), bool(transposed)), heads


def _refuse(*refusals: tuple[str, Any, dict[str, Any]]) -> None:
    """Raise ValueError for an argument where it is not taken; each of ``refusals``: where, if that is so, arguments."""
    for where, is_so, arguments in refusals:
        for name, value in arguments.items():
            if is_so and (isinstance(value, Tensor) or value):
                raise ValueError(f"{name} is not taken where {where}")


def _check_groups(x: Tensor, h_scale_inv: Tensor | None, scaling: Scaling, offsets: Tensor) -> None:
    check_offsets_kind(offsets, x.device)
    if h_scale_inv is None and x.dtype not in HIGH_PRECISION:
        raise TypeError(f"{x.dtype} is not cast: give bfloat16, float16 or float32")
    if scaling.delayed_scale is not None and scaling.tile != (ALL, ALL):
        raise ValueError(f"a delayed scale is one for all, not for tiles of {scaling.tile}: tile is (-1, -1)")


def _cast_and_commit(
    x: Tensor,
    delayed_scale: Tensor,
    delayed_amax_history: Tensor,
    delayed_before: Tensor,
    amax_input: Tensor | None,
    amax_weight: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
    limits: Sequence[float],
    powers_of_two: Sequence[bool],
    margins: Sequence[int],
    reduce: str,
    transpose: bool,
    pad: int = 1,
    column_sum: bool = False,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] = (ALL, ALL),
    **heads_or_value: Any,
) -> tuple[Any, ...]:
    """Return (source, scaling, commit, output) of the flat arguments of the op ``cast_and_commit``."""
    scaling = Scaling(dtype, (ALL, ALL), power_of_two, margin, delayed_scale, role=2)
    state = delayed_scale, delayed_amax_history, delayed_before
    commit = Commit(*state, amax_input, amax_weight, limits, powers_of_two, margins, reduce)
    value, heads = _value_to_cast(preactivation, h_scale_inv, heads_or_value)
    source: CastSource | RotaryHeads = CastSource(x, activation, preactivation, h_scale_inv, h_tile)
    if heads:
        source = _heads_to_cast(x, **heads)
        if activation:
            raise ValueError("activation is not taken where gradients of heads are cast")
    return source, scaling, commit, Output(transpose, pad, column_sum, False, True, *value)


def _heads_to_cast(
    q: Tensor, k: Tensor | None = None, v: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None
) -> RotaryHeads:
    if k is None or v is None or cos is None or sin is None:
        raise ValueError("k is cast with x, v, cos and sin: give all of them")
    return _rotary(q, k, v, cos, sin, True)[0]


def _rotary(*flat: Any) -> tuple[RotaryHeads]:
    heads = RotaryHeads(*flat)
    q, k, v, cos, sin, _ = heads
    batch, positions, _, width = q.shape
    for name, x in (("k", k), ("v", v)):
        if (x.shape[:2], x.shape[3], x.dtype) != (q.shape[:2], width, q.dtype):
            raise ValueError(
                f"{name} {list(x.shape)} of {x.dtype} needs q's sizes but for heads: {list(q.shape)}, {q.dtype}"
            )
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape[1:] not in ((positions, width), (positions, width // 2)) or x.shape[0] not in (1, batch):
            raise ValueError(f"{name} {list(x.shape)} needs [1 or {batch}, {positions}, {width} or {width // 2}]")
    if cos.shape != sin.shape:
        raise ValueError(f"cos {list(cos.shape)} needs sin's shape, {list(sin.shape)}")
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


def _cross_entropy(*flat: Any) -> tuple[Any, ...]:
    rows = LossRows(*flat[:5])
    logits, target, *_ = rows
    if logits.ndim != 2 or target.shape != logits.shape[:1] or target.dtype is not torch.int64:
        raise ValueError(
            f"target {list(target.shape)} of {target.dtype} needs a column's number, int64, for each row of logits "
            f"{list(logits.shape)}"
        )
    return rows, *flat[5:]


def _norm(*flat: Any, residual: Tensor | None = None) -> tuple[NormSource, Tensor | None]:
    source, residual = NormSource(*flat[:6]), flat[6] if len(flat) > 6 else residual
    check_norm(source.x, source.gamma, source.beta, source.kind, None, residual)
    return source, residual


def _norm_backward(*flat: Any, **named: Any) -> tuple[Any, ...]:
    gradient = NormGradient(*flat, **named)
    check_norm(gradient.x, gradient.gamma, None, gradient.kind, gradient.dy, gradient.residual)
    return (gradient,)


def _matmul(*flat: Any) -> tuple[Any, ...]:
    return _operands(*flat[:7]), *flat[7:]


def _grouped_matmul(*flat: Any, **pad: int) -> tuple[Any, ...]:
    offsets, bias, out_dtype, fast_accum, *pad_by_position = flat[6:]
    a, b, _ = _operands(*flat[:6], bias)
    operands = GroupedOperands(a, b, offsets, bias, *pad_by_position, **pad)
    check_grouped_operands(operands)
    return operands, out_dtype, fast_accum


def check_grouped_operands(operands: GroupedOperands) -> None:
    """Check the shapes of a grouped product's operands.

    Raises:
        TypeError: for offsets that are not int32.
        ValueError: for operands, scales, a bias or offsets whose shapes don't fit, with both.
    """
    a, b, offsets, bias, _ = operands
    check_offsets_kind(offsets, a.codes.device)
    groups = offsets.shape[0]
    if a.codes.shape[-1] != b.codes.shape[-1]:
        sizes = f"{list(a.codes.shape)} and {list(b.codes.shape)}"
        raise ValueError(f"operands of shapes {sizes} contract over their last dimensions, which differ")
    if operands.has_ragged_rows:
        if b.codes.shape[0] != groups:
            raise ValueError(f"b holds {b.codes.shape[0]} matrices for {groups} groups")
        if bias is not None and bias.shape != b.codes.shape[:2]:
            raise ValueError(f"bias of shape {list(bias.shape)} needs {list(b.codes.shape[:2])}, a row a group")
        rows, cols = a.codes.shape
        grids = [grouped_scale_shape((rows, cols), groups, a.tile), (groups, *scale_shape(b.codes.shape[1:], b.tile))]
    else:
        if bias is not None:
            raise ValueError("a bias is added where a's rows are in groups: b is then [groups, N, K]")
        # along the terms there are more blocks than the number of padded codes says
        grids = [
            (tiles_along(p.codes.shape[0], p.tile[0]), groups if p.tile[1] == ALL else p.scale_inv.shape[1])
            for p in (a, b)
        ]
    for name, pair, grid in zip("ab", (a, b), grids, strict=True):
        if tuple(pair.scale_inv.shape) != grid:
            raise ValueError(
                f"{name}'s scale_inv of shape {list(pair.scale_inv.shape)} needs {list(grid)}: codes "
                f"{list(pair.codes.shape)} in tiles of {pair.tile}, {groups} groups"
            )


def _operands(*flat: Any) -> ProductArguments:
    a, a_scale_inv, a_tile, b, b_scale_inv, b_tile, bias = flat
    return ProductArguments(
        OperandPair(a, a_scale_inv, (a_tile[0], a_tile[1])), OperandPair(b, b_scale_inv, (b_tile[0], b_tile[1])), bias
    )


def check_norm(
    x: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, dy: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Check the arguments of a norm of x [R, C], or of its backward.

    Raises:
        ValueError: for another kind than "layer_norm" or "rms_norm", a gamma or beta that is not [C], or a dy or
            residual that is not [R, C].
    """
    if kind not in ("layer_norm", "rms_norm"):
        raise ValueError(f"kind={kind!r}: use 'layer_norm' or 'rms_norm'")
    for name, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None and tuple(vector.shape) != (x.shape[1],):
            raise ValueError(f"{name} of shape {list(vector.shape)}: rows of x have {x.shape[1]} elements")
    for name, matrix in (("dy", dy), ("residual", residual)):
        if matrix is not None and matrix.shape != x.shape:
            raise ValueError(f"{name} of shape {list(matrix.shape)} needs the shape of x, {list(x.shape)}")


def _dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> tuple[Any, ...]:
    return qdata, plain_scales(scale_inv, qdata.shape, tile), tile, dtype


def _cast_statistics(
    x: Tensor, qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], *flat: Any, offsets: Tensor | None = None
) -> tuple[Any, ...]:
    return x, qdata, plain_scales(scale_inv, qdata.shape, tile), tile, *flat[:2], *(flat[2:] or [offsets])


UNPACK: dict[str, Callable[..., tuple[Any, ...]]] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy,
    "cross_entropy_codes": _cross_entropy,
    "dequantize": _dequantize,
    "cast_statistics": _cast_statistics,
    "cast": _cast,
    "cast_and_commit": _cast_and_commit,
    "norm": _norm,
    "rotary": _rotary,
    "norm_backward": _norm_backward,
    "matmul": _matmul,
    "grouped_matmul": _grouped_matmul,
}


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
    value, output = output.value, output._replace(value=None) if output.value is not None else output
    results = results_of(shape, x.dtype, read, *scalings, output, groups)
    if value is not None:  # of x's shape, as x is the gradient of it
        (rows, cols), pad = x.shape, output.pad
        laid = (cols, padded(rows, pad)) if output.value_transposed else (rows, padded(cols, pad))
        results = *results, NewTensor(laid, value.dtype)
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
    shape, laid_shape = (rows, cols), (rows, padded(cols, output.pad))
    columns = padded(rows, output.pad) if groups is None else padded_columns(rows, groups, output.pad)
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
        rows, cols = grid if tile == MX else grid[::-1]
        size = -(-rows // 128) * 128 * -(-cols // 4) * 4
        return NewTensor((size,), E8M0, zeroed=size != rows * cols)
    grid, tile = (grid[::-1], tile[::-1]) if transpose else (grid, tile)
    return _scales(grid, tile, scale_inv_dtype(tile, power_of_two, dtype is E2M1.dtype))


def _scales(grid: Sequence[int], tile: Tile, dtype: torch.dtype = torch.float32) -> NewTensor:
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
