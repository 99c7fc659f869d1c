"""What a rank holds: ranks have a model together, and errors name meshes that would do."""

from __future__ import annotations

import pytest

from octavo.cost.mesh.settings import Precision
from octavo.cost.rates import PlanError
from tests.support.meshes import SHAPES, rank_step


def test_ranks_hold_the_state_of_one_model_together() -> None:
    one = 4 * SHAPES.parameters  # bytes of a master
    for layout in ({}, {"tensor": 4, "expert": 8}, {"expert": 8}, {"tensor": 2, "pipeline": 2, "expert": 2}):
        assert rank_step(**layout).memory["masters"] * 64 == pytest.approx(one)  # type: ignore[arg-type]
    assert rank_step(replicate=8).memory["masters"] * 8 == pytest.approx(one)  # each group of 8 has a model of its own
    fp8 = rank_step(Precision("dynamic", state="FP8")).memory
    assert fp8["masters"] * 64 == SHAPES.parameters and fp8["weights"] < 0.52 * rank_step().memory["weights"]


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tensor": 8}, r"tensor=8 does not divide the model's heads and features \(4, 8, .*: tensor may be 1, 2, 4$"),
        ({"expert": 16}, r"expert=16 does not divide the model's experts \(8\): expert may be 1, 2, 4, 8$"),
        ({"pipeline": 8}, "pipeline=8: there are 4 layers"),
        ({"gpus": 6, "tensor": 4}, "6 GPUs do not divide"),
        ({"sequences": 96}, "96 sequences do not divide by 64 ranks .* 128 sequences would"),
        ({"replicate": 64, "expert": 8}, "experts divide among ranks of fsdp and tensor: expert=1 would do"),
    ],
)
def test_a_mesh_that_does_not_divide_says_what_would(layout: dict[str, int], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        rank_step(**layout)
