"""The formulas of a training step on many GPUs: against published times, and in cases with known results."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from octavo.cost import mesh

model, sent = (
    importlib.import_module(f"benchmarks.distributed.{name}") for name in ("communication_model", "fsdp_traffic")
)
HARDWARE = mesh.Hardware()
LAYOUT = mesh.MeshLayout(64, 64, tensor=4, pipeline=2)


def step(shapes, layout, precision) -> mesh.Step:
    return mesh.Stage(shapes, layout, precision, HARDWARE).step


def waited(planned: mesh.Step) -> dict[str, float]:
    return {kind: wait.exposed for kind, wait in planned.waits.items()}


@pytest.mark.parametrize("row", model.PUBLISHED, ids=lambda row: f"{row.shapes.name} on {row.layout.gpus}")
def test_steps_take_what_is_published(row) -> None:
    """Bounds are communication_model.py's, with their reason."""
    ratio = row.stage.step.tflops * 1e12 / row.shapes.flop(row.layout.sequence) / row.tokens
    low, high = row.bounds or (1.0, 2.0)  # our formulas leave out parts of a step, so none is slower
    assert low <= ratio <= high


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("expert", [1, 64])
def test_ranks_hold_all_of_a_model_together(tensor: int, expert: int) -> None:
    whole, held = sent.DEEPSEEK, sent.DEEPSEEK.divided(tensor, 1, expert)
    for weight, part in zip(whole.block, held.block, strict=True):
        ranks = {"experts": expert, None: 1}.get(weight.split, tensor)
        assert part.elements * ranks == weight.elements


def test_one_gpu_waits_for_nobody() -> None:
    planned = step(sent.LLAMA[0], mesh.MeshLayout(1, 4), model.BF16)
    assert [*waited(planned).values(), planned.bubble] == [0, 0, 0, 0]
    assert planned.tflops * 1e12 < HARDWARE.attention_forward


def test_a_wire_takes_what_its_narrowest_part_takes() -> None:
    """A wire's time is that of its hops' bytes, in a world of one second a byte on the network and none on NVLink."""
    slow = replace(HARDWARE, nvlink=float("inf"), network=1.0, latency=0.0)
    servers, ranks_per_server = 4, 8
    ranks = servers * ranks_per_server
    ring = slow.wire(ranks, ranks, 1)  # a byte for each rank, on one card of each server in its turn
    assert ring == pytest.approx((servers - 1) * ranks_per_server / ranks_per_server)
    straight = slow.wire(ranks, ranks, 1, directly=True)  # each rank's byte from all ranks elsewhere
    assert straight == ranks - ranks_per_server
    assert slow.exchange(ranks, ranks, 1, 1) == straight
    assert slow.exchange(ranks, ranks, 1, 2) == pytest.approx(ring)  # of as many bytes
    alone = (slow.wire(servers, servers, ranks_per_server, directly) for directly in (False, True))
    assert list(alone) == [servers - 1, servers - 1]


def test_each_step_of_the_ladder_changes_what_it_names() -> None:
    ladder = [step(sent.LLAMA[1], LAYOUT, precision) for precision in model.LADDER]
    base, products, gathers, straight, reduction, pairs = (waited(each) for each in ladder)
    compute = [sum(each.kinds.values()) for each in ladder]
    assert compute[1] < compute[0] and products["tensor"] == base["tensor"] and products["fsdp"] >= base["fsdp"]
    assert compute[2] < compute[1] and gathers["fsdp"] < products["fsdp"]
    assert compute[2] == compute[3] == compute[4]
    assert reduction["fsdp"] < min(straight["fsdp"], gathers["fsdp"])
    assert pairs["tensor"] < reduction["tensor"] and compute[5] < compute[4]
