"""Every op once: its schema, its fake implementation (shapes and dtypes for the compiler), its contract.

The reference in reference/ is the definition on every device; a faster kernel must agree with it bit for bit on codes
and scale_inv. Ops take and return plain tensors. They have no gradient: autograd/ writes those.

Arguments that mean the same everywhere:

    x              [R, C] bf16, fp16 or fp32, any strides, any sizes including 0
    dtype          the codes' dtype: torch.float8_e4m3fn or torch.float8_e5m2
    tile           (rows, columns) of x that share a scale; -1 is the whole dimension (granularity.py)
    power_of_two, margin      how numerics.scale_from_amax makes a scale
    delayed_scale  [3] fp32: the delayed scales of (input, weight, grad_output), 0 where there is no history yet, or
                   None for Dynamic; the op reads element ``role``. With one, tile is (-1, -1); with none or 0, the
                   scale is that of this tensor's own amax
    qdata          codes, contiguous [R, C']; ``transposed`` ones are contiguous [C, R']. C' and R' are C and R rounded
                   up to a multiple of ``pad`` (1, 2, 4, 8 or 16), the codes beyond are 0: a product contracts over
                   the last dimension, and some want it so. Where pad > 1, that dimension's tile is -1 or a multiple
    sums           [C] of x's dtype: the sum of each column, in float32 and rounded once; [0] without ``column_sum``
    scale_inv      fp32, contiguous, granularity.scale_shape(x.shape, tile), always written
    amax           fp32, shape of scale_inv: largest absolute finite value of x, unscaled

Ops are registered by torch.library.Library rather than by the custom_op decorator: 4 us against 17 us a call in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.granularity import scale_shape
from octavo.kernels.devices import ON_CUDA
from octavo.kernels.layouts import padded
from octavo.kernels.reference import KERNELS

_CAST = "ScalarType dtype, int[2] tile, bool power_of_two, int margin"
_EXTRAS = "int pad=1, bool column_sum=False"
_STATE = "Tensor(a!) delayed_scale, Tensor(b!) delayed_amax_history"
_UPDATE = "float[3] limits, bool[3] powers_of_two, int[3] margins, str reduce"

SCHEMAS = {
    # amax of each tile
    "amax": "(Tensor x, int[2] tile) -> Tensor",
    # one layout, one scaling: (qdata, scale_inv, amax, sums)
    "cast": f"(Tensor x, Tensor? delayed_scale, int role, {_CAST}, {_EXTRAS}) -> (Tensor, Tensor, Tensor, Tensor)",
    # both layouts, one scaling: (qdata, transposed qdata, scale_inv, amax, sums); the transposed pair's scale_inv is
    # scale_inv.t()
    "cast_transpose": f"(Tensor x, Tensor? delayed_scale, int role, {_CAST}, {_EXTRAS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # two scalings from one read, Dynamic: (qdata, scale_inv, second qdata, second scale_inv, sums). second_tile is a
    # tile of x; transpose_second writes the second pair's tensors transposed
    "cast_two_scalings": f"(Tensor x, {_CAST}, ScalarType second_dtype, int[2] second_tile, bool second_power_of_two, "
    f"int second_margin, bool transpose_second, {_EXTRAS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # the delayed cast of grad_output, and delayed_update with the amax it finds: (qdata, transposed qdata or [0, 0],
    # scale_inv, sums)
    "cast_and_commit": f"(Tensor x, {_STATE}, Tensor? amax_input, Tensor? amax_weight, "
    f"ScalarType dtype, bool power_of_two, int margin, {_UPDATE}, bool transpose, {_EXTRAS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    # for each role whose amax is given: history <- (amax, history[:-1]); scale <- that of the largest of the history,
    # or of its newest ("most_recent"); an amax of 0 keeps the scale. limits, powers_of_two, margins: one a role
    "delayed_update": f"({_STATE}, Tensor? amax_input, Tensor? amax_weight, Tensor? amax_grad_output, {_UPDATE}) -> ()",
    # qdata x scale_inv, rounded once from float32 to dtype
    "dequantize": "(Tensor qdata, Tensor scale_inv, int[2] tile, ScalarType dtype) -> Tensor",
    # a [M, K] . b^T, b [N, K], any strides -> [M, N] out_dtype, contiguous; fp32 accumulation. tiles are of a and b as
    # laid here: contraction last. bias [N] is added to each row. fast_accum permits the tensor cores' shorter
    # accumulator
    "matmul": "(Tensor a, Tensor a_scale_inv, int[2] a_tile, Tensor b, Tensor b_scale_inv, int[2] b_tile, "
    "Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    # cast_transpose of each of xs, of one dtype and contiguous rows, in one launch (Dynamic per tensor: two), into
    # qdata[i] [R, C'], transposed[i] [C, R'] (or none at all), scale_inv[i], amax[i]; delayed_scales none for Dynamic.
    # tile: (-1, -1) or a block of powers of two up to 128. Where skip [1] is not 0 nothing is written: a weight that
    # did not change, in a CUDA graph
    "multi_tensor_cast": "(Tensor[] xs, Tensor(a!)[] qdata, Tensor(b!)[] transposed, Tensor(c!)[] scale_inv, "
    "Tensor(d!)[] amax, Tensor[] delayed_scales, int role, int[2] tile, bool power_of_two, int margin, "
    "Tensor? skip=None) -> ()",
}


def _fake_codes(x: Tensor, rows: int, cols: int, dtype: torch.dtype, pad: int) -> Tensor:
    return x.new_empty((rows, padded(cols, pad)), dtype=dtype)


def _fake_sums(x: Tensor, column_sum: bool) -> Tensor:
    return x.new_empty(x.shape[1] if column_sum else 0)


def _fake_scale_inv(x: Tensor, tile: Sequence[int]) -> Tensor:
    return x.new_empty(scale_shape(x.shape, tile), dtype=torch.float32)


def _fake_amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    return _fake_scale_inv(x, tile)


def _fake_cast(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    pad: int = 1,
    column_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qdata = _fake_codes(x, x.shape[0], x.shape[1], dtype, pad)
    return qdata, _fake_scale_inv(x, tile), _fake_scale_inv(x, tile), _fake_sums(x, column_sum)


def _fake_cast_transpose(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    pad: int = 1,
    column_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    qdata, scale_inv, amax, sums = _fake_cast(
        x, delayed_scale, role, dtype, tile, power_of_two, margin, pad, column_sum
    )
    return qdata, _fake_codes(x, x.shape[1], x.shape[0], dtype, pad), scale_inv, amax, sums


def _fake_cast_two_scalings(
    x: Tensor,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    second_dtype: torch.dtype,
    second_tile: Sequence[int],
    second_power_of_two: bool,
    second_margin: int,
    transpose_second: bool,
    pad: int = 1,
    column_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    second_rows, second_cols = (cols, rows) if transpose_second else (rows, cols)
    second_scale_shape = list(scale_shape(x.shape, second_tile))
    if transpose_second:
        second_scale_shape.reverse()
    return (
        _fake_codes(x, rows, cols, dtype, pad),
        _fake_scale_inv(x, tile),
        _fake_codes(x, second_rows, second_cols, second_dtype, pad),
        x.new_empty(second_scale_shape, dtype=torch.float32),
        _fake_sums(x, column_sum),
    )


def _fake_cast_and_commit(
    x: Tensor,
    delayed_scale: Tensor,
    delayed_amax_history: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    return (
        _fake_codes(x, rows, cols, dtype, pad),
        _fake_codes(x, cols if transpose else 0, rows if transpose else 0, dtype, pad),
        x.new_empty((1, 1), dtype=torch.float32),
        _fake_sums(x, column_sum),
    )


def _fake_nothing(*args: Any) -> None:
    return None


def _fake_dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    return qdata.new_empty(qdata.shape, dtype=dtype)


def _fake_matmul(
    a: Tensor,
    a_scale_inv: Tensor,
    a_tile: Sequence[int],
    b: Tensor,
    b_scale_inv: Tensor,
    b_tile: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


FAKES: dict[str, Callable[..., Any]] = {
    "amax": _fake_amax,
    "cast": _fake_cast,
    "cast_transpose": _fake_cast_transpose,
    "cast_two_scalings": _fake_cast_two_scalings,
    "cast_and_commit": _fake_cast_and_commit,
    "delayed_update": _fake_nothing,
    "dequantize": _fake_dequantize,
    "matmul": _fake_matmul,
    "multi_tensor_cast": _fake_nothing,
}

LIBRARY = torch.library.Library("octavo", "DEF")

for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))
    LIBRARY.impl(_name, KERNELS[_name], "CompositeExplicitAutograd")
    LIBRARY.impl(_name, ON_CUDA[_name], "CUDA")
    torch.library.register_fake(f"octavo::{_name}", FAKES[_name], lib=LIBRARY)
