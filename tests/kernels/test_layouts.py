import functools

import pytest
import torch

from octavo.granularity import MX, NV, PADDING
from octavo.kernels import layouts
from octavo.kernels.layouts import (
    contraction_multiple,
    is_small_block,
    multiply_tiles_,
    needs_transposed_codes,
    padded_size,
    plain_scales,
    swizzled,
)
from octavo.numerics import E8M0
from tests.support.definitions import scale_grid


@pytest.mark.parametrize("native", [False, True])
def test_products_of_native_fp8_need_transposed_codes(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(layouts, "_is_native", functools.cache(layouts._is_native.__wrapped__))
    monkeypatch.setattr(layouts, "runs_natively", lambda device: asked.append(device) or native)
    for _ in range(2):
        assert needs_transposed_codes(torch.device("cuda:0")) is native
        assert contraction_multiple(torch.device("cuda:0")) == (PADDING if native else 1)
        assert contraction_multiple(torch.device("cuda:0"), pads=False) == 1
    assert len(asked) == 1, "the driver is asked once"
    for device in map(torch.device, ("cpu", "meta")):
        assert not needs_transposed_codes(device) and contraction_multiple(device) == 1
        assert contraction_multiple(device, pads=False, packs=True) == NV[1]


def test_padded() -> None:
    assert [padded_size(size, PADDING) for size in (0, 1, PADDING, PADDING + 1)] == [0, PADDING, PADDING, 2 * PADDING]
    assert padded_size(17, 1) == 17
    for multiple in (0, -1, 3, 24, 2 * PADDING):
        with pytest.raises(ValueError, match=f"pad={multiple}: .* 1, 2, 4, 8, .*{PADDING}$"):
            padded_size(10, multiple)


def test_small_blocks_are_powers_of_two_up_to_128() -> None:
    for size in range(-1, 260):
        is_small = size.bit_count() == 1 and 0 < size <= 128
        assert is_small_block((size, 1)) == is_small_block((128, size)) == is_small, size


def test_multiplying_is_in_place_where_no_tile_is_ragged() -> None:
    for tile in ((-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (3, 5), (128, 1)):
        x = torch.ones(128, 128)
        whole = all(size < 2 or 128 % size == 0 for size in tile)
        result = multiply_tiles_(x, torch.full(scale_grid(x.shape, tile), 2.0), tile)
        assert (result.data_ptr() == x.data_ptr()) == whole
        assert bool((result == 2).all())


@pytest.mark.parametrize("shape", [(128, 4), (129, 4), (128, 5), (130, 5), (1, 1), (256, 12), (7, 33), (0, 3), (3, 0)])
def test_scales_of_blocks_of_32_lie_in_parts_of_128_rows(shape: tuple[int, int]) -> None:
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    codes = torch.randint(255, shape, dtype=torch.uint8)
    for laid in (codes, codes.t().contiguous().t()):  # by rows, and as casts write them
        scales = swizzled(laid.view(E8M0))
        if 0 not in shape:
            assert torch.equal(scales.view(torch.uint8), to_blocked(codes).flatten())
        for tile, of_codes in ((MX, (shape[0], 32 * shape[1])), (MX[::-1], (32 * shape[1], shape[0]))):
            undone = plain_scales(scales, of_codes, tile).view(torch.uint8)
            assert torch.equal(undone if tile == MX else undone.t(), codes)
