"""Counts the calls and bytes of collectives of each kind, and the bytes over each link."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.private import resolve_process_group

GATHER, SCATTER, REDUCE, OTHER = "all_gather", "reduce_scatter", "all_reduce", "other"
INSIDE, BETWEEN = "inside", "between"  # a server, servers

_NAMES = {"allgather": GATHER, "reducescatter": SCATTER, "allreduce": REDUCE}  # without underscores
_MOVE_NOTHING = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier", "check_for_nan")


class ByteCounter(TorchDispatchMode):
    """Counts this rank's collectives while entered.

    ``bytes`` are those of the whole tensor: what an all-gather gives, what a reduce-scatter takes, what an all-reduce
    reduces. ``sent`` is what this rank sends over each link, to ranks of its server or of others: on a ring of n ranks,
    on which it sends to the next, (n - 1) / n of the whole, in an all-reduce twice that; in an all-to-all each part to
    its rank. ``by_kind`` is the same by (kind, link).

    Args:
        servers: the name of each rank's server, by the ranks' numbers in the job; None: all are one server.
    """

    def __init__(self, servers: Sequence[object] | None = None) -> None:
        super().__init__()
        self.servers = servers
        self.calls, self.bytes, self.sent, self.by_kind = Counter(), Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(_MOVE_NOTHING):
            plain = name.replace("_", "")
            kind = next((kind for start, kind in _NAMES.items() if plain.startswith(start)), OTHER)
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            whole = max((tensor.numel() * tensor.itemsize for tensor in tensors), default=0)
            self.calls[kind] += 1
            self.bytes[kind] += whole  # the larger of its input and its output
            if (ranks := _ranks(args)) is not None:
                self._count_links(kind, plain, whole, args, ranks)
        return result

    def _count_links(self, kind: str, plain: str, whole: int, args: Any, ranks: list[int]) -> None:
        """Add the bytes that this rank sends to others of ``ranks``."""
        this_rank, size = ranks.index(dist.get_rank()), len(ranks)
        shares = [0] * size
        if kind != OTHER:
            shares[(this_rank + 1) % size] = whole * (size - 1) // size * (2 if kind == REDUCE else 1)
        elif plain.startswith("alltoall"):
            # c10d's takes its output first, the functional one its input; both the receivers' sizes before the senders'
            sent, splits = (args[1], args[4]) if plain.startswith("alltoallbase") else (args[0], args[2])
            row = sent[:1].numel() * sent.itemsize
            shares = [count * row for count in splits or [len(sent) // size] * size]
        for other, share in zip(ranks, shares, strict=True):
            if other != ranks[this_rank]:
                is_inside = self.servers is None or self.servers[other] == self.servers[ranks[this_rank]]
                link = INSIDE if is_inside else BETWEEN
                self.sent[link] += share
                self.by_kind[kind, link] += share


def _ranks(args: Any) -> list[int] | None:
    """Return the ranks of a collective's process group, which is among its arguments, as itself or by its name."""
    for argument in args:
        find = dist.ProcessGroup.unbox if isinstance(argument, torch.ScriptObject) else resolve_process_group
        if isinstance(argument, torch.ScriptObject | str):
            with contextlib.suppress(RuntimeError, TypeError, LookupError):  # another argument: how to reduce
                return dist.get_process_group_ranks(find(argument))
    return None
