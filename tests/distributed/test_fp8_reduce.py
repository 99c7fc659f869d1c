"""Gradients averaged in FP8, on 2 and 4 ranks with gloo: equal to a plain simulation in float64, byte for byte."""

import itertools
import math
import os
import socket
import warnings
from types import SimpleNamespace

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octavo
from octavo import E4M3, E5M2
from octavo.distributed import Fp8Reduction, fp8_reduce_hook
from octavo.distributed.fp8_reduce import levels, own_levels
from octavo.formats import E2M1, E4M4
from octavo.kernels.step_numbers import key_of, random_bits
from tests.support.byte_counter import GATHER, OTHER, REDUCE, ByteCounter
from tests.support.streams import notes_of_streams, tensor_on_gpu

BLOCK = 128
GFLOAT = {"E4M3": gfloat.formats.format_info_ocp_e4m3, "E5M2": gfloat.formats.format_info_ocp_e5m2}


# --- expected means, in float64 and without octavo's casts ------------------------------------------------------------


def rounded(x, fmt, width):
    """Float64 [R, S] to nearest in blocks of ``width``; NaN stays."""
    out = np.array(x, np.float64)
    for row in out:
        for start in range(0, len(row), width):
            block = row[start : start + width]
            amax = np.abs(block[np.isfinite(block)]).max(initial=0.0)
            scale = 2.0 ** math.floor(math.log2(np.float32(fmt.max) / np.float32(amax))) if amax > 0 else 1.0
            block[:] = gfloat.round_ndarray(GFLOAT[str(fmt)], block * scale, sat=False) / scale
    return out


def simulated(flats, fmt, gather_dtype=None, servers=None):
    """The mean of the ranks' flat gradients (float64), rounded as sent and as gathered.

    ``servers``: (ranks of one, how many). Sums of two rounded numbers and, in these tests, of four are exact in
    float32.
    """
    ranks, count = len(flats), len(flats[0])
    width, near = -(-count // ranks), 1
    x = np.stack([np.pad(flat, (0, ranks * width - count)).reshape(ranks, width) for flat in flats])
    for members in servers or (ranks,):
        rows, means = x.shape[1] // members, []
        # to the p-th that it exchanges with a rank sends each row whose owner is p-th there
        sent = [[rounded(one[p::members].reshape(1, -1), fmt, BLOCK)[0] for p in range(members)] for one in x]
        for rank in range(ranks):
            place, first = rank // near % members, rank - rank // near % members * near
            means.append(np.mean([sent[first + near * p][place] for p in range(members)], 0).reshape(rows, width))
        x, near = np.stack(means).astype(np.float32).astype(np.float64), near * members
    mean = x[:, 0]
    if gather_dtype:
        gathered = torch.from_numpy(mean).to(torch.float32).to(gather_dtype).double().numpy()
    else:
        gathered = rounded(mean, fmt, BLOCK)
    return gathered.reshape(-1)[:count]


# --- on a GPU's streams -----------------------------------------------------------------------------------------------


def test_on_a_gpu_an_average_waits_for_the_gradients_and_backward_for_no_average(monkeypatch):
    """DDP's is on a stream of its own; FSDP2's is of FSDP2's stream, which may free the gradient meanwhile."""
    notes = notes_of_streams(monkeypatch)
    flat = tensor_on_gpu("the gradient", notes)
    average = SimpleNamespace(wait=lambda: notes.append("the average is there"))

    def begin(reduction, gradient):
        notes.append("averaged")
        return average if gradient is flat else None

    monkeypatch.setattr(Fp8Reduction, "_average", begin)
    reduction = Fp8Reduction()
    on_its_own = ["another stream waits for the current stream", "begin on another stream", "averaged"]
    for first_lines in (["another stream is made"], []):
        assert fp8_reduce_hook(reduction, OneBucket(flat)) is average
        assert notes == [*first_lines, *on_its_own, "end on another stream"]
        notes.clear()
    reduction.all_reduce(flat)
    assert notes == ["the gradient outlives the current stream", "averaged", "the average is there"]


# --- on ranks ---------------------------------------------------------------------------------------------------------


class OneBucket:
    """A bucket of DDP's, as far as the hook reads it."""

    def __init__(self, flat):
        self.flat = flat

    def buffer(self):
        return self.flat


def gradients(count, rank, step=0, dtype=torch.float32, spread=1.0):
    """Return this rank's flat gradients; some whole blocks are small, some zero."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(count, generator=generator)
    x *= torch.exp2(spread * torch.randn(-(-count // 64), generator=generator).repeat_interleave(64)[:count])
    x[: count // 9] = 0
    return x.to(dtype)


def hooked(mesh, count, dtype, options, steps=1, faults=()):
    """Return each step's mean, as float64; faults (rank, element, value) are in the first step's gradients."""
    reduction, means = Fp8Reduction(**options, group=mesh.get_group()), []
    for step in range(steps):
        flat = gradients(count, dist.get_rank(), step, dtype)
        for rank, element, value in faults if step == 0 else ():
            if rank == dist.get_rank():
                flat[element] = value
        other = flat.clone()
        result = fp8_reduce_hook(reduction, OneBucket(flat)).wait()
        assert result is flat
        if not options.get("stochastic"):
            reduction.all_reduce(other)  # as FSDP2 calls it between replicas
            assert torch.equal(other.nan_to_num(7.0), flat.nan_to_num(7.0))
        means.append(result.double().numpy().copy())
    return means


FORMATS = {"E4M3": E4M3, "E5M2": E5M2}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 129, 4 * 128, 5000])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("options", [{}, {"gather_dtype": torch.bfloat16}], ids=str)
def test_equal_to_a_simulation_in_float64(pool, ranks, dtype, count, fmt, options):
    means = pool.run(hooked, (ranks,), count, dtype, {"format": FORMATS[fmt], **options})
    flats = [gradients(count, rank, dtype=dtype).double().numpy() for rank in range(ranks)]
    assert_all_are(means, simulated(flats, FORMATS[fmt], options.get("gather_dtype")), dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 129, 4 * 128, 5000])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("options", [{}, {"gather_dtype": torch.bfloat16}], ids=str)
def test_two_servers_equal_a_simulation_in_float64(pool, dtype, count, fmt, options):
    """The mean of each server's ranks is rounded once more."""
    options = {"format": FORMATS[fmt], "ranks_per_server": 2, **options}
    means = pool.run(hooked, (4,), count, dtype, options)
    flats = [gradients(count, rank, dtype=dtype).double().numpy() for rank in range(4)]
    rounding = FORMATS[fmt], options.get("gather_dtype")
    assert_all_are(means, simulated(flats, *rounding, (2, 2)), dtype)
    if count == 5000:
        assert (simulated(flats, *rounding) != simulated(flats, *rounding, (2, 2))).any()


def assert_all_are(means_of_ranks, expected, dtype):
    expected = torch.from_numpy(expected).to(dtype).double().numpy()
    for (mean,) in means_of_ranks:
        np.testing.assert_array_equal(mean, expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_stochastic_rounding(pool, fmt):
    """A neighbour of each value, by bits of its own for each rank, step and rounding; unbiased."""
    options = {"format": FORMATS[fmt], "stochastic": True, "gather_dtype": torch.float32}
    steps = 64
    first, second = (np.array(means_of_rank) for means_of_rank in pool.run(draws, (2,), options, steps))
    np.testing.assert_array_equal(first, second)
    assert len({row.tobytes() for row in first}) == steps
    exact = np.mean([gradients(2000, rank).double().numpy() for rank in range(2)], 0)
    amax = max(float(gradients(2000, rank).abs().max()) for rank in range(2))
    # a rounding is off by less than a step of the value, and of half its variance at most: mean of 64 draws, 5 sigma
    step = 2.0 ** -FORMATS[fmt].mantissa_bits * amax
    assert np.abs(first.mean(0) - exact).max() < 5 * step / 2 / math.sqrt(2 * steps)
    assert np.abs(first - exact).max() < step
    np.testing.assert_array_equal(first[:3], np.array(pool.run(draws, (2,), options, 3)[0]))


def draws(mesh, options, steps):
    """Means of the same gradients, step by step."""
    reduction = Fp8Reduction(**options, group=mesh.get_group())
    make = lambda: OneBucket(gradients(2000, dist.get_rank()))  # noqa: E731
    return [fp8_reduce_hook(reduction, make()).wait().double().numpy() for _ in range(steps)]


def test_random_bits_are_the_optimizers():
    """Random bits are the optimizers': a code goes up where the bits are below the remainder."""
    x = torch.full((1, 1000), 1 + 1 / 16)  # between 1 and 1.125, of which the amax scales to 256 and 288
    reduction = Fp8Reduction(stochastic=True, seed=3)
    read = reduction._read(reduction._message_of(x, 5, 1), 1000, torch.float32)
    bits = random_bits(key_of(3, 5, 0, 1), torch.arange(1000, dtype=torch.int32)).long() & 0xFFFFFFFF
    assert torch.equal(read, torch.where(bits >= 1 << 31, 1.125, 1.0).view(1, -1))


@pytest.mark.parametrize("options", [{}, {"stochastic": True}, {"format": E5M2}, {"ranks_per_server": 2}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_faults_stay_visible(pool, options, value):
    """Faults show on all ranks, at their element alone, infinity as itself in E5M2; the next step has none."""
    ranks = 4 if "ranks_per_server" in options else 2
    for means in pool.run(hooked, (ranks,), 1000, torch.float32, options, 2, [(1, 700, value)]):
        bad = ~np.isfinite(means[0])
        assert bad.nonzero()[0].tolist() == [700] and np.isfinite(means[1]).all()
        assert "format" not in options or means[0][700] == value or math.isnan(value)


def bytes_sent(mesh, count, options):
    """Return the bytes that each rank sends in its all-to-all and its gather, and a ring's bytes of an all-reduce."""
    group, bucket = mesh.get_group(), OneBucket(gradients(count, dist.get_rank(), dtype=torch.bfloat16))
    reduction = Fp8Reduction(**options, group=group)
    reduction._levels(group)  # asks whether ranks have the same options
    with ByteCounter() as counter:
        fp8_reduce_hook(reduction, bucket).wait()
    with ByteCounter() as plain:
        dist.all_reduce(torch.ones(count, dtype=torch.bfloat16), group=group)
    both = counter.bytes[OTHER] + counter.bytes[GATHER] + 2 * counter.bytes[REDUCE]
    return both / (2 * plain.bytes[REDUCE]), dict(counter.calls)


@pytest.mark.parametrize("count", [100_000, 100_001])
def test_bytes(pool, count):
    """A reduction sends one message each way; scales of blocks are 1/128 beside their codes."""
    for options, least in (({}, 0.503), ({"gather_dtype": torch.bfloat16}, 0.751)):  # codes both ways; the mean in bf16
        for share, calls in pool.run(bytes_sent, (2,), count, options):
            assert calls == {OTHER: 1, GATHER: 1} and least < share < least + 0.002


# --- under FSDP2; tests/support/seams has whole trainings, under DDP too ----------------------------------------------


def scattered(mesh, servers, dtype, op):
    """Return this rank's result of FSDP2's reduce-scatter."""
    output = torch.empty(5000 // mesh.size(), dtype=dtype)
    reduce_scatter = Fp8Reduction(ranks_per_server=servers[0])
    reduce_scatter(output, gradients(5000, dist.get_rank(), dtype=dtype), mesh.get_group(), op)
    return output.double().numpy()


@pytest.mark.covering(1)
@pytest.mark.parametrize("servers", [(2,), (2, 2), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, dist.ReduceOp.SUM], ids=["mean", "sum"])
def test_reduce_scatter_equals_a_simulation_in_float64(pool, servers, dtype, op):
    ranks = math.prod(servers)
    flats = [gradients(5000, rank, dtype=dtype).double().numpy() for rank in range(ranks)]
    expected = simulated(flats, E4M3, gather_dtype=torch.float32, servers=servers)
    mean = np.concatenate(pool.run(scattered, (ranks,), servers, dtype, op))
    expected = torch.from_numpy(expected * (1 if op == dist.ReduceOp.AVG else ranks)).to(dtype)
    np.testing.assert_array_equal(mean, expected.double().numpy())


def data(rank, step):
    return torch.randn(5, 37, generator=torch.Generator().manual_seed(100 * step + rank))


def between_replicas(mesh):
    """Return (gradients that the hook took of each module, those it left, this rank's shards then), float64 all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(37, 130), nn.ReLU(), nn.Linear(130, 3))
    octavo.convert(net, octavo.recipes.rowwise(), select=lambda module, name: True)
    between, taken, averaged = Fp8Reduction(group=mesh["replicate"].get_group()), [], []

    def hook(flat):
        taken.append(flat.double().numpy().copy())
        between.all_reduce(flat)
        averaged.append(flat.double().numpy().copy())

    for part in (net[0], net):
        fully_shard(part, mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        part.set_custom_reduce_scatter(Fp8Reduction())
        part.set_all_reduce_hook(hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        net(data(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return taken, averaged, np.concatenate([p.grad.to_local().flatten().double().numpy() for p in net.parameters()])


def test_between_replicas_equals_a_simulation_in_float64(pool):
    """HSDP: each replica's ranks first, and then replicas, in FP8 both; all replicas have the same bits."""
    of_ranks = pool.run(between_replicas, (2, 2))
    for place in range(2):
        replicas_of_shard = of_ranks[place::2]  # the ranks that have the same shard
        for number in range(4):  # two modules, two steps
            expected = simulated([taken[number] for taken, _, _ in replicas_of_shard], E4M3).astype(np.float32)
            for taken, averaged, _ in replicas_of_shard:
                assert (taken[number] != replicas_of_shard[0][0][number]).any() or taken is replicas_of_shard[0][0]
                np.testing.assert_array_equal(averaged[number], expected)

        for _, averaged, gradients in replicas_of_shard:
            assert np.isin(gradients, np.concatenate(averaged)).all()
            np.testing.assert_array_equal(gradients, replicas_of_shard[0][2])


def refused(mesh):
    """Return the error of FSDP2's reduce-scatter for a divisor that it would multiply by."""
    net = fully_shard(nn.Linear(4, 4), mesh=mesh)
    net.set_custom_reduce_scatter(Fp8Reduction())
    net.set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError, match="set_force_sum_reduction_for_comms"):
        net(torch.ones(1, 4)).sum().backward()


def test_what_is_refused(pool):
    pool.run(refused, (2,))
    with pytest.raises(ValueError, match="ranks_per_server=0"):
        Fp8Reduction(ranks_per_server=0)
    with pytest.raises(TypeError, match="float64"):
        fp8_reduce_hook(Fp8Reduction(group=SimpleNamespace()), OneBucket(torch.ones(3, dtype=torch.float64)))
    for state in (None, Fp8Reduction):
        with pytest.raises(TypeError, match=r"call register_comm_hook\(Fp8Reduction\(\), fp8_reduce_hook\)"):
            fp8_reduce_hook(state, OneBucket(torch.ones(3)))
    for wrong in ({"format": E4M4}, {"format": E2M1}, {"format": "E4M3"}):
        with pytest.raises(TypeError, match=r"use octavo\."):
            Fp8Reduction(**wrong)
    with pytest.raises(TypeError, match="bfloat16"):
        Fp8Reduction(gather_dtype=torch.float64)


# --- which ranks exchange with which, where they are on several servers -----------------------------------------------


@pytest.mark.parametrize("ranks", [range(8), range(24), [0, 2, 4, 6, 8, 10], [*range(5), *range(8, 13)]], ids=str)
@pytest.mark.parametrize("per_server", [1, 2, 3, 4, 8, 100])
def test_all_ranks_meet_and_only_one_of_each_server(ranks, per_server):
    try:
        found_levels = levels(ranks, [rank // per_server for rank in ranks])
    except ValueError:
        assert len({sum(rank // per_server == server for rank in ranks) for server in range(24)} - {0}) > 1
        return
    for level in found_levels:
        assert sorted(itertools.chain(*level)) == [*ranks]
    assert len({len(part) for part in found_levels[0]}) == 1
    if len(found_levels) == 2:  # inside a server, then one rank of each
        servers = [{rank // per_server for rank in part} for part in found_levels[0]]
        assert all(len(servers_of_part) == 1 for servers_of_part in servers)
        for part in found_levels[1]:
            assert len({rank // per_server for rank in part}) == len(part) == len(servers) > 1
    else:
        assert len({rank // per_server for rank in ranks}) in (1, len(ranks))


def found_by(mesh, said, chosen_size, hosts="aabb"):
    """Return (this rank's levels, warnings), where LOCAL_WORLD_SIZE is ``said`` on each rank, 0 for not set."""
    group = dist.new_group([*range(mesh.size())])
    before, size_here = os.environ.pop("LOCAL_WORLD_SIZE", None), said[dist.get_rank()]
    true_name, socket.gethostname = socket.gethostname, lambda: hosts[dist.get_rank()]
    try:
        os.environ |= {"LOCAL_WORLD_SIZE": str(size_here)} if size_here else {}
        with warnings.catch_warnings(record=True) as heard, ByteCounter() as counter:
            warnings.simplefilter("always")
            levels_here = own_levels(group, chosen_size)
        assert sum(counter.calls.values()) == (0 if chosen_size else 2)  # the messages' lengths, then the messages
        return levels_here, [str(warning.message) for warning in heard]
    except ValueError as error:
        return str(error)
    finally:
        socket.gethostname = true_name
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        os.environ |= {"LOCAL_WORLD_SIZE": before} if before is not None else {}


OF_TWO = [([one, other], []) for one in ([1, 1, 0, 0], [0, 0, 1, 1]) for other in ([1, 0, 1, 0], [0, 1, 0, 1])]
ONE_LEVEL = [([[1, 1, 1, 1]], [])] * 4


def test_by_what_torchrun_says(pool):
    assert pool.run(found_by, (4,), [2] * 4, None, "aaaa") == OF_TWO
    assert pool.run(found_by, (4,), [4] * 4, 2) == OF_TWO
    for said in ([1] * 4, [4] * 4, [8] * 4):
        assert pool.run(found_by, (4,), said, None) == ONE_LEVEL


def test_by_host_names_where_nobody_says_it(pool):
    """Host names tell servers apart where LOCAL_WORLD_SIZE is missing, if only on one rank, as under srun."""
    assert pool.run(found_by, (4,), [0] * 4, None) == pool.run(found_by, (4,), [2, 2, 2, 0], None) == OF_TWO
    for hosts in ("aaaa", "abcd"):
        assert pool.run(found_by, (4,), [0] * 4, None, hosts) == ONE_LEVEL
    for hosts, counts in (("aaab", "[3, 1]"), ("abab", "[1, 1, 1, 1]")):
        for levels_here, (warning,) in pool.run(found_by, (4,), [0] * 4, None, hosts):
            assert levels_here == [[1, 1, 1, 1]]
            assert f"in the order of their ranks, {counts} of this group's 4" in warning


def test_servers_of_different_sizes(pool):
    """Unequal servers make one level, with a warning on all ranks, and an error where two levels are asked for."""
    for said, why in (([3] * 4, "[3, 1] of this group"), ([2, 2, 2, 4], "2 on one rank and 4 on another")):
        for levels_here, (warning,) in pool.run(found_by, (4,), said, None):
            assert levels_here == [[1, 1, 1, 1]] and why in warning
    assert all("[3, 1] of this group's 4" in said for said in pool.run(found_by, (4,), [2] * 4, 3))
