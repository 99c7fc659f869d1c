"""The reference kernels: the definition of every op, in plain torch, on any device."""

from collections.abc import Callable
from typing import Any

from octavo.kernels.arguments import unpacking
from octavo.kernels.backward_pass import scales_of_pass
from octavo.kernels.reference.cast import amax, cast, cast_and_commit, multi_tensor_cast
from octavo.kernels.reference.cast_statistics import cast_statistics, note_faults
from octavo.kernels.reference.codes import dequantize
from octavo.kernels.reference.cross_entropy import cross_entropy, cross_entropy_backward, cross_entropy_codes
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.kernels.reference.matmul import grouped_matmul, matmul
from octavo.kernels.reference.norm import norm, norm_backward
from octavo.kernels.reference.rotary import rotary

_KERNELS: list[Callable[..., Any]] = [amax, cast, cast_and_commit, cast_statistics, cross_entropy]
_KERNELS += [cross_entropy_backward, cross_entropy_codes, delayed_update, dequantize, grouped_matmul, matmul]
_KERNELS += [multi_tensor_cast, norm, norm_backward, note_faults, rotary, scales_of_pass]
KERNELS = unpacking({kernel.__name__: kernel for kernel in _KERNELS})
