"""Which ranks exchange with each other on several servers: first those of a server, then one rank of each server."""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

Levels = list[list[list[int]]]
# the results of own_levels, by process group and ranks_per_server
_FOUND: weakref.WeakKeyDictionary[Any, dict[int | None, list[list[int]]]] = weakref.WeakKeyDictionary()


def levels(ranks: Sequence[int], ranks_per_server: int) -> Levels:
    """At each level the sets of ranks that exchange with each other; all sets of a level are equally large.

    Args:
        ranks: a group's, by their numbers in the job, ascending.
        ranks_per_server: rank r is on server r // ranks_per_server.

    Returns:
        first the ranks of each server; then the servers' first ranks, their second ranks and so on. There is one level
        if all ranks are on one server, or each on another.

    Raises:
        ValueError: if one server has more of these ranks than another.

    Example:
        >>> levels(range(6), 3)
        [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]
        >>> levels(range(6), 8), levels([0, 8, 16], 8)
        ([[[0, 1, 2, 3, 4, 5]]], [[[0, 8, 16]]])
    """
    servers = [[*some] for _, some in itertools.groupby(ranks, lambda rank: rank // ranks_per_server)]
    counts = [*map(len, servers)]
    if len({*counts}) > 1:
        raise ValueError(
            f"with {ranks_per_server} ranks on a server, servers have {counts} of this group's {len(ranks)}, but "
            "two levels need as many on each; Fp8Reduction(ranks_per_server=1) reduces at one level"
        )
    return (
        [[[*ranks]]] if 1 in (len(servers), counts[0]) else [servers, [[*some] for some in zip(*servers, strict=True)]]
    )


def own_levels(group: Any, ranks_per_server: int | None) -> list[list[int]]:
    """At each level this rank and those that it exchanges with; all ranks of ``group`` call it together.

    Args:
        group: the process group of all ranks.
        ranks_per_server: as for ``levels``. None: LOCAL_WORLD_SIZE, which torchrun sets; there is one level if it is
            not set, or, with a warning, if servers have different numbers of ranks.

    Returns:
        for each level a list with 1 for each rank of ``group`` that takes part, and 0 for others.

    Raises:
        ValueError: as ``levels``, for a number that was given.
    """
    found = _FOUND.setdefault(group, {})
    if ranks_per_server not in found:
        ranks, this_rank = dist.get_process_group_ranks(group), dist.get_rank()
        made = levels(ranks, ranks_per_server) if ranks_per_server else _of_environment(ranks, group)
        with_this_rank = [{*some} for level in made for some in level if this_rank in some]
        found[ranks_per_server] = [[int(rank in some) for rank in ranks] for some in with_this_rank]
    return found[ranks_per_server]


def _of_environment(ranks: Sequence[int], group: Any) -> Levels:
    """Levels by LOCAL_WORLD_SIZE, which ranks send to each other, so that all find the same levels."""
    if len(ranks) < 4:  # fewer than 2 servers of 2
        return [[[*ranks]]]
    sizes: list[int] = [0] * len(ranks)
    dist.all_gather_object(sizes, int(os.environ.get("LOCAL_WORLD_SIZE", 0)), group=group)
    try:
        if len({*sizes}) > 1:
            raise ValueError(f"LOCAL_WORLD_SIZE is {min(sizes)} on one rank and {max(sizes)} on another")
        return levels(ranks, sizes[0] or 1)
    except ValueError as error:
        warnings.warn(f"gradients are reduced in FP8 at one level: {error}", stacklevel=2)
        return [[[*ranks]]]
