"""What a rank computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.step import Stage
from octavo.cost.rates import PlanError
from tests.support.meshes import BF16, BLOCK, LAYOUT, SHAPES, stage


def test_muon_keeps_one_moment_of_the_blocks_matrices_and_takes_its_products() -> None:
    adamw, muon = stage(expert=8), Stage(SHAPES, replace(LAYOUT, expert=8), replace(BF16, algorithm="muon"), Hardware())
    matrices, root = 4 * sum(w.rows * w.cols * w.held for w in BLOCK), 2 * 512 * 1024
    assert muon.memory["moments"] * 64 == 4 * matrices + 8 * root and adamw.memory["moments"] * 64 == 8 * (
        matrices + root
    )
    flop = sum(w.held * 5 * (4 * 1024**2 * w.rows + 2 * 1024**3) for w in BLOCK) * 4 / 64  # each matrix once
    fastest = max(rate for _, rate in Hardware().rates.products["bf16"])
    saved = 2 * (adamw.memory["moments"] - muon.memory["moments"]) / Hardware().rates.copy
    assert muon.optimizer + saved - adamw.optimizer > flop / fastest
    with pytest.raises(PlanError, match="tensor=1 would do"):
        Stage(SHAPES, replace(LAYOUT, tensor=2), replace(BF16, algorithm="muon"), Hardware())
