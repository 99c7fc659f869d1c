"""Which ranks exchange with which, where they are on several servers."""

import itertools
import os
import socket
import warnings

import pytest
import torch.distributed as dist

from octavo.distributed.levels import levels, own_levels
from tests.support.byte_counter import ByteCounter


@pytest.mark.parametrize("ranks", [range(8), range(24), [0, 2, 4, 6, 8, 10], [*range(5), *range(8, 13)]], ids=str)
@pytest.mark.parametrize("per_server", [1, 2, 3, 4, 8, 100])
def test_all_ranks_meet_and_only_one_of_each_server(ranks, per_server):
    try:
        found = levels(ranks, [rank // per_server for rank in ranks])
    except ValueError:
        assert len({sum(rank // per_server == server for rank in ranks) for server in range(24)} - {0}) > 1
        return
    for level in found:
        assert sorted(itertools.chain(*level)) == [*ranks]
    assert len({len(part) for part in found[0]}) == 1
    if len(found) == 2:  # inside a server, then one rank of each
        servers = [{rank // per_server for rank in part} for part in found[0]]
        assert all(len(own) == 1 for own in servers)
        for part in found[1]:
            assert len({rank // per_server for rank in part}) == len(part) == len(servers) > 1
    else:
        assert len({rank // per_server for rank in ranks}) in (1, len(ranks))


def found_by(mesh, said, given, hosts="aabb"):
    """(this rank's levels, what is warned of), where LOCAL_WORLD_SIZE is ``said`` on each rank, 0 for not set."""
    group = dist.new_group([*range(mesh.size())])
    before, own = os.environ.pop("LOCAL_WORLD_SIZE", None), said[dist.get_rank()]
    true_name, socket.gethostname = socket.gethostname, lambda: hosts[dist.get_rank()]
    try:
        os.environ |= {"LOCAL_WORLD_SIZE": str(own)} if own else {}
        with warnings.catch_warnings(record=True) as heard, ByteCounter() as counter:
            warnings.simplefilter("always")
            found = own_levels(group, given)
        assert sum(counter.calls.values()) == (0 if given else 2)  # the sizes of what is told, and that
        return found, [str(warning.message) for warning in heard]
    except ValueError as error:
        return str(error)
    finally:
        socket.gethostname = true_name
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        os.environ |= {"LOCAL_WORLD_SIZE": before} if before is not None else {}


OF_TWO = [([own, other], []) for own in ([1, 1, 0, 0], [0, 0, 1, 1]) for other in ([1, 0, 1, 0], [0, 1, 0, 1])]
ONE_LEVEL = [([[1, 1, 1, 1]], [])] * 4


def test_by_what_torchrun_says(pool):
    assert pool.run(found_by, (4,), [2] * 4, None, "aaaa") == OF_TWO
    assert pool.run(found_by, (4,), [4] * 4, 2) == OF_TWO
    for said in ([1] * 4, [4] * 4, [8] * 4):
        assert pool.run(found_by, (4,), said, None) == ONE_LEVEL


def test_by_host_names_where_nobody_says_it(pool):
    """As under srun and mpirun; one rank that was told nothing is enough."""
    assert pool.run(found_by, (4,), [0] * 4, None) == pool.run(found_by, (4,), [2, 2, 2, 0], None) == OF_TWO
    for hosts in ("aaaa", "abcd"):
        assert pool.run(found_by, (4,), [0] * 4, None, hosts) == ONE_LEVEL
    for hosts, counts in (("aaab", "[3, 1]"), ("abab", "[1, 1, 1, 1]")):
        for found, (warning,) in pool.run(found_by, (4,), [0] * 4, None, hosts):
            assert found == [[1, 1, 1, 1]] and f"in the order of their ranks, {counts} of this group's 4" in warning


def test_servers_of_different_sizes(pool):
    """One level, with a warning, which all ranks find; an error where two were asked for."""
    for said, why in (([3] * 4, "[3, 1] of this group"), ([2, 2, 2, 4], "2 on one rank and 4 on another")):
        for found, (warning,) in pool.run(found_by, (4,), said, None):
            assert found == [[1, 1, 1, 1]] and why in warning
    assert all("[3, 1] of this group's 4" in said for said in pool.run(found_by, (4,), [2] * 4, 3))
