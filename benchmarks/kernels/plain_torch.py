"""The work of each case in plain torch, for torch.compile: the same outputs, without octavo's care for inf and NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from octavo.kernels.triton.cases import E4M3, E5M2, EPS, FUSED_SCALE, SCALE

Work = Callable[..., Any]


def encode(x: Tensor, scale: Tensor | float, dtype: torch.dtype = E4M3) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def largest(x: Tensor) -> Tensor:
    return x.abs().amax().float()


def scaled(
    x: Tensor, dim: int | tuple[int, ...] | None = None, dtype: torch.dtype = E4M3, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scale_inv and amax, of all or along dimensions."""
    amax = largest(x) if dim is None else x.abs().amax(dim, keepdim=True).float()
    scale = torch.finfo(dtype).max / amax.clamp(min=1e-30)
    if power_of_two:
        scale = scale.log2().floor().exp2()
    return encode(x, scale, dtype), scale.reciprocal(), amax


def transposed(codes: Tensor) -> Tensor:
    return codes.t().contiguous()


def _delayed(x: Tensor) -> tuple[Tensor, ...]:
    return encode(x, SCALE), largest(x)


def _delayed_transpose(x: Tensor, scale: float = SCALE) -> tuple[Tensor, ...]:
    codes = encode(x, scale)
    return codes, transposed(codes), largest(x)


def _dynamic_transpose(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    codes, scale_inv, amax = scaled(x, dtype=dtype)
    return codes, transposed(codes), scale_inv, amax


def _sums(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.float32).to(torch.bfloat16)


def _commit(x: Tensor, scale: float = SCALE) -> tuple[Tensor, ...]:
    codes = encode(x, scale, E5M2)
    amax = largest(x)
    history = torch.ones(16, device=x.device).roll(1)
    history[0] = amax
    return codes, transposed(codes), amax, _sums(x), 57344 / history.amax()


def _blocks(x: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    tiled = x.view(x.shape[0] // rows, rows, x.shape[1] // cols, cols)
    codes, scale_inv, _ = scaled(tiled, (1, 3), power_of_two=True)
    return codes.view(x.shape), scale_inv[:, 0, :, 0]


def _columns(x: Tensor) -> tuple[Tensor, ...]:
    codes, scale_inv, amax = scaled(x, 0)
    return transposed(codes), scale_inv, amax


def _rows_and_columns(x: Tensor) -> tuple[Tensor, ...]:
    return *scaled(x, 1)[:2], *_columns(x)[:2]


def _both_blocks(x: Tensor, size: int) -> tuple[Tensor, ...]:
    codes, scale_inv = _blocks(x, 1, size)
    other, other_scale_inv = _blocks(x, size, 1)
    return codes, scale_inv, transposed(other), transposed(other_scale_inv)


def _square_blocks(x: Tensor) -> tuple[Tensor, ...]:
    codes, scale_inv = _blocks(x, 128, 128)
    return codes, transposed(codes), scale_inv


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, 1)
    return silu(gate) * up


def _swiglu_gradient(dy: Tensor, h: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, 1)
    s, wide = torch.sigmoid(gate), dy.float()
    return torch.cat((wide * up * (s + gate * s * (1 - s)), wide * gate * s), 1)


def _gelu_gradient(dy: Tensor, h: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy.float(), h.float())


def _normed(write: Callable[[Tensor], tuple[Tensor, ...]], keep: bool = False) -> Work:
    """Return a function that casts the norm, with its statistics, and y if kept; LayerNorm is the one with a beta."""

    def run(x: Tensor, gamma: Tensor, beta: Tensor | None = None) -> tuple[Tensor, ...]:
        n, mean = x.float(), None
        if beta is not None:
            mean = n.mean(1)
            n = n - mean[:, None]
        rstd = torch.rsqrt(n.square().mean(1) + EPS)
        y = n * rstd[:, None] * gamma
        if beta is not None:
            y = y + beta
        more = (rstd, mean, y.to(x.dtype) if keep else None)
        return *write(y), *(tensor for tensor in more if tensor is not None)

    return run


def _norm_gradient(centred: bool) -> Work:
    def run(dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        n, wide = x.float(), dy.float()
        if centred:
            n = n - mean[:, None]
        n = n * rstd[:, None]
        w = wide * gamma
        dx = w - n * (w * n).mean(1, keepdim=True)
        if centred:
            dx = dx - w.mean(1, keepdim=True)
        sums = ((wide * n).sum(0), wide.sum(0)) if centred else ((wide * n).sum(0),)
        return (dx * rstd[:, None] + residual).to(x.dtype), *(total.to(gamma.dtype) for total in sums)

    return run


def _cast_of(compute: Work, write: Callable[[Tensor], tuple[Tensor, ...]]) -> Work:
    return lambda *inputs: write(compute(*inputs))


def _delayed_fused(y: Tensor) -> tuple[Tensor, ...]:
    return _delayed_transpose(y, FUSED_SCALE)


def _commit_fused(y: Tensor) -> tuple[Tensor, ...]:
    return _commit(y, FUSED_SCALE)


PLAIN: dict[str, Work] = {
    "amax": largest,
    "cast delayed": _delayed,
    "cast dynamic": scaled,
    "cast+transpose delayed": _delayed_transpose,
    "cast+transpose dynamic": _dynamic_transpose,
    "cast+transpose+sum+commit": _commit,
    "cast rows": lambda x: scaled(x, 1),
    "cast columns": _columns,
    "cast rows + columns": _rows_and_columns,
    "cast 1x128": lambda x: _blocks(x, 1, 128),
    "cast 1x128 + 128x1": lambda x: _both_blocks(x, 128),
    "cast 1x32 + 32x1": lambda x: _both_blocks(x, 32),
    "cast+transpose 128x128": _square_blocks,
    "swiglu + cast+transpose delayed": _cast_of(_swiglu, _delayed_fused),
    "swiglu + cast+transpose dynamic": _cast_of(_swiglu, _dynamic_transpose),
    "gelu_tanh + cast+transpose delayed": _cast_of(lambda h: gelu(h.float(), approximate="tanh"), _delayed_fused),
    "gelu + cast+transpose delayed": _cast_of(lambda h: gelu(h.float()), _delayed_fused),
    "swiglu + rows + columns": _cast_of(_swiglu, _rows_and_columns),
    "swiglu + 1x128 + 128x1": _cast_of(_swiglu, lambda y: _both_blocks(y, 128)),
    "swiglu gradient + cast+transpose+sum+commit": _cast_of(_swiglu_gradient, _commit_fused),
    "swiglu gradient + cast+transpose+sum dynamic": _cast_of(
        _swiglu_gradient, lambda dh: (*_dynamic_transpose(dh, E5M2), _sums(dh))
    ),
    "gelu gradient + cast+transpose+sum+commit": _cast_of(_gelu_gradient, _commit_fused),
    "swiglu gradient + 1x128 + 128x1 + sum": _cast_of(_swiglu_gradient, lambda dh: (*_both_blocks(dh, 128), _sums(dh))),
    "rmsnorm + cast+transpose delayed": _normed(_delayed_fused),
    "rmsnorm + cast+transpose dynamic": _normed(_dynamic_transpose),
    "layernorm + cast+transpose delayed": _normed(_delayed_fused),
    "rmsnorm, y kept + cast+transpose delayed": _normed(_delayed_fused, keep=True),
    "rmsnorm + 1x128 + 128x1": _normed(lambda y: _both_blocks(y, 128)),
    "rmsnorm gradient + residual": _norm_gradient(False),
    "layernorm gradient + residual": _norm_gradient(True),
}


def compiled(work: Work, toy: bool) -> Work:
    """Return the work compiled for each shape; if ``toy`` only traced, which is quick."""
    return torch.compile(work, fullgraph=True, dynamic=False, backend="aot_eager" if toy else "inductor")
