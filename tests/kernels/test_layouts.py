import pytest
import torch

from octavo.kernels import layouts
from octavo.kernels.layouts import as_tiles, contraction_multiple, multiply_tiles_, needs_transposed_codes, padded
from tests.support.definitions import scale_grid, tiles_of

TILES = [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (3, 5), (128, 1)]
SHAPES = [(1, 1), (17, 130), (128, 256), (6, 10), (5, 0), (0, 5), (0, 0)]
each_tile = pytest.mark.parametrize("tile", TILES, ids=str)


@pytest.fixture(autouse=True)
def _forget_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_native", {})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_reference_reads_any_strides(device: str) -> None:
    assert not needs_transposed_codes(torch.device(device))
    assert contraction_multiple(torch.device(device)) == 1


@pytest.mark.parametrize(
    ("capability", "needs"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True), ((12, 0), True)]
)
def test_products_of_native_fp8_need_them(monkeypatch, capability, needs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert needs_transposed_codes(torch.device("cuda:0")) is needs
    assert contraction_multiple(torch.device("cuda:0")) == (16 if needs else 1)


def test_the_driver_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0))
    for _ in range(3):
        assert needs_transposed_codes(torch.device("cuda:0"))
    assert len(asked) == 1


def test_padded() -> None:
    assert [padded(size, 16) for size in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert padded(17, 1) == 17


@pytest.mark.parametrize("multiple", [0, -1, 3, 24, 32])
def test_other_multiples_are_refused(multiple: int) -> None:
    with pytest.raises(ValueError, match=f"pad={multiple}: .* 1, 2, 4, 8 or 16"):
        padded(10, multiple)


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
def test_a_scale_reaches_its_tile_and_no_other(dtype, shape, tile):
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
