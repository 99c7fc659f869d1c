"""Which ranks exchange with each other on several servers: first those of a server, then one rank of each server."""

from __future__ import annotations

import itertools
import os
import socket
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

Levels = list[list[list[int]]]
# the results of own_levels, by process group and ranks_per_server
_FOUND: weakref.WeakKeyDictionary[Any, dict[int | None, list[list[int]]]] = weakref.WeakKeyDictionary()


def levels(ranks: Sequence[int], servers: Sequence[object]) -> Levels:
    """At each level the sets of ranks that exchange with each other; all sets of a level are equally large.

    Args:
        ranks: a group's, by their numbers in the job, ascending.
        servers: what the server of each of these ranks is known by: a number, a host name.

    Returns:
        first the ranks of each server; then the servers' first ranks, their second ranks and so on. There is one level
        if all ranks are on one server, or each on another.

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
    """At each level this rank and those that it exchanges with; all ranks of ``group`` call it together.

    Args:
        group: the process group of all ranks.
        ranks_per_server: rank r of the job is on server r // ranks_per_server. None: as LOCAL_WORLD_SIZE says, which
            torchrun sets; where a rank has none (srun, mpirun), by the ranks' host names. There is one level, with a
            warning, if servers have different numbers of ranks.

    Returns:
        for each level a list with 1 for each rank of ``group`` that takes part, and 0 for others.

    Raises:
        ValueError: as ``levels``, for a number that was given.
    """
    found = _FOUND.setdefault(group, {})
    if ranks_per_server not in found:
        ranks, this_rank = dist.get_process_group_ranks(group), dist.get_rank()
        given = [rank // ranks_per_server for rank in ranks] if ranks_per_server else None
        made = levels(ranks, given) if given else _found(ranks, group)
        with_this_rank = [{*some} for level in made for some in level if this_rank in some]
        found[ranks_per_server] = [[int(rank in some) for rank in ranks] for some in with_this_rank]
    return found[ranks_per_server]


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
