"""Servers of other devices, and what bytes take between their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.step import RankStep
from octavo.cost.rates import PUBLISHED, PlanError
from tests.support.meshes import BF16, LAYOUT, SHAPES, rank_step


def test_other_devices() -> None:
    h100, b200 = Hardware.of(PUBLISHED["H100"]), Hardware.of(PUBLISHED["B200"])
    assert h100 == Hardware() and b200.nvlink == 2 * h100.nvlink
    assert RankStep(SHAPES, LAYOUT, BF16, b200).step.seconds < rank_step().step.seconds
    with pytest.raises(PlanError, match="add --device H100"):
        Hardware.of(replace(PUBLISHED["H100"], device="CPU, 2 threads"))


def test_a_wire_takes_what_its_narrowest_part_takes() -> None:
    """A wire's time is that of its hops' bytes, in a world of one second a byte on the network and none on NVLink."""
    slow = replace(Hardware(), nvlink=float("inf"), network=1.0, latency=0.0)
    servers, ranks_per_server = 4, 8
    ranks = servers * ranks_per_server
    ring = slow.wire(ranks, ranks, 1)  # a byte for each rank, on one card of each server in its turn
    assert ring == pytest.approx((servers - 1) * ranks_per_server / ranks_per_server)
    straight = slow.wire(ranks, ranks, 1, directly=True)  # each rank's byte from all ranks elsewhere
    assert straight == ranks - ranks_per_server
    assert slow.exchange(ranks, ranks, 1, by_server=False) == straight
    assert slow.exchange(ranks, ranks, 1, by_server=True) == pytest.approx(ring)  # of as many bytes
    alone = (slow.wire(servers, servers, ranks_per_server, directly) for directly in (False, True))
    assert list(alone) == [servers - 1, servers - 1]
