"""Ranks that work together: one's result is sent to all, all reduce values, and one's fault ends all of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import OctavoError, first_line
from octavo.tensor.collectives import sending_device

T = TypeVar("T")


class RankError(OctavoError):
    """Another rank failed, or is gone."""


class CheckpointError(OctavoError):
    """A checkpoint cannot be written or read; all ranks raise it."""


class Ranks:
    """The processes of a group; a lone process is a group of one, and then nothing is communicated.

    Args:
        group: a process group of torch.distributed, or None for this process alone.

    Attributes:
        rank: this process's, from 0.
        size: how many there are.

    Example:
        >>> alone = Ranks()
        >>> alone.rank, alone.size, alone.any(False), alone.from_rank_0(lambda: "found")
        (0, 1, False, 'found')
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of_process(cls) -> Ranks:
        """Return the ranks of the default process group, or this process alone where there is none."""
        return cls(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on every rank; if it fails on any rank, it fails on all, and none waits for another.

        The block may begin no collective, in which others would wait for a rank that failed: octavo's tests enforce it.

        Raises:
            RankError: the block failed on another rank. A rank's own error is raised as it is.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        if self.any(failed is not None) and self.size > 1:
            errors: list[str | None] = [None] * self.size
            kind = "" if isinstance(failed, OctavoError | OSError) else f"{type(failed).__name__}: "
            with self.as_rank_errors():
                dist.all_gather_object(errors, None if failed is None else kind + first_line(failed), group=self.group)
            if failed is None:
                rank = next(rank for rank, text in enumerate(errors) if text is not None)
                raise RankError(f"rank {rank} failed: {errors[rank]}")
        if failed is not None:
            raise failed

    def from_rank_0(self, find: Callable[[], T]) -> T:
        """Return on all ranks the result of ``find`` on rank 0; if it fails there, all ranks raise."""
        results: list[T | None] = [None]
        with self.together():
            if self.rank == 0:
                results[0] = find()
        if self.size > 1:
            with self.as_rank_errors():
                dist.broadcast_object_list(results, group=self.group, group_src=0)
        return cast(T, results[0])

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        if self.size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32, device=sending_device(self.group))
        with self.as_rank_errors():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            return bool(flags)

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over ranks, the same bits on each; `value` is left as it is."""
        return self._reduce(value, dist.ReduceOp.SUM) if self.size > 1 else value

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest over ranks of each element; `value` is left as it is."""
        return self._reduce(value, dist.ReduceOp.MAX) if self.size > 1 else value

    def _reduce(self, value: Tensor, op: Any) -> Tensor:
        reduced = value.clone()
        with self.as_rank_errors():
            dist.all_reduce(reduced, op=op, group=self.group)
        return reduced

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over ranks."""
        return value if self.size == 1 else self.sum(value) / self.size

    def gather(self, value: Tensor) -> Tensor:
        """Return the values of all ranks, stacked: [size, *value.shape]."""
        values = [value.clone() for _ in range(self.size)]
        if self.size > 1 and value.numel() > 0:
            with self.as_rank_errors():
                dist.all_gather(values, value.contiguous(), group=self.group)
        return torch.stack(values)

    @staticmethod
    @contextlib.contextmanager
    def as_rank_errors() -> Iterator[None]:
        """Raise a RankError in place of the many errors that collectives raise when another rank is gone or late."""
        try:
            yield
        except RuntimeError as error:
            # gloo raises plain RuntimeErrors that name its source file
            if not isinstance(error, dist.DistError) and not re.search("gloo|NCCL|ProcessGroup", str(error)):
                raise
            waited = "imed out" in str(error) or "timeout" in str(error)
            what = "another rank did not answer in time" if waited else "another rank ended"
            raise RankError(f"{what}: its own message says why; mend that and start all ranks again") from error
