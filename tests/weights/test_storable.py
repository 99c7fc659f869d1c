from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from octavo import PerBlock, PerRow, PerTensor
from octavo.weights.storable import (
    FROZEN_ONLY,
    STORABLE,
    granularity_of_scales,
    stored_granularity,
    why_cut_blocks,
    why_not_shardable,
)
from octavo.weights.stored import StoredWeight

SHAPES = [(1, 1), (1, 300), (3, 31), (128, 128), (129, 32), (200, 300), (4, 96, 64), (4, 300, 200), (1, 1, 40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("granularity", STORABLE + FROZEN_ONLY, ids=str)
def test_the_scales_shape_says_which_elements_share_one(shape, granularity):
    weight = StoredWeight.cast(torch.randn(shape), granularity)
    by_shape = granularity_of_scales(weight.shape, weight.scale_inv.shape)
    again = StoredWeight(weight.qdata, weight.scale_inv, weight.dtype, by_shape)
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert weight.granularity == stored_granularity(granularity, shape)
    assert weight.granularity == (by_shape if granularity in STORABLE else granularity)


def test_scales_of_another_shape_are_none():
    assert granularity_of_scales((200, 300), (2, 2)) is None
    assert granularity_of_scales((4, 200, 300), (1, 1, 1)) is None


def test_what_ranks_can_be_given_of_a_weight():
    """Each its rows, or columns, of whole blocks, as many as others; per tensor any number."""
    for shape, granularity, dim, can in [
        ((200, 300), PerTensor(), 0, True),
        ((512, 300), PerBlock(128, 128), 0, True),
        ((384, 300), PerBlock(128, 128), 0, False),  # 192 rows each
        ((640, 300), PerBlock(128, 128), 0, False),  # 320 rows each
        ((300, 512), PerBlock(128, 128), 1, True),
        ((200, 300), PerRow(), 0, True),
        ((201, 300), PerRow(), 0, False),
        ((200, 300), PerRow(), 1, False),
        ((200, 320), PerBlock(1, 32), 1, True),
        ((200, 300), PerBlock(1, 32), 1, False),
    ]:
        assert (why_not_shardable(shape, granularity, 2, dim) is None) == can, (shape, granularity, dim)
        assert why_not_shardable(shape, granularity, 1, dim) is None


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Shard(0), Replicate()]], ids=str)
def test_replicas_do_not_cut_blocks(placements):
    """Of a mesh of 2 x 2 ranks only one dimension divides the rows."""
    mesh = SimpleNamespace(size=lambda at: 2)
    sharded = SimpleNamespace(ndim=2, shape=torch.Size((256, 128)), placements=placements, device_mesh=mesh)
    assert why_cut_blocks(sharded, PerBlock(128, 128)) is None
    sharded.placements = [Shard(0), Shard(0)]
    why = why_cut_blocks(sharded, PerBlock(128, 128))
    assert "can't be sharded over 4 ranks: 64 rows each are no whole blocks" in why
