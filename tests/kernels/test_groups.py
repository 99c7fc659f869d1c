"""Where groups of rows lie, and what is refused of them."""

import pytest
import torch

from octavo import kernels
from octavo.granularity import PADDING, scale_shape
from octavo.kernels.groups import (
    GroupPlace,
    check_offsets,
    check_offsets_kind,
    of_equal_groups,
    padded_columns,
    places,
    scale_rows,
)
from tests.support.definitions import same_bits
from tests.support.groups import SIZES, offsets_of, random_sizes, scale_slices, slices_of


@pytest.mark.parametrize("tile_rows", [-1, 1, 3, 32, 128])
def test_groups_follow_each_other_within_their_capacity(tile_rows: int) -> None:
    for sizes, ungrouped in (*SIZES, *map(random_sizes, range(200))):
        rows, groups = sum(sizes) + ungrouped, len(sizes)
        for pad in (1, PADDING):
            group_places = places(offsets_of(sizes).tolist(), tile_rows, pad)
            expected = zip(slices_of(sizes), scale_slices(sizes, tile_rows), slices_of(sizes, pad), strict=True)
            assert group_places == [GroupPlace(*place) for place in expected]
            assert group_places[-1].scale_rows.stop <= scale_rows(rows, groups, tile_rows)
            assert -(-group_places[-1].columns.stop // pad) * pad <= padded_columns(rows, groups, pad)


def test_the_capacity_is_the_least_that_is_always_enough() -> None:
    for sizes, unused in (([1] * 7 + [5 * 128], 1), ([1] * 7 + [5 * 128 + 1], 0)):
        used = places(offsets_of(sizes).tolist(), 128)[-1].scale_rows.stop
        assert used + unused == scale_rows(sum(sizes), 8, 128) == 5 + 8


def test_offsets_that_are_none_are_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(TypeError, match=r"int32, not torch.int64: .*cumsum\(0\).to\(torch.int32\)"):
        check_offsets_kind(torch.tensor([1, 2]), cpu)
    with pytest.raises(ValueError, match=r"shape \[1, 2\]: they are \[groups\]"):
        check_offsets_kind(torch.zeros(1, 2, dtype=torch.int32), cpu)
    with pytest.raises(ValueError, match="offsets on meta divide rows on cpu"):
        check_offsets_kind(torch.zeros(2, dtype=torch.int32, device="meta"), cpu)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([3, 2, 5], r"offsets\[1\] = 2 is below 3.* ascend"),
        ([-1, 5], r"offsets\[0\] = -1 is below 0"),
        ([3, 11, 4], r"offsets\[1\] = 11: there are 10 rows"),
    ],
)
def test_wrong_ends_are_refused_with_the_first_of_them(ends: list[int], said: str) -> None:
    offsets = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match=said):
        check_offsets(offsets, 10)
    with pytest.raises(ValueError, match=said):
        kernels.cast(torch.ones(10, 4), None, 0, torch.float8_e4m3fn, (1, -1), False, 0, offsets=offsets)


def test_other_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="pad=3"):
        padded_columns(10, 2, 3)


@pytest.mark.parametrize("pad", [1, PADDING])
@pytest.mark.parametrize("tile", [(-1, -1), (1, -1), (-1, 1), (128, 128), (1, 32)], ids=str)
@pytest.mark.parametrize("rows", [1, 48, 130])
def test_weights_are_equal_groups(rows: int, tile: tuple[int, int], pad: int) -> None:
    shape = (3, rows, 40)
    weight = torch.randn(shape)
    offsets = offsets_of([rows] * 3)
    cast = (torch.float8_e4m3fn, tile, False, 0)
    q, t, scale_inv, _ = kernels.cast(weight.flatten(0, 1), None, 0, *cast, True, pad, offsets=offsets)
    codes, scales = of_equal_groups(q, scale_inv, tile, shape)
    laid, laid_scales = of_equal_groups(t, scale_inv, tile, shape, pad, transposed=True)
    assert scales.shape[1:] == scale_shape(shape[1:], tile)
    for expert, one in enumerate(weight):
        actual = codes[expert], laid[expert], scales[expert]
        expected = kernels.cast(one, None, 0, *cast, True, pad)[:3]
        assert all(map(same_bits, actual, expected)) and same_bits(laid_scales[expert], expected[2].t())
        assert codes.data_ptr() == q.data_ptr() and laid.data_ptr() == t.data_ptr()
