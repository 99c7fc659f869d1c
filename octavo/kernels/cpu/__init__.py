"""The ops that a CPU computes faster than the reference; the same bits but for the order of additions.

They cast, read codes and count in C++, work in chunks that fit a cache, and multiply in bfloat16 where that is exact.
Other devices without FP8 run them too, in larger chunks, and cast as the reference does. The other ops are the
reference's, which is as fast as can be.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from octavo.kernels import reference
from octavo.kernels.arguments import unpacking
from octavo.kernels.cpu.cast import amax, write
from octavo.kernels.cpu.codes import dequantize, measured, row_slices
from octavo.kernels.cpu.matmul import matmul
from octavo.kernels.reference.cast_statistics import cast_statistics, count
from octavo.kernels.reference.cross_entropy import cross_entropy, cross_entropy_backward, cross_entropy_codes
from octavo.kernels.reference.matmul import grouped_matmul
from octavo.kernels.reference.norm import norm, norm_backward


def _in_slices(kernel: Callable[..., Any], rows: str) -> Callable[..., Any]:
    """Return a kernel that works through slices of rows, which fit a cache; ``rows``: its first argument's field."""
    tensor_of = attrgetter(rows)

    def call(first: Any, *others: Any) -> Any:
        x = tensor_of(first)
        return kernel(first, *others, row_slices(x.shape, 1, x.device))

    return call


KERNELS: dict[str, Callable[..., Any]] = reference.KERNELS | unpacking(
    {
        "amax": amax,
        "cast": partial(reference.cast, write=write),
        "cast_and_commit": partial(reference.cast_and_commit, write=write),
        "cast_statistics": partial(cast_statistics, count=partial(count, measured=measured)),
        "cross_entropy": _in_slices(cross_entropy, "logits"),
        "cross_entropy_backward": _in_slices(cross_entropy_backward, "logits"),
        "cross_entropy_codes": _in_slices(cross_entropy_codes, "logits"),
        "dequantize": dequantize,
        "grouped_matmul": partial(grouped_matmul, matmul=matmul),
        "matmul": matmul,
        "multi_tensor_cast": partial(reference.multi_tensor_cast, write=write),
        "norm": _in_slices(norm, "x"),
        "norm_backward": _in_slices(norm_backward, "x"),
    }
)
