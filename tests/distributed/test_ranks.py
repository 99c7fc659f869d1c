import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from octavo.distributed.ranks import RankError, Ranks


def ranks_of(mesh):
    return Ranks(mesh.get_group())


def values(mesh):
    ranks = ranks_of(mesh)
    mine = torch.tensor([float(ranks.rank), 1.0])
    results = (ranks.sum(mine), ranks.mean(mine), ranks.gather(mine), ranks.any(ranks.rank == 1), ranks.any(False))
    return *results, ranks.from_rank_0(lambda: {"of": ranks.rank}), mine, ranks.size


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_values_of_all_ranks(pool, size):
    for rank, (total, mean, stacked, one, none, first, mine, size_of_group) in enumerate(pool.run(values, (size,))):
        assert total.tolist() == [sum(range(size)), size] and mean.tolist() == [(size - 1) / 2, 1.0]
        assert stacked.tolist() == [[r, 1.0] for r in range(size)] and mine.tolist() == [rank, 1.0]
        assert one and not none and first == {"of": 0} and size_of_group == size


def faults(mesh, failing):
    ranks = ranks_of(mesh)
    messages = []
    for error in (OSError(28, "No space left on device"), ZeroDivisionError("so it is")):
        try:
            with ranks.together():
                if ranks.rank == failing:
                    raise error
        except Exception as raised:
            messages.append((type(raised), str(raised)))
    try:
        ranks.from_rank_0(lambda: [][0])
    except Exception as raised:
        messages.append((type(raised), str(raised)))
    with ranks.together():  # and all goes on
        pass
    return messages


def test_a_fault_of_one_is_raised_by_all(pool):
    first, second = pool.run(faults, (2,), 1)
    assert [kind for kind, _ in first] == [RankError, RankError, IndexError]
    assert [kind for kind, _ in second] == [OSError, ZeroDivisionError, RankError]
    assert "rank 1 failed: [Errno 28] No space left on device" in first[0][1]
    assert first[1][1] == "rank 1 failed: ZeroDivisionError: so it is"
    assert second[2][1] == "rank 0 failed: IndexError: list index out of range"


def collectives_together(mesh):
    """Return the errors of a block that runs together where it begins collectives of all kinds."""
    ranks, tensor = ranks_of(mesh), torch.ones(1)
    kinds = {
        "plain": lambda: dist.all_reduce(tensor, group=ranks.group),
        "under way": lambda: dist.all_reduce(tensor, group=ranks.group, async_op=True),
        "of objects": lambda: dist.broadcast_object_list([1], group=ranks.group, group_src=0),
        "functional": lambda: distribute_tensor(tensor, mesh, [Shard(0)]).full_tensor(),
        "a barrier": lambda: dist.barrier(ranks.group),
        "octavo's": lambda: ranks.sum(tensor),
    }
    said, begun = {}, dist.all_reduce(tensor, group=ranks.group, async_op=True)
    with ranks.together():
        begun.wait()  # may be: all ranks began it
    for kind, begin in kinds.items():
        try:
            with ranks.together():
                begin()
        except AssertionError as raised:
            said[kind] = str(raised)
    return [kind for kind in kinds if "inside Ranks.together()" not in said.get(kind, "")]


def test_what_runs_together_may_hold_no_collective(pool):
    """The guard of all tests: tests/support/pool.py."""
    assert pool.run(collectives_together, (2,)) == [[], []]


def test_a_lone_process_communicates_nothing():
    alone = Ranks.of_process()
    assert (alone.group, alone.rank, alone.size) == (None, 0, 1)
    value = torch.ones(3)
    assert alone.sum(value) is value and alone.mean(value) is value and alone.gather(value).shape == (1, 3)
    assert alone.any(True) and alone.from_rank_0(lambda: 3) == 3
    with pytest.raises(KeyError), alone.together():
        raise KeyError("own")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), "another rank ended"),
        (RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 2000ms for recv"), "did not answer in time"),
        (dist.DistBackendError("NCCL error: remote process exited"), "another rank ended"),
        (RuntimeError("a bug"), "a bug"),
    ],
)
def test_what_collectives_raise_is_named(error, says):
    with pytest.raises((RuntimeError, RankError), match=says) as fault, Ranks.as_rank_errors():
        raise error
    assert isinstance(fault.value, RankError) == (says != "a bug")
