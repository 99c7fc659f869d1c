"""The kernels, by name: plain tensors in, plain tensors out. Contracts are in signatures.py.

In eager a call goes straight to the kernel; while anything traces (torch.compile, fake tensors, dispatch modes) it
goes through the registered op, so that graphs hold one opaque node and modes see it. The dispatcher would cost 4 us a
call, with four calls in a layer's step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.kernels.reference import KERNELS
from octavo.kernels.signatures import SCHEMAS

_is_compiling: Callable[[], bool] = torch.compiler.is_compiling
_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack


def _entry(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.octavo, name).default
    reference = KERNELS[name]

    def call(x: torch.Tensor, *args: Any) -> Any:
        if _is_compiling() or type(x) is not torch.Tensor or not x.is_cpu or _modes_active():
            return op(x, *args)
        return reference(x, *args)

    call.__name__, call.__doc__ = name, f"octavo::{name}{SCHEMAS[name]}"
    return call


amax = _entry("amax")
cast = _entry("cast")
cast_transpose = _entry("cast_transpose")
cast_two_scalings = _entry("cast_two_scalings")
cast_and_commit = _entry("cast_and_commit")
delayed_update = _entry("delayed_update")
dequantize = _entry("dequantize")
matmul = _entry("matmul")

__all__ = list(SCHEMAS)
