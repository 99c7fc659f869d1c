"""Weights that live in FP8 under tensor parallelism are those of one rank, and so is what is computed with them."""

import pytest
import torch

from tests.support import stored_parallel as tasks

RECIPES = ["dynamic", "power of two", "delayed", "blockwise"]
EXACT = ("power of two", "blockwise")  # scales of inputs are powers of two, so that sums are exact


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("styles", tasks.STYLES)
@pytest.mark.parametrize("before", [True, False], ids=["stored first", "parallel first"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_to_one_rank(pool, recipe, before, styles, shape):
    """Codes and scales, forward and backward, high precision, what is exported, and what restore gives."""
    for unequal, sizes, found, same in pool.run(tasks.compare, shape, recipe, before, styles):
        assert unequal == [] and same
        assert sizes == [256 * 512 // shape[0]] * 2
        assert max(found) <= (0.0 if recipe in EXACT else 1e-6)


@pytest.mark.parametrize("before", [True, False])
def test_blocks_are_not_cut(pool, before):
    for said, unchanged in pool.run(tasks.refused, (2,), "blockwise", before):
        assert "64 rows each are no whole blocks" in said and unchanged


def test_rows_and_columns_that_do_not_divide(pool):
    assert pool.run(tasks.uneven, (2,)) == [([], 0.0)] * 2


@pytest.mark.parametrize(
    ("recipe", "master", "shape"),
    [
        ("dynamic", "split16", (2,)),
        pytest.param("blockwise", "split24", (2,), marks=pytest.mark.full),
        pytest.param("dynamic", "fp32", (2, 2), marks=pytest.mark.full),
    ],
)
def test_steps_equal_those_of_one_rank(pool, recipe, master, shape):
    """Rows and columns; also beside FSDP2. Random bits too depend on an element's place in the whole weight."""
    assert all(found == [[]] * 3 for found in pool.run(tasks.stepped, shape, recipe, master))


@pytest.mark.covering(1)
@pytest.mark.parametrize("storage", ["fp8", None])
@pytest.mark.parametrize("recipe", ["power of two", pytest.param("blockwise", marks=pytest.mark.full)])
def test_with_fsdp2_in_the_other_dimension(pool, recipe, storage):
    """Gathers send a byte an element, of plain weights too; ranks agree on scales once a forward."""
    for difference, sent, agreed in pool.run(tasks.two_dimensions, (2, 2), recipe, storage):
        assert difference == 0.0
        biases = 4 * (256 + 512 // 2)
        assert sent - biases == pytest.approx(256 * 512, rel=1e-3)  # both layers' halves
        parts_of_inputs = 1 if recipe == "power of two" else 0  # of the second layer, a scale
        assert agreed - parts_of_inputs == (2 if storage is None and recipe == "power of two" else 0) + 1


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("dynamic", (4, 1)),
        *(pytest.param(*one, marks=pytest.mark.full) for one in [("dynamic", (1, 4)), ("blockwise", (1, 4))]),
    ],
)
def test_checkpoints_between_layouts(pool, recipe, layout, tmp_path):
    """Data x tensor, of all ranks of the pool; and one process."""
    wanted, *others = pool.run(tasks.save, (2, 2), str(tmp_path), recipe)
    found = [*others, *pool.run(tasks.load, layout, str(tmp_path), recipe), tasks.load(None, str(tmp_path), recipe)]
    assert all(tasks.unequal(wanted, one) == [] for one in found)
    assert wanted["up.weight"].dtype == torch.uint8


@pytest.mark.parametrize("recipe", ["power of two", pytest.param("blockwise", marks=pytest.mark.full)])
def test_named_splits(pool, recipe, tmp_path):
    """Forward and after set_recipe; steps, whose scale is of all splits on all ranks; another storage; a checkpoint."""
    assert pool.run(tasks.splits, (2, 2), recipe, str(tmp_path)) == [([], 0.0)] * 4


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_as_one_graph(pool, recipe):
    assert pool.run(tasks.compiled, (2,), recipe) == [(0.0, 0)] * 2
