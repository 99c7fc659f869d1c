"""Who exchanges with whom where ranks are on several servers: first those of a server, then one rank of each server."""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

Levels = list[list[list[int]]]
# what this rank found of a process group, by what was asked for
_FOUND: weakref.WeakKeyDictionary[Any, dict[int | None, list[list[int]]]] = weakref.WeakKeyDictionary()


def levels(ranks: Sequence[int], ranks_per_server: int) -> Levels:
    """At each level the ranks that exchange with each other: all of them, in sets of as many.

    Args:
        ranks: of a group, by their numbers in the job, ascending.
        ranks_per_server: rank r is on server r // ranks_per_server.

    Returns:
        the servers, then their first ranks, their second ones and so on; one level where ranks are on one server, or
        each on another.

    Raises:
        ValueError: where one server has more of these ranks than another.

    Example:
        >>> levels(range(6), 3)
        [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]
        >>> levels(range(6), 8), levels([0, 8, 16], 8)
        ([[[0, 1, 2, 3, 4, 5]]], [[[0, 8, 16]]])
    """
    servers = [[*own] for _, own in itertools.groupby(ranks, lambda rank: rank // ranks_per_server)]
    counts = [*map(len, servers)]
    if len({*counts}) > 1:
        raise ValueError(
            f"with {ranks_per_server} ranks on a server, servers have {counts} of this group's {len(ranks)}, but "
            "two levels need as many on each; Fp8Reduction(ranks_per_server=1) reduces at one level"
        )
    return [[[*ranks]]] if 1 in (len(servers), counts[0]) else [servers, [[*own] for own in zip(*servers, strict=True)]]


def own_levels(group: Any, ranks_per_server: int | None) -> list[list[int]]:
    """At each level the ranks that this one exchanges with and itself; asked for by all ranks of ``group`` together.

    Args:
        group: the process group of all ranks.
        ranks_per_server: as for ``levels``. None: what LOCAL_WORLD_SIZE says, which torchrun sets; one level where it
            is not set, and, with a warning, where servers have different numbers of ranks.

    Returns:
        for each level a list with 1 for each rank of ``group`` that takes part, and 0 for others.

    Raises:
        ValueError: as ``levels`` does, for a number that was asked for.
    """
    found = _FOUND.setdefault(group, {})
    if ranks_per_server not in found:
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        made = levels(ranks, ranks_per_server) if ranks_per_server else _of_environment(ranks, group)
        with_own = [{*part} for level in made for part in level if own in part]
        found[ranks_per_server] = [[int(rank in part) for rank in ranks] for part in with_own]
    return found[ranks_per_server]


def _of_environment(ranks: Sequence[int], group: Any) -> Levels:
    """Levels by LOCAL_WORLD_SIZE, of which all ranks hear what the others have: all must find the same."""
    if len(ranks) < 4:  # 2 servers of 2
        return [[[*ranks]]]
    said: list[int] = [0] * len(ranks)
    dist.all_gather_object(said, int(os.environ.get("LOCAL_WORLD_SIZE", 0)), group=group)
    try:
        if len({*said}) > 1:
            raise ValueError(f"LOCAL_WORLD_SIZE is {min(said)} on one rank and {max(said)} on another")
        return levels(ranks, said[0] or 1)
    except ValueError as error:
        warnings.warn(f"gradients are reduced in FP8 at one level: {error}", stacklevel=2)
        return [[[*ranks]]]
