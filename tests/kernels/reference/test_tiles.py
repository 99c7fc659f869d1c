import itertools

import pytest
import torch

from octavo.kernels.reference import tiles
from octavo.kernels.reference.tiles import as_tiles, multiply_tiles_, row_chunks, row_slices, tile_rows, with_scratch
from tests.support.definitions import scale_grid, tiles_of

TILES = [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (3, 5), (128, 1)]
SHAPES = [(1, 1), (17, 130), (128, 256), (6, 10), (5, 0), (0, 5), (0, 0)]
each_tile = pytest.mark.parametrize("tile", TILES, ids=str)


@each_tile
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_holds_its_elements_and_zeros(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    x = torch.randn(shape)
    tiled = as_tiles(x, tile)
    assert (tiled.shape[0], tiled.shape[2]) == scale_grid(shape, tile)
    for i, j, rows, cols in tiles_of(shape, tile):
        part = x[rows, cols]
        assert torch.equal(tiled[i, : part.shape[0], j, : part.shape[1]], part)
        assert tiled[i, :, j, :].count_nonzero() == part.count_nonzero()


@each_tile
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scale_reaches_its_tile_and_no_other(
    dtype: torch.dtype, shape: tuple[int, int], tile: tuple[int, int]
) -> None:
    rows, cols = scale_grid(shape, tile)
    scale = torch.rand(rows, cols) + 1
    x = torch.randn(shape).to(dtype)
    expected = x.clone()
    for i, j, r, c in tiles_of(shape, tile):
        expected[r, c] = (x[r, c].float() * scale[i, j]).to(dtype)
    for laid in (x.clone(), x.t().clone(memory_format=torch.contiguous_format).t()):
        assert torch.equal(multiply_tiles_(laid, scale, tile), expected)


def test_whole_tiles_are_a_view() -> None:
    x = torch.zeros(6, 10)
    as_tiles(x, (3, 5))[1, 0, 1] = 1.0
    assert x[3].tolist() == [0.0] * 5 + [1.0] * 5


def test_multiplying_is_in_place_where_no_tile_is_ragged() -> None:
    for tile in TILES:
        x = torch.ones(128, 128)
        whole = all(size < 2 or 128 % size == 0 for size in tile)
        result = multiply_tiles_(x, torch.full(scale_grid(x.shape, tile), 2.0), tile)
        assert (result.data_ptr() == x.data_ptr()) == whole
        assert bool((result == 2).all())


@each_tile
def test_strided_input(tile: tuple[int, int]) -> None:
    x = torch.randn(10, 12).t()[::2, 1:]
    tiled = as_tiles(x, tile)
    for i, j, rows, cols in tiles_of(x.shape, tile):
        part = x[rows, cols]
        assert torch.equal(tiled[i, : part.shape[0], j, : part.shape[1]], part)


@each_tile
@pytest.mark.parametrize("run", [1, 64, 1000, 1 << 30])
@pytest.mark.parametrize("shape", [(1, 1), (17, 130), (300, 7), (5, 0), (0, 5)], ids=str)
def test_runs_of_rows(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], run: int, tile: tuple[int, int]) -> None:
    monkeypatch.setattr(tiles, "CHUNK", run)
    rows, cols = scale_grid(shape, tile)
    x, scale = torch.randn(shape), torch.rand(rows, cols) + 1
    result, expected = torch.full(shape, -1.0), torch.full(shape, -1.0)
    for i, j, r, c in tiles_of(shape, tile):
        expected[r, c] = x[r, c] * scale[i, j]
    memory = set()
    for run_scale, scratch, source, target in with_scratch(row_chunks(tile, scale, x, result)):
        assert scratch.shape == source.shape == target.shape and scratch.dtype == torch.float32
        memory.add(scratch.data_ptr())
        target.copy_(multiply_tiles_(scratch.copy_(source), run_scale, tile))
    assert torch.equal(result, expected)
    assert len(memory) == 1
    assert all(scale is None for scale, *_ in row_chunks(tile, None, x))


@pytest.mark.parametrize("unit", [1, 3, 128])
@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (17, 130), (1000, 7), (128, 128)], ids=str)
def test_slices_of_rows(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], runs: int, unit: int) -> None:
    monkeypatch.setattr(tiles, "CHUNK", 300)
    found = row_slices(shape, unit, runs)
    assert found[0].start == 0 and found[-1].stop == shape[0]
    assert all(a.stop == b.start for a, b in itertools.pairwise(found))
    sizes = [rows.stop - rows.start for rows in found]
    assert all(size == sizes[0] and size % unit == 0 for size in sizes[:-1]) and sizes[-1] <= max(sizes[0], unit)
    assert sizes[0] * shape[1] <= max(runs * 300, unit * shape[1])
    assert len(sizes) == 1 or (sizes[0] + unit) * shape[1] > runs * 300  # no smaller than need be


@each_tile
def test_scales_of_whole_tiles_rows(tile: tuple[int, int]) -> None:
    x, unit = torch.randn(300, 20), max(tile[0], 1)
    scale = torch.rand(scale_grid(x.shape, tile))
    expected = multiply_tiles_(x.clone(), scale, tile)
    for start, stop in ((0, unit), (0, 300), (unit, 2 * unit), (unit, 300), (300 // unit * unit, 300), (0, 0)):
        rows = slice(start, min(stop, 300))
        found = multiply_tiles_(x[rows].clone(), tile_rows(scale, tile, rows), tile)
        assert torch.equal(found, expected[rows])
