"""A step on a mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.meshes import FP8, LAYOUT, SHAPES, stage


def test_recomputation_trades_time_for_memory_and_a_batch_memory_for_collectives() -> None:
    saved, again = stage(), stage(recomputed=1.0)
    assert again.memory["activations"] < saved.memory["activations"] and again.compute > saved.compute
    assert again.kinds["attention"] == pytest.approx(4 / 3 * saved.kinds["attention"])
    in_fp8 = replace(again, precision=replace(again.precision, regions=1))
    inputs = 2 * LAYOUT.batch * LAYOUT.sequence * SHAPES.width * SHAPES.layers  # of a micro-batch
    assert again.memory["activations"] - in_fp8.memory["activations"] == pytest.approx(inputs / 2)
    larger = stage(batch=2)
    assert larger.memory["activations"] == 2 * saved.memory["activations"] and larger.step.seconds < saved.step.seconds
    assert stage(FP8).memory["activations"] < saved.memory["activations"]
