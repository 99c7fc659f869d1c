"""Meshes that are better, and what limits a step on one."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo import checkpoint_in_fp8
from octavo.cost.mesh.plan import limit
from octavo.cost.mesh.search import better, in_pairs, order, searched
from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.settings import MeshLayout, Precision
from octavo.cost.mesh.shapes import Shapes, Weight
from octavo.cost.mesh.step import Stage
from octavo.nn.checkpointing import watched


def test_what_limits_and_what_to_change() -> None:
    block = Weight(10240, 8192, True, "out"), Weight(8192, 8192, True, "in"), Weight(8192, 22528, True, "in")
    wide = Shapes("", 8192, 12, block, (Weight(0), Weight(12288, 8192)), 8192, 200000, heads=(64, 8))
    layout = MeshLayout(64, 128, 8192, tensor=2, batch=2)
    stage = Stage(wide, layout, Precision("dynamic", gathers=True, pairs=True), Hardware())
    assert "of the step is products" in limit(stage) and "NVLink" in limit(stage)
    small = replace(stage, hardware=replace(stage.hardware, memory=0.7 * stage.size))
    ways = better(small)
    assert (
        ways
        and ways[0][1].fits
        and [order(way) for _, way in ways] == sorted((order(way) for _, way in ways), reverse=True)
    )
    assert searched(small).fits and order(searched(small)) >= order(ways[0][1])
    none = replace(stage, hardware=replace(stage.hardware, memory=1e6))
    assert not searched(none).fits and all(way.size < none.size for _, way in better(none))
    slow = replace(stage, layout=replace(layout, tensor=1), hardware=replace(stage.hardware, network=1e8))
    assert "the network between servers, on which ranks wait for fsdp" in limit(slow)


def test_what_checkpointed_layers_keep_in_fp8() -> None:
    x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    with watched() as bytes_of_layers:
        checkpoint_in_fp8(torch.sin, x)
    assert bytes_of_layers[""] == (1, 2 * x.numel(), in_pairs(96) * x.numel())
