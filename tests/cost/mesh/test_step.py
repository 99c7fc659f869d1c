"""A step on a mesh: what a rank computes and holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.shapes import Weight
from octavo.cost.mesh.step import RankStep, layer_seconds
from octavo.cost.rates import PlanError
from tests.support.meshes import BF16, BLOCK, FP8, LAYOUT, SHAPES, rank_step


def test_recomputation_trades_time_for_memory_and_a_batch_memory_for_collectives() -> None:
    saved, again = rank_step(), rank_step(recomputed=1.0)
    assert again.memory["activations"] < saved.memory["activations"] and again.compute_seconds > saved.compute_seconds
    assert again.micro_batch_seconds["attention"] == pytest.approx(4 / 3 * saved.micro_batch_seconds["attention"])
    in_fp8 = replace(again, precision=replace(again.precision, region_bytes=1))
    inputs = 2 * LAYOUT.micro_batch_size * LAYOUT.sequence_length * SHAPES.width * SHAPES.layers  # of a micro-batch
    assert again.memory["activations"] - in_fp8.memory["activations"] == pytest.approx(inputs / 2)
    larger = rank_step(micro_batch_size=2)
    assert larger.memory["activations"] == 2 * saved.memory["activations"] and larger.step.seconds < saved.step.seconds
    assert rank_step(FP8).memory["activations"] < saved.memory["activations"]


def test_muon_keeps_one_moment_of_the_blocks_matrices_and_takes_its_products() -> None:
    adamw, muon = (
        rank_step(expert=8),
        RankStep(SHAPES, replace(LAYOUT, expert=8), replace(BF16, algorithm="muon"), Hardware()),
    )
    matrices, root = 4 * sum(w.rows * w.cols * w.held for w in BLOCK), 2 * 512 * 1024
    assert muon.memory["moments"] * 64 == 4 * matrices + 8 * root
    assert adamw.memory["moments"] * 64 == 8 * (matrices + root)
    flop = sum(w.held * 5 * (4 * 1024**2 * w.rows + 2 * 1024**3) for w in BLOCK) * 4 / 64  # each matrix once
    fastest = max(rate for _, rate in Hardware().rates.products["bf16"])
    saved = 2 * (adamw.memory["moments"] - muon.memory["moments"]) / Hardware().rates.copy
    assert muon.update_seconds + saved - adamw.update_seconds > flop / fastest
    with pytest.raises(PlanError, match="tensor=1 would do"):
        RankStep(SHAPES, replace(LAYOUT, tensor=2), replace(BF16, algorithm="muon"), Hardware())


def test_products_of_few_tokens_take_the_time_of_their_bytes() -> None:
    few, weight = rank_step(sequence_length=64), Weight(8192, 8192, True)
    products, _ = layer_seconds(few, weight)
    assert products > 3 * 2 * weight.elements / Hardware().rates.copy
