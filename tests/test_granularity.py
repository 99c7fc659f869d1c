import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest

from octavo import PerBlock, PerRow, PerTensor
from octavo.granularity import Granularity, granularity_of, scale_shape
from tests.support.definitions import scale_grid

GRANULARITIES = [PerTensor(), PerRow(), PerRow(dim=-2), PerBlock(1, 128), PerBlock(128, 128), PerBlock(3, 5)]
SIZES = [0, 1, 2, 3, 5, 17, 127, 128, 129, 300]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_scale_shape_of_matrices(granularity: Granularity) -> None:
    for rows in SIZES:
        for cols in SIZES:
            expected = scale_grid((rows, cols), granularity.tile)
            assert granularity.scale_shape((rows, cols)) == scale_shape([rows, cols], [*granularity.tile]) == expected


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_leading_dimensions_are_independent_but_for_per_tensor(granularity: Granularity) -> None:
    shape = granularity.scale_shape((4, 0, 130, 7))
    if granularity == PerTensor():
        assert shape == (1, 1, 1, 1)
    else:
        assert shape == (4, 0, *granularity.scale_shape((130, 7)))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_fewer_dimensions_are_one_row(granularity: Granularity) -> None:
    assert granularity.scale_shape(()) == ()
    for size in SIZES:
        assert granularity.scale_shape((size,)) == granularity.scale_shape((1, size))[1:]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_transposed(granularity: Granularity) -> None:
    assert granularity.transposed().tile == granularity.tile[::-1]
    assert granularity.transposed().transposed() == granularity


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_values(granularity: Granularity) -> None:
    assert granularity_of(granularity.tile) == granularity == granularity_of(list(granularity.tile))
    for twin in (pickle.loads(pickle.dumps(granularity)), copy.deepcopy(granularity), eval(repr(granularity))):
        assert twin == granularity and hash(twin) == hash(granularity)
    assert len({*GRANULARITIES}) == len(GRANULARITIES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        granularity.dim = 3


def test_each_matrix_may_have_scales_of_its_own() -> None:
    shape = (2, 3, 4, 16)
    for granularity in GRANULARITIES:
        of_each = granularity.of_matrices(shape).scale_shape(shape)
        assert (
            of_each == (2, 3, *granularity.scale_shape(shape[2:])) and granularity.of_matrices((4, 16)) == granularity
        )


def test_names() -> None:
    names = "PerTensor() PerRow() PerRow(dim=-2) PerBlock(1, 128) PerBlock(128, 128) PerBlock(3, 5)"
    assert " ".join(map(repr, GRANULARITIES)) == names


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *((lambda dim=dim: PerRow(dim=dim), rf"dim={dim}.*-1 .*or -2") for dim in (0, 1, 2, -3)),
        *(
            (lambda block=block: PerBlock(*block), "integer of at least 1")  # type: ignore[misc]
            for block in [(0, 1), (1, 0), (-1, 128), (128, -1), (1.5, 2), ("1", 2), (True, 128)]
        ),
        *((lambda tile=tile: granularity_of(tile), "integer of at least 1") for tile in [(-1, 128), (2, -1), (0, 1)]),
    ],
)
def test_what_is_no_granularity(make: Callable[[], Granularity], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
