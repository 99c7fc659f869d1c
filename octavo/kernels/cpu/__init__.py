"""The ops that a CPU computes faster than the reference; the same bits but for the order of additions.

They cast, read codes and count in C++, work in chunks that fit a cache, and multiply in bfloat16 where that is exact.
Other devices without FP8 run them too, in larger chunks, and cast as the reference does. The other ops are the
reference's, which is as fast as can be.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.arguments import LossRows, NormGradient, NormSource, unpacking
from octavo.kernels.cpu.cast import amax, write
from octavo.kernels.cpu.codes import dequantize, measured, row_slices
from octavo.kernels.cpu.matmul import matmul
from octavo.kernels.reference.cast_statistics import cast_statistics, count
from octavo.kernels.reference.cross_entropy import cross_entropy, cross_entropy_backward, cross_entropy_codes
from octavo.kernels.reference.matmul import grouped_matmul
from octavo.kernels.reference.norm import norm, norm_backward


def _cross_entropy(rows: LossRows) -> tuple[Tensor, Tensor]:
    return cross_entropy(rows, row_slices(rows.logits.shape, 1, rows.logits.device))


def _cross_entropy_backward(rows: LossRows, lse: Tensor, grad: Tensor) -> Tensor:
    return cross_entropy_backward(rows, lse, grad, row_slices(rows.logits.shape, 1, rows.logits.device))


def _cross_entropy_codes(rows: LossRows, lse: Tensor, codes: Tensor, transposed: Tensor, first: int) -> None:
    slices = row_slices(rows.logits.shape, 1, rows.logits.device)
    cross_entropy_codes(rows, lse, codes, transposed, first, slices)


def _norm(source: NormSource, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return norm(source, residual, row_slices(source.shape, 1, source.x.device))


def _norm_backward(gradient: NormGradient) -> tuple[Tensor, Tensor, Tensor]:
    return norm_backward(gradient, row_slices(gradient.x.shape, 1, gradient.x.device))


KERNELS: dict[str, Callable[..., Any]] = reference.KERNELS | unpacking(
    {
        "amax": amax,
        "cast": partial(reference.cast, write=write),
        "cast_and_commit": partial(reference.cast_and_commit, write=write),
        "cast_statistics": partial(cast_statistics, count=partial(count, measured=measured)),
        "cross_entropy": _cross_entropy,
        "cross_entropy_backward": _cross_entropy_backward,
        "cross_entropy_codes": _cross_entropy_codes,
        "dequantize": dequantize,
        "grouped_matmul": partial(grouped_matmul, matmul=matmul),
        "matmul": matmul,
        "multi_tensor_cast": partial(reference.multi_tensor_cast, write=write),
        "norm": _norm,
        "norm_backward": _norm_backward,
    }
)
