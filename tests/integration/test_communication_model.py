"""The formulas of a training step on many GPUs: against published times, and in cases with known results."""

from __future__ import annotations

import importlib

import pytest

from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.settings import MeshLayout
from octavo.cost.mesh.step import RankStep, Step

model = importlib.import_module("benchmarks.distributed.communication_model")
sent = importlib.import_module("benchmarks.distributed.fsdp_traffic")
HARDWARE = Hardware()
LAYOUT = MeshLayout(64, 64, tensor=4, pipeline=2)


def step(shapes, layout, precision) -> Step:
    return RankStep(shapes, layout, precision, HARDWARE).step


def waited(planned: Step) -> dict[str, float]:
    return {kind: wait.exposed for kind, wait in planned.waits.items()}


@pytest.mark.parametrize("row", model.PUBLISHED, ids=lambda row: f"{row.shapes.name} on {row.layout.gpus}")
def test_steps_take_what_is_published(row) -> None:
    """Bounds are communication_model.py's, with their reason."""
    ratio = row.stage.step.tflops * 1e12 / row.shapes.flop(row.layout.sequence_length) / row.tokens
    low, high = row.bounds or (1.0, 2.0)  # our formulas leave out parts of a step, so none is slower
    assert low <= ratio <= high


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("expert", [1, 64])
def test_ranks_hold_all_of_a_model_together(tensor: int, expert: int) -> None:
    whole, held = sent.DEEPSEEK, sent.DEEPSEEK.divided(tensor, 1, expert)
    for weight, part in zip(whole.block, held.block, strict=True):
        assert part.elements * {"experts": expert, None: 1}.get(weight.split, tensor) == weight.elements


def test_one_gpu_waits_for_nobody() -> None:
    planned = step(sent.LLAMA[0], MeshLayout(1, 4), model.BF16)
    assert [*waited(planned).values(), planned.bubble] == [0, 0, 0, 0]
    assert planned.tflops * 1e12 < HARDWARE.attention_forward


def test_each_step_of_the_ladder_changes_what_it_names() -> None:
    ladder = [step(sent.LLAMA[1], LAYOUT, precision) for precision in model.LADDER]
    base, products, gathers, straight, reduction, pairs = (waited(each) for each in ladder)
    compute = [sum(each.seconds_by_kind.values()) for each in ladder]
    assert compute[1] < compute[0] and products["tensor"] == base["tensor"] and products["fsdp"] >= base["fsdp"]
    assert compute[2] < compute[1] and gathers["fsdp"] < products["fsdp"]
    assert compute[2] == compute[3] == compute[4]
    assert reduction["fsdp"] < min(straight["fsdp"], gathers["fsdp"])
    assert pairs["tensor"] < reduction["tensor"] and compute[5] < compute[4]
