"""A step on a mesh: ranks hold a model together, replicas cost their exchange, errors name meshes that would do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.cost.mesh import Hardware, MeshLayout, Precision, Shapes, Stage, Weight
from octavo.cost.rates import PUBLISHED, PlanError

BLOCK = (Weight(3 * 1024, 1024, True, "out"), Weight(1024, 1024, True, "in"), Weight(4096, 1024, True, "experts", 8, 2))
SHAPES = Shapes("", 1024, 4, BLOCK, (Weight(512, 1024), Weight(512, 1024)), 1024, 20480, heads=(8, 4))
BF16, FP8 = Precision("bf16", "bf16"), Precision("dynamic", gathers=True, pairs=True)
LAYOUT = MeshLayout(64, 128, 1024)


def stage(precision: Precision = BF16, **layout: int | float) -> Stage:
    return Stage(SHAPES, replace(LAYOUT, **layout), precision, Hardware())  # type: ignore[arg-type]


def test_ranks_hold_the_state_of_one_model_together() -> None:
    one = 4 * SHAPES.parameters  # bytes of a master
    for layout in ({}, {"tensor": 4, "expert": 8}, {"expert": 8}, {"tensor": 2, "pipeline": 2, "expert": 2}):
        assert stage(**layout).memory["masters"] * 64 == pytest.approx(one)  # type: ignore[arg-type]
    assert stage(replicate=8).memory["masters"] * 8 == pytest.approx(one)  # each group of 8 has a model of its own
    fp8 = stage(Precision("dynamic", state="FP8")).memory
    assert fp8["masters"] * 64 == SHAPES.parameters and fp8["weights"] < 0.52 * stage().memory["weights"]


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


def test_replicas_keep_gathers_inside_a_server_and_add_gradients_between() -> None:
    hardware, size = Hardware(), 2 * SHAPES.parameters / 8  # a rank's bf16 gradients, added up by 8 ranks 8 GPUs apart
    replicas = 2 * hardware.wire(size, 8, 8)
    alone = Stage(SHAPES, replace(LAYOUT, gpus=8, sequences=16), BF16, hardware).data
    assert stage(replicate=8).data.seconds == pytest.approx(alone.seconds + replicas)
    assert (hardware.link(8, 1), hardware.link(8, 8), hardware.link(64, 1, directly=True)) == (
        "NVLink", "network", "network"
    )  # fmt: skip


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


def test_other_devices() -> None:
    h100, b200 = Hardware.of(PUBLISHED["H100"]), Hardware.of(PUBLISHED["B200"])
    assert h100 == replace(Hardware(), memory=PUBLISHED["H100"].memory) and b200.nvlink == 2 * h100.nvlink
    assert Stage(SHAPES, LAYOUT, BF16, b200).step.seconds < stage().step.seconds
    with pytest.raises(PlanError, match="add --device H100"):
        Hardware.of(replace(PUBLISHED["H100"], device="CPU, 2 threads"))


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
        stage(**layout)
