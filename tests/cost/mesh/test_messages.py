"""What travels between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.step import RankStep
from tests.support.meshes import BF16, LAYOUT, SHAPES, rank_step


def test_replicas_keep_gathers_inside_a_server_and_add_gradients_between() -> None:
    hardware, size = Hardware(), 2 * SHAPES.parameters / 8  # a rank's bf16 gradients, added up by 8 ranks 8 GPUs apart
    replicas = 2 * hardware.wire(size, 8, 8)
    alone = RankStep(SHAPES, replace(LAYOUT, gpus=8, sequences=16), BF16, hardware).step.waits["fsdp"]
    both = rank_step(replicate=8).step.waits["fsdp"]
    assert both.seconds == pytest.approx(alone.seconds + LAYOUT.micro_batches * replicas)
    links = hardware.link(8, 1), hardware.link(8, 8), hardware.link(64, 1, directly=True)
    assert links == ("NVLink", "network", "network")
