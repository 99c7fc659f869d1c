"""The kernels, by name: plain tensors in, plain tensors out. Contracts are in signatures.py.

In eager a call goes straight to the kernel that the device has (devices.py); while anything traces (torch.compile, fake
tensors, dispatch modes, torch.jit.trace) it goes through the registered op, so that graphs hold one opaque node and
modes see it. From torch 2.13 on, code that Inductor compiled then calls these functions again, as the dispatcher costs
time for each argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from octavo.kernels.cpu import KERNELS
from octavo.kernels.cpu.cast import produced as produced
from octavo.kernels.devices import kernels_of
from octavo.kernels.reference.norm import normalised as normalised
from octavo.kernels.signatures import SCHEMAS
from octavo.private import modes_active, tracing_state

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_is_compiling: Callable[[], bool] = torch.compiler.is_compiling


def _entry(name: str) -> Callable[..., Any]:
    """Return the function of an op: the device's kernel, or the registered op where something traces."""
    op = getattr(torch.ops.octavo, name).default
    on_cpu = KERNELS[name]

    def call(x: torch.Tensor, *args: Any, **named: Any) -> Any:
        if _is_compiling() or type(x) not in _PLAIN or modes_active() or tracing_state():
            return op(x, *args, **named)
        if x.is_cpu:
            return on_cpu(x, *args, **named)
        if x.is_cuda:
            return kernels_of(x.get_device())[name](x, *args, **named)
        return op(x, *args, **named)

    call.__name__, call.__doc__ = name, f"octavo::{name}{SCHEMAS[name]}"
    return call


amax = _entry("amax")
cast = _entry("cast")
cast_and_commit = _entry("cast_and_commit")
cast_statistics = _entry("cast_statistics")
cross_entropy = _entry("cross_entropy")
cross_entropy_backward = _entry("cross_entropy_backward")
cross_entropy_codes = _entry("cross_entropy_codes")
delayed_update = _entry("delayed_update")
dequantize = _entry("dequantize")
rotary = _entry("rotary")
scales_of_pass = _entry("scales_of_pass")
grouped_matmul = _entry("grouped_matmul")
matmul = _entry("matmul")
note_faults = _entry("note_faults")
norm = _entry("norm")
norm_backward = _entry("norm_backward")


def multi_tensor_cast(xs: Sequence[torch.Tensor], *args: Any) -> None:
    """Call the op itself: a list of tensors saves launches, beside which its dispatch costs little."""
    torch.ops.octavo.multi_tensor_cast(xs, *args)


# the functions that signatures.DIRECT names
torch.ops.octavo.direct = SimpleNamespace(**{name: globals()[name] for name in SCHEMAS})  # type: ignore[attr-defined]
