"""The Triton kernels, on CUDA tensors; one file an op.

Casts equal their reference bit for bit; those that compute an exp or a row's sum, to float32's rounding.
"""

from collections.abc import Callable
from typing import Any

from octavo.kernels.arguments import unpacking
from octavo.kernels.backward_pass import scales_of_pass
from octavo.kernels.triton.cast import amax, cast, cast_and_commit, norm
from octavo.kernels.triton.cast_statistics import cast_statistics, note_faults
from octavo.kernels.triton.cross_entropy import cross_entropy, cross_entropy_backward, cross_entropy_codes
from octavo.kernels.triton.delayed_update import delayed_update, scale_exists
from octavo.kernels.triton.dequantize import dequantize
from octavo.kernels.triton.grouped_matmul import grouped_matmul
from octavo.kernels.triton.launch import on_its_device
from octavo.kernels.triton.library_matmul import reads_swizzled
from octavo.kernels.triton.matmul import matmul
from octavo.kernels.triton.multi_tensor_cast import multi_tensor_cast
from octavo.kernels.triton.norm_kernels import norm_backward
from octavo.kernels.triton.optimizer_step import optimizer_step
from octavo.kernels.triton.replay import replayed
from octavo.kernels.triton.rotary import rotary

__all__ = ["KERNELS", "optimizer_step", "reads_swizzled"]

_KERNELS: list[Callable[..., Any]] = [amax, cast, cast_and_commit, cast_statistics, cross_entropy]
_KERNELS += [cross_entropy_backward, cross_entropy_codes, delayed_update, dequantize, grouped_matmul, matmul]
_KERNELS += [multi_tensor_cast, norm, norm_backward, note_faults, rotary, scales_of_pass]
_APART = "multi_tensor_cast", "scales_of_pass"  # not replayed: lists of tensors; no launch
_EXISTS: dict[str, Callable[..., bool]] = {
    "cast": lambda x, delayed_scale, role: delayed_scale is not None and scale_exists(delayed_scale, role),
    "cast_and_commit": lambda x, delayed_scale, history: scale_exists(delayed_scale, 2),  # grad_output's
}
KERNELS = {
    name: on_its_device(kernel if name in _APART else replayed(kernel, _EXISTS.get(name)))
    for name, kernel in unpacking({kernel.__name__: kernel for kernel in _KERNELS}).items()
}
