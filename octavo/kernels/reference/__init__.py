"""The reference kernels: the definition of every op, in plain torch, on any device."""

from collections.abc import Callable
from typing import Any

from octavo.kernels.arguments import unpacking
from octavo.kernels.backward_pass import scales_of_pass
from octavo.kernels.reference.cast import amax, cast, cast_and_commit, multi_tensor_cast
from octavo.kernels.reference.cast_statistics import cast_statistics
from octavo.kernels.reference.codes import dequantize
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.kernels.reference.matmul import grouped_matmul, matmul
from octavo.kernels.reference.norm import norm_backward
from octavo.kernels.reference.note_faults import note_faults

KERNELS: dict[str, Callable[..., Any]] = unpacking(
    {
        "amax": amax,
        "cast": cast,
        "cast_and_commit": cast_and_commit,
        "cast_statistics": cast_statistics,
        "delayed_update": delayed_update,
        "dequantize": dequantize,
        "grouped_matmul": grouped_matmul,
        "matmul": matmul,
        "multi_tensor_cast": multi_tensor_cast,
        "note_faults": note_faults,
        "scales_of_pass": scales_of_pass,
        "norm_backward": norm_backward,
    }
)
