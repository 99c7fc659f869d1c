"""The same work as each case by torch.compile, from plain torch, and by torchao's own functions.

The plain versions write the same outputs, without octavo's care for infinities and NaN. torchao's functions for one
scale a tensor or a row are plain torch that it expects to be compiled, and are; its kernels for 1x128 and 128x128
blocks are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import E4M3, E5M2, SCALE

Work = Callable[[Tensor], Any]


def _codes(x: Tensor, scale: Tensor | float, dtype: torch.dtype = E4M3) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax().float()


def _scaled(x: Tensor, dim: int | tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scale_inv from the amax of all, or along dimensions."""
    amax = _amax(x) if dim is None else x.abs().amax(dim, keepdim=True).float()
    scale = 448.0 / amax.clamp(min=1e-30)
    return _codes(x, scale), scale.reciprocal()


def _transposed(codes: Tensor) -> Tensor:
    return codes.t().contiguous()


def _delayed(x: Tensor) -> Any:
    return _codes(x, SCALE), _amax(x)


def _delayed_transpose(x: Tensor) -> Any:
    codes = _codes(x, SCALE)
    return codes, _transposed(codes), _amax(x)


def _dynamic_transpose(x: Tensor) -> Any:
    codes, scale_inv = _scaled(x)
    return codes, _transposed(codes), scale_inv


def _commit(x: Tensor) -> Any:
    codes = _codes(x, SCALE, E5M2)
    amax = _amax(x)
    history = torch.ones(16, device=x.device).roll(1)
    history[0] = amax
    return codes, _transposed(codes), amax, x.sum(0, dtype=torch.float32).to(x.dtype), 57344 / history.amax()


def _blocks(x: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    tiled = x.view(x.shape[0] // rows, rows, x.shape[1] // cols, cols)
    codes, scale_inv = _scaled(tiled, (1, 3))
    return codes.view(x.shape), scale_inv[:, 0, :, 0]


def _columns(x: Tensor) -> Any:
    codes, scale_inv = _scaled(x, 0)
    return _transposed(codes), scale_inv


def _both_blocks(x: Tensor, size: int) -> Any:
    codes, scale_inv = _blocks(x, 1, size)
    other, other_scale_inv = _blocks(x, size, 1)
    return codes, scale_inv, _transposed(other), _transposed(other_scale_inv)


def _square_blocks(x: Tensor) -> Any:
    codes, scale_inv = _blocks(x, 128, 128)
    return codes, _transposed(codes), scale_inv


PLAIN: dict[str, Work] = {
    "amax": _amax,
    "cast delayed": _delayed,
    "cast dynamic": lambda x: _scaled(x),
    "cast+transpose delayed": _delayed_transpose,
    "cast+transpose dynamic": _dynamic_transpose,
    "cast+transpose+sum+commit": _commit,
    "cast rows": lambda x: _scaled(x, 1),
    "cast columns": _columns,
    "cast rows + columns": lambda x: (*_scaled(x, 1), *_columns(x)),
    "cast 1x128": lambda x: _blocks(x, 1, 128),
    "cast 1x128 + 128x1": lambda x: _both_blocks(x, 128),
    "cast 1x32 + 32x1": lambda x: _both_blocks(x, 32),
    "cast+transpose 128x128": _square_blocks,
}


def torchao_works() -> tuple[dict[str, Work], set[str]]:
    """torchao's functions by case, and which of them are to be compiled.

    Raises:
        ImportError: without torchao.
    """
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.float8_utils import tensor_to_amax

    def scaled(x: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
        granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
        pair = hp_tensor_to_float8_dynamic(x, E4M3, LinearMMConfig(), scaling_granularity=granularity, axiswise_dim=dim)
        return pair._data, pair._scale

    def dynamic_transpose(x: Tensor) -> Any:
        data, scale = scaled(x)
        return data, _transposed(data), scale

    def columns(x: Tensor) -> Any:
        data, scale = scaled(x, 0)
        return _transposed(data), scale

    compiled: dict[str, Work] = {
        "amax": tensor_to_amax,
        "cast dynamic": lambda x: scaled(x),
        "cast+transpose dynamic": dynamic_transpose,
        "cast rows": lambda x: scaled(x, -1),
        "cast columns": columns,
        "cast rows + columns": lambda x: (*scaled(x, -1), *columns(x)),
    }
    works = dict(compiled)
    try:
        works |= _torchao_blocks()
    except Exception:  # a prototype: absent, or not for this Triton
        pass
    return works, set(compiled)


def _torchao_blocks() -> dict[str, Work]:
    from torchao.prototype.blockwise_fp8_training import kernels

    return {
        "cast 1x128": kernels.triton_fp8_blockwise_act_quant_lhs,
        "cast 1x128 + 128x1": lambda x: (
            *kernels.triton_fp8_blockwise_act_quant_lhs(x),
            *kernels.triton_fp8_blockwise_act_quant_transposed_lhs(x),
        ),
        "cast+transpose 128x128": lambda x: (
            *kernels.triton_fp8_blockwise_weight_quant_rhs(x),
            *kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(x),
        ),
    }


def compiled(work: Work, toy: bool) -> Work:
    """torch.compile'd for each shape; on a CPU only traced, which is quick."""
    return torch.compile(work, fullgraph=True, dynamic=False, backend="aot_eager" if toy else "inductor")
