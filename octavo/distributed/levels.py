"""Which ranks exchange with each other on several servers: first those of a server, then one rank of each server."""

from __future__ import annotations

import itertools
import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

Levels = list[list[list[int]]]


def levels(ranks: Sequence[int], servers: Sequence[object]) -> Levels:
    """At each level the sets of ranks that exchange with each other; all sets of a level are equally large.

    ``ranks``: a group's, by their numbers in the job, ascending; ``servers``: what the server of each is known by.

    Raises:
        ValueError: if one server has more of these ranks than another, or another's ranks lie between its own.

    Example:
        >>> levels(range(6), "aaabbb")
        [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]
        >>> levels(range(3), "aaa"), levels([0, 8, 16], "abc")
        ([[[0, 1, 2]]], [[[0, 8, 16]]])
    """
    runs = [[rank for rank, _ in run] for _, run in itertools.groupby(zip(ranks, servers, strict=True), lambda x: x[1])]
    counts = [*map(len, runs)]
    if len({*servers}) in (1, len(ranks)):
        return [[[*ranks]]]
    if len({*counts}) > 1 or len(runs) > len({*servers}):
        raise ValueError(
            f"servers have, in the order of their ranks, {counts} of this group's {len(ranks)}, but two levels need "
            "as many consecutive ones on each; Fp8Reduction(ranks_per_server=1) reduces at one level"
        )
    return [runs, [[*some] for some in zip(*runs, strict=True)]]


def own_levels(group: Any, ranks_per_server: int | None) -> list[list[int]]:
    """For each level a list with 1 for each rank of ``group`` that exchanges with this one, and 0 for others.

    Rank r of the job is on server r // ranks_per_server; None: as LOCAL_WORLD_SIZE says, which torchrun sets; where a
    rank has none (srun, mpirun), by the ranks' host names. All ranks of the group call it together.

    Raises:
        ValueError: as ``levels``, for a number that was given; else there is one level then, with a warning.
    """
    ranks, this_rank = dist.get_process_group_ranks(group), dist.get_rank()
    if ranks_per_server:
        found = levels(ranks, [rank // ranks_per_server for rank in ranks])
    else:
        found = _found(ranks, group)
    return [[int(rank in some) for rank in ranks] for level in found for some in level if this_rank in some]


def _found(ranks: Sequence[int], group: Any) -> Levels:
    """Levels by LOCAL_WORLD_SIZE or host names, which ranks send to each other, so that all find the same levels."""
    if len(ranks) < 4:  # fewer than 2 servers of 2
        return [[[*ranks]]]
    said: list[Any] = [None] * len(ranks)
    dist.all_gather_object(said, (int(os.environ.get("LOCAL_WORLD_SIZE", 0)), socket.gethostname()), group=group)
    sizes, hosts = zip(*said, strict=True)
    try:
        if not all(sizes):
            return levels(ranks, hosts)
        if len({*sizes}) > 1:
            raise ValueError(f"LOCAL_WORLD_SIZE is {min(sizes)} on one rank and {max(sizes)} on another")
        return levels(ranks, [rank // sizes[0] for rank in ranks])
    except ValueError as error:
        warnings.warn(f"gradients are reduced in FP8 at one level: {error}", stacklevel=2)
        return [[[*ranks]]]
