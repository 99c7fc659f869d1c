"""The base of modes that count a model's operations: what it shows them, and how they tell storages and products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo.private import TorchDispatchMode, cpu_attention, cpu_attention_backward, grouped_mm


class OperationCounter(TorchDispatchMode):
    """A mode that calls ``count`` after each operation; ``held``: tensors whose storages' numbers no other may get."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, result)
        return result

    def count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Count an operation with these arguments and this result."""

    @staticmethod
    def storage_of(tensor: Any) -> int:
        """Return a number that identifies a tensor's storage; 0 for an object that is no tensor."""
        return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else 0

    @staticmethod
    def formulas() -> dict[Any, Any]:
        """Return FLOP formulas for products of torch and transformers that torch's counter lacks."""
        grouped = [grouped_mm]
        if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # transformers calls it where torch's can't be used
            grouped.append(torch.ops.transformers.grouped_mm_fallback)
        # a [T, K], each row times one of the experts' weights b [E, K, N]; or a [N, T] and b [T, K], T in groups
        by_op: dict[Any, Any] = dict.fromkeys(grouped, lambda a, b, *_, **__: 2 * math.prod(a) * b[-1])
        # CPUs' own op, which torch doesn't count: query q [B, H, S, D], keys k and values v [B, G, T, D], causal or not
        by_op[cpu_attention] = lambda q, k, v, *_, **__: 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
        # two products of its backward contract over v's features or give them, three over q's: scores are made again
        by_op[cpu_attention_backward] = lambda _, q, k, v, *__, **___: (
            2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])
        )
        return by_op
