"""Weights that ranks share by rows, columns or both: what an optimizer makes of them is what one rank does."""

import math
from typing import Any

import pytest

from tests.support import optim_layouts as layouts

MESHES = [(2,), (2, 2)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_shards_are_where_they_are_said_to_be(shape: tuple[int, ...], pool: Any) -> None:
    assert not any(pool.run(layouts.places, shape))


FP8 = {"moments": "fp8", "master": "split24"}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("columns", FP8),
        ("columns", {"moments": "bf16", "master": None, "momentum": 0.9}),
        ("whole", {"moments": "fp8"}),
        ("rows of columns", FP8),
        ("rows of rows", FP8),
        ("rows of columns", {"moments": "fp32", "master": "split32", "skip_nonfinite": True}),
        ("rows of rows", {"moments": "bf16", "gradient_storage": "fp8"}),
    ],
    ids=str,
)
def test_whole_blocks_are_those_of_one_rank(layout: str, options: Any, pool: Any) -> None:
    shape = (2,) * len(layouts.LAYOUTS[layout])
    assert pool.run(layouts.stepped, shape, layout, options, 512, {}) == [[]] * math.prod(shape)


@pytest.mark.parametrize("layout", ["columns", "rows of columns"])
def test_columns_that_cut_blocks_have_moments_in_bf16(layout: str, pool: Any) -> None:
    """Two ranks have 150 columns each: one block and a part of the next."""
    shape = (2,) * len(layouts.LAYOUTS[layout])
    assert pool.run(layouts.stepped, shape, layout, FP8, 300, {"moments": "bf16"}) == [[]] * math.prod(shape)


@pytest.mark.filterwarnings("ignore:the optimizer's state was converted")
def test_full_state_dicts_go_to_ranks_and_back(pool: Any) -> None:
    """Float32 and codes hold codes, bf16 to half a step of it."""
    for found in pool.run(layouts.loaded_full, (2,)):
        assert max(found[: len(found) // 2]) == 0 and 0 < max(found) < 2.0**-8


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_norms_count_each_element_once(shape: tuple[int, ...], pool: Any) -> None:
    for norm, largest, of_a_fault in pool.run(layouts.norms, shape):
        assert norm == pytest.approx(1, rel=1e-6) and largest == 1 and not math.isfinite(of_a_fault)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_block_whose_norms_are_replicated(in_backward: bool, pool: Any) -> None:
    for worst, partial in pool.run(layouts.parallel_block, (2,), in_backward):
        assert worst < 1e-5 and partial == {"0.weight", "0.bias"}


def test_other_layouts_are_refused(pool: Any) -> None:
    for said in pool.run(layouts.refused, (2, 2)):
        assert len(said) == 2 and all("octavo's optimizers take rows" in text for text in said)
