"""The casts' flat arguments, unpacked once: what is cast, how, and what is written. signatures.py says what each is.

The reference, the Triton kernels and the fakes take these values, and allocate what they return by the functions here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.granularity import ALL, scale_shape
from octavo.kernels.activations import cast_shape
from octavo.kernels.layouts import check_norm, padded, sums_dtype


class CastSource(NamedTuple):
    """What is cast: x itself, an activation of it, or of a preactivation the gradient."""

    x: Tensor
    activation: str = ""
    preactivation: Tensor | None = None
    h_scale_inv: Tensor | None = None
    h_tile: Sequence[int] = (ALL, ALL)

    @property
    def shape(self) -> tuple[int, int]:
        """Of what is cast."""
        h = None if self.preactivation is None else self.preactivation.shape
        return cast_shape(self.x.shape, self.activation, h, self.h_scale_inv is not None)


class NormSource(NamedTuple):
    """What is cast: a norm of x."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    kind: str
    eps: float
    zero_centered: bool


class Scaling(NamedTuple):
    """How it is cast; with a delayed_scale, by its element ``role``."""

    dtype: torch.dtype
    tile: Sequence[int]
    power_of_two: bool
    margin: int
    delayed_scale: Tensor | None = None
    role: int = 0


class Output(NamedTuple):
    """What is written: transposed codes too (of two scalings, the second's only so), and what else."""

    transpose: bool
    pad: int = 1
    column_sum: bool = False
    keep: bool = False


class Commit(NamedTuple):
    """The delayed state that a cast of grad_output rolls, the amax of forward's casts, and how."""

    delayed_scale: Tensor
    delayed_amax_history: Tensor
    amax_input: Tensor | None
    amax_weight: Tensor | None
    limits: Sequence[float]
    powers_of_two: Sequence[bool]
    margins: Sequence[int]
    reduce: str


class Operands(NamedTuple):
    """What a product multiplies, and the bias that it adds."""

    a: Tensor
    a_scale_inv: Tensor
    a_tile: Sequence[int]
    b: Tensor
    b_scale_inv: Tensor
    b_tile: Sequence[int]
    bias: Tensor | None


def _cast(x: Tensor, *flat: Any) -> tuple[Any, ...]:
    return CastSource(x, *flat[8:]), _scaling(*flat[:6]), Output(False, *flat[6:8])


def _cast_transpose(x: Tensor, *flat: Any) -> tuple[Any, ...]:
    return CastSource(x, *flat[8:]), _scaling(*flat[:6]), Output(True, *flat[6:8])


def _cast_two_scalings(x: Tensor, *flat: Any) -> tuple[Any, ...]:
    return CastSource(x, *flat[11:]), Scaling(*flat[:4]), Scaling(*flat[4:8]), Output(*flat[8:11])


def _cast_and_commit(x: Tensor, *flat: Any) -> tuple[Any, ...]:
    scaling = Scaling(flat[4], (ALL, ALL), flat[5], flat[6], flat[0], 2)
    return CastSource(x, *flat[14:]), scaling, Commit(*flat[:4], *flat[7:11]), Output(*flat[11:14])


def _norm_cast(*flat: Any) -> tuple[Any, ...]:
    source = NormSource(*flat[:6])
    check_norm(*source[:4])
    return source, _scaling(*flat[6:12]), _norm_output(*flat[12:])


def _norm_cast_two_scalings(*flat: Any) -> tuple[Any, ...]:
    source = NormSource(*flat[:6])
    check_norm(*source[:4])
    return source, Scaling(*flat[6:10]), Scaling(*flat[10:14]), _norm_output(*flat[14:])


def _matmul_cast(*flat: Any) -> tuple[Any, ...]:
    return Operands(*flat[:7]), flat[7], _scaling(*flat[8:14]), Output(*flat[14:])


def _scaling(
    delayed_scale: Tensor | None, role: int, dtype: torch.dtype, tile: Sequence[int], power_of_two: bool, margin: int
) -> Scaling:
    return Scaling(dtype, tile, power_of_two, margin, delayed_scale, role)


def _norm_output(transpose: bool, pad: int = 1, keep: bool = False) -> Output:
    return Output(transpose, pad, False, keep)


_UNPACK: dict[str, Callable[..., tuple[Any, ...]]] = {
    "cast": _cast,
    "cast_transpose": _cast_transpose,
    "cast_two_scalings": _cast_two_scalings,
    "cast_and_commit": _cast_and_commit,
    "norm_cast": _norm_cast,
    "norm_cast_two_scalings": _norm_cast_two_scalings,
    "matmul_cast": _matmul_cast,
}


def unpacking(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of these values as one of the op's flat arguments; one of flat arguments as it is.

    Args:
        name: the op's.
        kernel: an implementation; of ``cast`` one that returns transposed codes too.
    """
    unpack = _UNPACK.get(name)
    if unpack is None:
        return kernel

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        results = kernel(*unpack(*arguments))
        return (results[0], *results[2:]) if name == "cast" else results

    return call


def new_codes(x: Tensor, shape: Sequence[int], dtype: torch.dtype, pad: int, transpose: bool = False) -> Tensor:
    """Where the codes of a tensor of this shape go, unwritten."""
    rows, cols = shape[::-1] if transpose else shape
    return x.new_empty((rows, padded(cols, pad)), dtype=dtype)


def new_both_codes(x: Tensor, shape: Sequence[int], dtype: torch.dtype, output: Output) -> tuple[Tensor, Tensor]:
    """The same, and where transposed ones go: [0, 0] where there are none."""
    laid = new_codes(x, shape, dtype, output.pad, transpose=True) if output.transpose else no_codes(x, dtype)
    return new_codes(x, shape, dtype, output.pad), laid


def no_codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What an op returns for codes that were not asked for."""
    return x.new_empty((0, 0), dtype=dtype)


def new_scales(x: Tensor, shape: Sequence[int], tile: Sequence[int], transpose: bool = False) -> Tensor:
    """Where an element a tile goes, float32, unwritten."""
    found = scale_shape(shape, tile)
    return x.new_empty(found[::-1] if transpose else found, dtype=torch.float32)


def new_sums(x: Tensor, cols: int, column_sum: bool) -> Tensor:
    """Where column sums go, unwritten."""
    return x.new_empty(cols if column_sum else 0, dtype=sums_dtype(x.dtype))


def new_statistics(source: NormSource, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Where a norm's (mean, rstd, y) go, unwritten."""
    x = source.x
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    mean = torch.empty_like(rstd) if source.kind == "layer_norm" else rstd.new_empty(0)
    return mean, rstd, x.new_empty(x.shape if keep else (0, 0))
