"""FSDP2's traffic of converted weights: half of bf16's bytes, and at most one collective a forward for scales."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import recipes
from tests.support.byte_counter import GATHER, REDUCE, SCATTER, ByteCounter

WIDTH, LAYERS = 256, 3

ASKED = [1, 0]  # in each step: whether all ranks were told the same


def model_of(mesh, recipe, dtype, rows):
    """Layers without biases: all that is gathered is weights."""
    layers = [nn.Linear(*size, bias=False, dtype=dtype) for size in itertools.pairwise([WIDTH, *[rows] * LAYERS])]
    model = nn.Sequential(*layers)
    if recipe:
        octavo.convert(model, getattr(recipes, recipe)(), select=lambda module, name: True)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def counted_steps(mesh, recipe, micro_batches=1, evaluates=False, steps=2, dtype=torch.bfloat16, rows=WIDTH):
    """Calls and bytes of each step's collectives."""
    model = model_of(mesh, recipe, dtype, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, WIDTH, dtype=dtype)
    counts = []
    for _ in range(steps):
        with ByteCounter() as counter:
            for _ in range(micro_batches):
                model(x).sum().backward()
                if evaluates:
                    with torch.no_grad():
                        model.eval()(x)
                    model.train()
            optimizer.step()
            optimizer.zero_grad()
        counts.append((dict(counter.calls), dict(counter.bytes)))
    return counts


@pytest.fixture(scope="module")
def in_bf16(pool):
    """The same steps of the model that is not converted, by schedule."""
    return functools.cache(lambda *schedule: pool.run(counted_steps, (2,), None, *schedule)[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("recipe", "amax_collectives"), [("dynamic", 1), ("delayed", 1), ("blockwise", 0)])
@pytest.mark.parametrize(("micro_batches", "evaluates"), [(1, False), (2, False), (1, True), (2, True)])
def test_bytes_and_collectives(pool, in_bf16, recipe, amax_collectives, micro_batches, evaluates):
    plain_steps = in_bf16(micro_batches, evaluates)
    if not evaluates:  # after an evaluation FSDP2 prefetches one more
        assert all(bytes[GATHER] == micro_batches * 2 * LAYERS * WIDTH * WIDTH * 2 for _, bytes in plain_steps)
    for steps in pool.run(counted_steps, (2,), recipe, micro_batches, evaluates):
        for first, (calls, bytes), (plain_calls, plain_bytes) in zip(ASKED, steps, plain_steps, strict=True):
            forwards = micro_batches * (1 + evaluates)
            assert calls.pop(REDUCE, 0) == forwards * amax_collectives + first
            assert bytes.pop(REDUCE, 0) == forwards * amax_collectives * LAYERS * 4 + first * 16
            assert calls == plain_calls and bytes[SCATTER] == plain_bytes[SCATTER]
            assert 0.5 <= bytes[GATHER] / plain_bytes[GATHER] <= 0.52


@pytest.mark.parametrize(
    ("recipe", "rows", "share", "agreed"),
    [
        ("rowwise", WIDTH, 1 + 2 / WIDTH, 4 * WIDTH),  # a scale each row, and an amax each column
        ("mx", WIDTH, 1 + 1 / 32, 0),
        ("blockwise", WIDTH - 64, 0.5, 4 * 2 * 2),  # the second block of 128 rows is cut
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str)
def test_bytes_of_any_master(pool, recipe, rows, share, agreed, dtype):
    """Two pairs are bf16's bytes, of float32 masters too; one is half of that, wherever its blocks are cut."""
    for steps in pool.run(counted_steps, (2,), recipe, 1, False, 2, dtype, rows):
        elements = sum(rows * columns for columns in (WIDTH, *[rows] * (LAYERS - 1)))
        for first, (calls, bytes) in zip(ASKED, steps, strict=True):
            assert bytes[GATHER] == pytest.approx(share * 2 * 2 * elements, rel=0.001)
            assert calls.get(REDUCE, 0) - first == (agreed > 0)
            assert bytes.get(REDUCE, 0) - 16 * first <= LAYERS * agreed
            in_bf16 = 2 * 2 * elements
            assert bytes[GATHER] + bytes.get(REDUCE, 0) < in_bf16 * (0.52 if recipe == "blockwise" else 1.035)
