"""The casts and norms that are timed: how each is called, and that its results are right.

A case's arguments are made once for each input; the same go to the Triton kernel and to the reference. The bytes of a
case are what it must at least move: its inputs once (twice where the scale needs an amax of the whole tensor first) and
each of its outputs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.reference.optimizer_step import optimizer_step as reference_step
from octavo.kernels.triton import KERNELS as TRITON
from octavo.kernels.triton import optimizer_step
from octavo.tune import fused_cases, plain_cases, step_cases
from octavo.tune.agreement import difference, same_state
from octavo.tune.plain_cases import E4M3, ROWS, TENSOR, call, many
from octavo.tune.timing import DEVICE, synchronize

__all__ = ["CASES", "E4M3", "ROWS", "TENSOR", "calls", "inputs", "reads", "wrong"]

KERNELS = {**TRITON, "many": many(TRITON["multi_tensor_cast"])}
KERNELS["step"] = step_cases.stepping(optimizer_step, keeps_plans=True)
DEFINITIONS = {**REFERENCE, "many": many(REFERENCE["multi_tensor_cast"])}
DEFINITIONS["step"] = step_cases.stepping(reference_step, keeps_plans=False)
CASES = {**plain_cases.CASES, **fused_cases.CASES}
_ALL = {**CASES, **fused_cases.ONLY_TUNED, **step_cases.CASES}


def inputs(rows: int, cols: int, sets: int) -> list[Tensor]:
    """So many tensors [rows, cols] of normal numbers, bf16."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(rows, cols, dtype=torch.bfloat16, device=DEVICE, generator=generator) for _ in range(sets)]


def reads(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """What the case reads, made from x."""
    return _ALL[name].inputs(x)


def _arguments(name: str, x: Tensor) -> tuple[Any, ...]:
    return _ALL[name].arguments(*reads(name, x))


def calls(name: str, xs: Sequence[Tensor]) -> list[Callable[[], Any]]:
    """The Triton kernel on each input."""
    kernel = KERNELS[_ALL[name].op]

    bound: list[Callable[[], Any]] = [partial(call, kernel, _arguments(name, x)) for x in xs]
    synchronize()  # the scales' arrival on the host
    return bound


def wrong(name: str, x: Tensor) -> str:
    """What differs between the kernel and its reference beyond what the definition permits, "" for nothing."""
    case = _ALL[name]
    arguments, expected_arguments = _arguments(name, x), _arguments(name, x)
    synchronize()
    results, expected = call(KERNELS[case.op], arguments), call(DEFINITIONS[case.op], expected_arguments)
    results, expected = ((r,) if isinstance(r, Tensor) else tuple(r) for r in (results, expected))
    found = difference(results, expected, case.exact, x.shape[0])
    if not found and not same_state(arguments, expected_arguments, case.exact):
        found = "state differs"
    return found
