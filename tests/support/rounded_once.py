"""a * b + c rounded once, as Triton's kernels do, where torch's kernels for this CPU round twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """Return a * b + c of float32, rounded once.

    In float64 the product is exact, and the sum, rounded to odd, rounds to float32 as the exact sum does.
    """
    product, addend = a.double() * torch.as_tensor(b, dtype=torch.float32), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    is_even_and_inexact = (bits & 1 == 0) & (error.abs() > 0)
    towards_error = torch.where((error > 0) == (total > 0), 1, -1)
    return (bits + is_even_and_inexact * towards_error).view(torch.float64).float()


def _add(x: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    return x + other if alpha == 1 else fma(other, alpha, x)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return fma(a * value, b, x)


def _lerp(x: Tensor, end: Tensor, weight: float) -> Tensor:
    factor = torch.tensor(weight, dtype=torch.float32)
    return fma(end - x, factor, x) if factor < 0.5 else fma(end - x, factor - 1, end)


_RULES: dict[str, Callable[..., Tensor]] = {"add": _add, "addcmul": _addcmul, "lerp": _lerp}


class RoundedOnce(TorchFunctionMode):
    """Compute float32's ``add``, ``addcmul`` and ``lerp``, also those in place, with one rounding of a * b + c."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, kwargs = _RULES.get(func.__name__.removesuffix("_")), kwargs or {}
        if rule is None or args[0].dtype != torch.float32:
            return func(*args, **kwargs)
        result = rule(*args, **kwargs)
        return args[0].copy_(result) if func.__name__.endswith("_") else result


def rounded_once() -> AbstractContextManager[Any]:
    """Make torch's operations on this CPU round a * b + c once; most CPUs' do so by themselves."""
    return RoundedOnce() if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else nullcontext()
