"""A task's groups that only some ranks made do not hang the next task."""

from typing import Any

import torch.distributed as dist


def group_of_one(mesh: Any) -> None:
    """Make a group that the pool's other ranks do not make, counted as torch 2.14 does."""
    dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dist.distributed_c10d._world.group_count += 1


def group_of_all(mesh: Any) -> int:
    return dist.get_world_size(dist.new_group([*range(mesh.size())]))


def test_a_group_that_some_ranks_make_is_not_in_the_way_of_a_group_of_all(pool: Any) -> None:
    assert pool.run(group_of_all, (4,)) == [4] * 4
    assert pool.run(group_of_one, (2,)) == [None] * 2
    assert pool.run(group_of_all, (4,), seconds=60) == [4] * 4
