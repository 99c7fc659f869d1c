"""Launches for rows in groups, and wrong offsets; test_cast.py has any groups."""

import pytest
import torch

from octavo.granularity import PADDING
from tests.support.casts import E4M3, poisoned_memory
from tests.support.groups import offsets_of
from tests.support.passes import before_of
from tests.support.triton_cases import count_launches, use_small_tiles
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", [(-1, -1), (-1, 1), (1, -1), (128, 128)], ids=str)
@pytest.mark.parametrize("ends", [[3, 2, 40], [-1, 40, 40], [3, 41, 41], [0, 1 << 30, 40]], ids=str)
def test_wrong_offsets_are_groups_without_rows(ends: list[int], tile: tuple[int, int], kernels: TritonKernels) -> None:
    x, offsets = torch.randn(40, 20), torch.tensor(ends, dtype=torch.int32)
    q, t, scale_inv, amax = kernels.cast(x, None, 0, E4M3, tile, False, 0, True, 16, offsets=offsets)
    assert not q.view(torch.uint8).any() and not t.view(torch.uint8).any()
    assert bool((scale_inv == 1).all()) and not amax.any()


LAUNCHES = [  # a tile, and whether there is a delayed scale
    ((-1, -1), False, ["group_amax_kernel", "cast_group_kernel"]),
    ((-1, -1), True, ["cast_group_kernel"]),
    ((-1, 1), False, ["group_amax_kernel", "cast_group_kernel"]),
    ((1, -1), False, ["cast_rows_kernel"]),
    ((1, 128), False, ["cast_blocks_kernel"]),
    ((128, 128), False, ["cast_blocks_kernel"]),
]


def test_launches(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    x, offsets, scale = torch.randn(7, 24), offsets_of([0, 1, 5]), torch.ones(3)
    kernels.module("delayed_update").committed(scale, torch.ones(3, 1), before_of(scale), (True, True, True))
    launched = count_launches(kernels, monkeypatch)
    for tile, delayed, expected in LAUNCHES:
        launched.clear()
        kernels.cast(x, scale if delayed else None, 0, E4M3, tile, False, 0, True, 16, offsets=offsets)
        assert launched == expected, (tile, delayed)


def test_a_row_longer_than_a_tile_writes_its_padding(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of long rows has few, but of a group of one row it writes PADDING transposed columns."""
    use_small_tiles(kernels, monkeypatch)
    x, offsets = torch.randn(2, 130), torch.tensor([1, 2], dtype=torch.int32)
    with poisoned_memory():
        q, t, *_ = kernels.cast(x, None, 0, E4M3, (1, -1), False, 0, True, PADDING, offsets=offsets)
    columns = t.t().view(torch.uint8)[: 2 * PADDING].unflatten(0, (2, PADDING))
    assert torch.equal(columns[:, 0], q[:, :130].view(torch.uint8)) and not columns[:, 1:].any()
