"""Octavo's ops as standard ONNX operators: QuantizeLinear, DequantizeLinear, and torch.onnx's translations of aten.

Each function here takes an op's arguments and computes it by aten and torch.onnx.ops.symbolic; torch.export's
run_decompositions puts it in the op's place. They cover evaluation on a CPU, in float32.

A scale_inv becomes a QuantizeLinear's y_scale: a scalar for a whole tensor, a vector for rows or columns (``axis``), a
matrix for blocks along one dimension (``block_size``). The scale of a tile is repeated for its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.onnx import ops as onnx_ops

from octavo.errors import ExportError
from octavo.granularity import ALL
from octavo.kernels.arguments import (
    CastSource,
    NormSource,
    Output,
    ProductArguments,
    RotaryHeads,
    Scaling,
    unpacking,
)
from octavo.kernels.reference.activation import activate
from octavo.kernels.reference.rotary import turned
from octavo.numerics import floor_power_of_two_by_comparison, scale_from_amax, scale_inv_from_scale

VERSION = 21  # the opset in which QuantizeLinear got block_size and output_dtype
_TYPES = {torch.float8_e4m3fn: 17, torch.float8_e5m2: 19}  # TensorProto's FLOAT8E4M3FN and FLOAT8E5M2


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return {octavo op: its replacement}, for torch.export.ExportedProgram.run_decompositions."""
    ops = unpacking({"amax": _amax, "cast": _cast, "dequantize": _dequantize, "matmul": _matmul, "rotary": _rotary})
    return {getattr(torch.ops.octavo, name).default: function for name, function in ops.items()}


def _cast(
    source: CastSource | NormSource, scaling: Scaling, second: Scaling | None, output: Output, offsets: Tensor | None
) -> list[Tensor]:
    """Return the results of ``octavo::cast``, whose codes QuantizeLinear writes."""
    y, none = source.x, source.x.new_empty(0)
    if isinstance(source, NormSource):
        y = _normalised(*source)
        besides = [none, none, y if output.keep else y.new_empty((0, 0))]
    elif source.preactivation is not None or source.h_scale_inv is not None or output.column_sum or second:
        raise ExportError("a gradient can't be exported: call the model under torch.no_grad()")
    else:
        y, besides = activate(y, source.activation) if source.activation else y, [none]
    if scaling.is_packed:
        raise ExportError("ONNX has no E2M1 in blocks with a scale for the tensor: set a recipe of E4M3 first")
    dtype, tile, power_of_two, margin, delayed_scale, role = scaling[:6]
    amax = _amax(y, tile)
    if delayed_scale is None:
        scale = scale_from_amax(amax, torch.finfo(dtype).max, False, margin)
        scale = floor_power_of_two_by_comparison(scale) if power_of_two else scale
    else:
        scale = delayed_scale[role].reshape(1, 1)
    scale_inv = scale_inv_from_scale(scale)
    codes = _linear("QuantizeLinear", y, scale_inv, tile, dtype, {"output_dtype": _TYPES[dtype]})
    return [codes, codes.new_empty((0, 0)), scale_inv, amax, *besides]


def _rotary(heads: RotaryHeads) -> Tensor:
    """Return the result of ``octavo::rotary``."""
    return torch.cat([x.to(heads.q.dtype) for x in turned(heads)], 2).flatten(2)


def _dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values of codes by DequantizeLinear."""
    return _linear("DequantizeLinear", qdata, scale_inv, tile, torch.float32, {}).to(dtype)


def _matmul(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Return the product of both operands' values, in float32."""
    x, weight = (_dequantize(*pair, torch.float32) for pair in operands[:2])
    return F.linear(x, weight, operands.bias).to(out_dtype)


def _linear(
    op: str, x: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype, attributes: dict[str, Any]
) -> Tensor:
    """Return QuantizeLinear or DequantizeLinear of x [R, C] to ``dtype``; scale_inv [R / r, C / c]: one a tile."""
    (rows, cols), (r, c) = x.shape, tile
    if r == ALL and c == ALL:
        scales = scale_inv.reshape(())
    elif c == ALL:
        scales, attributes = _repeated(scale_inv, r, rows).reshape(rows), {"axis": 0, **attributes}
    elif r == ALL:
        scales, attributes = _repeated(scale_inv.t(), c, cols).reshape(cols), {"axis": 1, **attributes}
    else:
        scales, attributes = _repeated(scale_inv, r, rows), {"axis": 1, "block_size": c, **attributes}
    return onnx_ops.symbolic(op, [x, scales], attributes, dtype=dtype, shape=x.shape, version=VERSION)


def _normalised(x: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, eps: float, zero_centered: bool) -> Tensor:
    """Return a norm of x by torch's own, which torch.onnx translates."""
    factor, features = gamma + 1.0 if zero_centered else gamma, (x.shape[1],)
    if kind == "layer_norm":
        return F.layer_norm(x, features, factor, beta, eps)
    y = F.rms_norm(x, features, factor, eps)
    return y if beta is None else y + beta


def _repeated(scale_inv: Tensor, times: int, rows: int) -> Tensor:
    """Return scale_inv with each row repeated for every row of its tile, [rows, ...]."""
    if times == 1:
        return scale_inv
    tiles, cols = scale_inv.shape
    if times == ALL:
        return scale_inv.expand(rows, cols)
    return scale_inv[:, None].expand(tiles, times, cols).reshape(tiles * times, cols)[:rows]


def _amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Return the amax of each tile. Unlike octavo's, it is inf or NaN if an element of the tile is."""
    r, c = tile
    if r == ALL and c == ALL:
        return x.abs().amax((0, 1), keepdim=True)
    amax_of_columns = _amax_of_columns(x.abs(), c)
    return amax_of_columns if r == 1 else _amax_of_columns(amax_of_columns.t(), r).t()


def _amax_of_columns(x: Tensor, count: int) -> Tensor:
    """Return the largest of each ``count`` columns of a row, [rows, tiles]."""
    rows, cols = x.shape
    if count == ALL:
        return x.amax(1, keepdim=True)
    if count == 1:
        return x
    tiles = (cols + count - 1) // count  # by positive numbers: torch.onnx rounds quotients towards 0
    if not isinstance(cols, int) or cols % count:
        x = F.pad(x, (0, tiles * count - cols))
    return x.reshape(rows, tiles, count).amax(2)
