"""The casts of activations, of their gradients and of norms that are timed, and the norms' own gradients.

x [R, C], from which inputs are made, has the shape of what is cast. All other numbers are from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.reference.norm import normalise
from octavo.tune.plain_cases import COLUMNS, E4M3, E5M2, ROWS, TENSOR, UPDATE, Case, Named, delayed_state, second
from octavo.tune.timing import DEVICE

SCALE = 16.0  # of products of normal numbers: nothing saturates
EPS = 1e-5
GATED = {"swiglu"}
KINDS = {"rmsnorm": "rms_norm", "layernorm": "layer_norm"}
VECTOR, TALL = (1, 128), (128, 1)
MX, MX_TALL = (1, 32), (32, 1)

Make = Callable[[], tuple[Any, ...]]  # an op's arguments from the scale up to the margin


def _normal(rows: int, cols: int, seed: int) -> Tensor:
    """Normal numbers [rows, cols], bf16."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, cols, dtype=torch.bfloat16, device=DEVICE, generator=generator)


def _delayed() -> tuple[Any, ...]:
    return delayed_state(SCALE)[0], 0, E4M3, TENSOR, False, 0


def _delayed_gradient() -> tuple[Any, ...]:
    return delayed_state(SCALE)[0], 2, E5M2, TENSOR, False, 0


def _dynamic(dtype: torch.dtype, tile: Sequence[int] = TENSOR, power_of_two: bool = False) -> Make:
    return lambda: (None, 0, dtype, tile, power_of_two, 0)


def _commit() -> tuple[Any, ...]:
    amax = torch.full((1, 1), 5.0, device=DEVICE)
    return *delayed_state(SCALE), amax, amax, E5M2, False, 0, *UPDATE, True


def _activated(activation: str, op: str, make: Make, reads: int = 1, transpose: bool = True, **named: Any) -> Case:
    """The cast of an activation."""

    def inputs(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat((x, _normal(x.shape[0], x.shape[1], 1)), 1),) if activation in GATED else (x,)

    def arguments(h: Tensor) -> tuple[Any, ...]:
        transposed = (transpose,) if op != "cast_and_commit" else ()
        return h, *make(), *transposed, 1, False, activation, Named(named)

    return Case(op, arguments, reads, inputs, exact=False)


def _gradient(
    activation: str,
    op: str,
    make: Make,
    reads: int = 1,
    transpose: bool = True,
    column_sum: bool = True,
    saved: Sequence[int] | None = None,
    **named: Any,
) -> Case:
    """The cast of an activation's gradient; ``saved``: the tile of the codes that the activation's input is kept in."""

    def inputs(x: Tensor) -> tuple[Tensor, ...]:
        rows, cols = x.shape
        h = (x,) if saved is None else REFERENCE["cast"](x, None, 0, E4M3, saved, False, 0)[:3:2]
        return _normal(rows, cols // 2 if activation in GATED else cols, 1), *h

    def arguments(dy: Tensor, *h: Any) -> tuple[Any, ...]:
        transposed = (transpose,) if op != "cast_and_commit" else ()
        tile = () if saved is None else (saved,)
        return dy, *make(), *transposed, 1, column_sum, activation, *h, *tile, Named(named)

    return Case(op, arguments, reads, inputs, exact=False)


def _parameters(norm: str, x: Tensor) -> tuple[Tensor, ...]:
    """(gamma, beta), or gamma alone."""
    wide = 0.1 * _normal(2, x.shape[1], 2)
    return (wide[0] + 1,) if norm == "rmsnorm" else (wide[0] + 1, wide[1])


def _normed(norm: str, make: Make, transpose: bool = True, reads: int = 1, keep: bool = False, **named: Any) -> Case:
    """The cast of a norm."""

    def inputs(x: Tensor) -> tuple[Tensor, ...]:
        return x, *_parameters(norm, x)

    def arguments(x: Tensor, gamma: Tensor, beta: Tensor | None = None) -> tuple[Any, ...]:
        of_norm = {"gamma": gamma, "beta": beta, "kind": KINDS[norm], "eps": EPS, "keep": keep}
        return x, *make(), transpose, Named(of_norm | named)

    return Case("cast", arguments, reads, inputs, exact=False)


def _norm_gradient(norm: str) -> Case:
    """A norm's gradient, to which that of a residual branch is added."""

    def inputs(x: Tensor) -> tuple[Tensor, ...]:
        gamma, *beta = _parameters(norm, x)
        _, mean, rstd = normalise(x, gamma, beta[0] if beta else None, KINDS[norm], EPS, False)
        return _normal(x.shape[0], x.shape[1], 1), x, gamma, mean, rstd, _normal(x.shape[0], x.shape[1], 3)

    def arguments(dy: Tensor, *others: Tensor) -> tuple[Any, ...]:
        *saved, residual = others
        return dy, *saved, KINDS[norm], False, norm == "layernorm", residual

    return Case("norm_backward", arguments, 1, inputs, exact=False)


_VECTORS = _dynamic(E4M3, VECTOR, True)

CASES = {
    "swiglu + cast+transpose delayed": _activated("swiglu", "cast", _delayed),
    "swiglu + cast+transpose dynamic": _activated("swiglu", "cast", _dynamic(E4M3), 2),
    "gelu_tanh + cast+transpose delayed": _activated("gelu_tanh", "cast", _delayed),
    "gelu + cast+transpose delayed": _activated("gelu", "cast", _delayed),
    "swiglu + rows + columns": _activated("swiglu", "cast", _dynamic(E4M3, ROWS), 2, **second(COLUMNS, False)),
    "swiglu + 1x128 + 128x1": _activated("swiglu", "cast", _VECTORS, **second(TALL, True)),
    "swiglu gradient + cast+transpose+sum+commit": _gradient("swiglu", "cast_and_commit", _commit),
    "swiglu gradient + cast+transpose+sum dynamic": _gradient("swiglu", "cast", _dynamic(E5M2), 2),
    "gelu gradient + cast+transpose+sum+commit": _gradient("gelu", "cast_and_commit", _commit),
    "swiglu gradient + 1x128 + 128x1 + sum": _gradient("swiglu", "cast", _VECTORS, **second(TALL, True)),
    "rmsnorm + cast+transpose delayed": _normed("rmsnorm", _delayed),
    "rmsnorm + cast+transpose dynamic": _normed("rmsnorm", _dynamic(E4M3), reads=2),
    "layernorm + cast+transpose delayed": _normed("layernorm", _delayed),
    "rmsnorm, y kept + cast+transpose delayed": _normed("rmsnorm", _delayed, keep=True),
    "rmsnorm + 1x128 + 128x1": _normed("rmsnorm", _VECTORS, **second(TALL, True)),
    "rmsnorm gradient + residual": _norm_gradient("rmsnorm"),
    "layernorm gradient + residual": _norm_gradient("layernorm"),
}

# whose configurations no other case would show
ONLY_TUNED = {
    "swiglu gradient + cast+sum delayed": _gradient("swiglu", "cast", _delayed_gradient, transpose=False),
    "swiglu gradient + rows": _gradient("swiglu", "cast", _dynamic(E4M3, ROWS), transpose=False, column_sum=False),
    "swiglu gradient of codes + cast+transpose+sum+commit": _gradient("swiglu", "cast_and_commit", _commit, saved=MX),
    "rmsnorm + cast delayed": _normed("rmsnorm", _delayed, transpose=False),
    "rmsnorm + rows": _normed("rmsnorm", _dynamic(E4M3, ROWS), transpose=False),
    "rmsnorm + 1x128": _normed("rmsnorm", _dynamic(E4M3, VECTOR, True), transpose=False),
    "rmsnorm + 1x32 + 32x1": _normed("rmsnorm", _dynamic(E4M3, MX, True), **second(MX_TALL, True)),
}
