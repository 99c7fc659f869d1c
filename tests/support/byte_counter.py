"""Counts what collectives move: calls and bytes of each kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GATHER, SCATTER, REDUCE, OTHER = "all_gather", "reduce_scatter", "all_reduce", "other"

_NAMES = {"allgather": GATHER, "reducescatter": SCATTER, "allreduce": REDUCE}  # without underscores
_MOVE_NOTHING = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier", "check_for_nan")


class ByteCounter(TorchDispatchMode):
    """Counts this rank's collectives while entered.

    Bytes are those of the whole tensor: what an all-gather gives, what a reduce-scatter takes, what an all-reduce
    reduces. On a ring of n ranks each rank sends (n - 1) / n of them, in an all-reduce twice that.

    Example:
        >>> import torch
        >>> with ByteCounter() as counter:
        ...     sums = torch.zeros(8).sum()
        >>> counter.calls["all_gather"], counter.bytes["all_gather"]
        (0, 0)
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(_MOVE_NOTHING):
            plain = name.replace("_", "")
            kind = next((kind for start, kind in _NAMES.items() if plain.startswith(start)), OTHER)
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.calls[kind] += 1
            # the larger of its input and its output is the whole tensor
            self.bytes[kind] += max((tensor.numel() * tensor.itemsize for tensor in tensors), default=0)
        return result
