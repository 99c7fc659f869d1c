"""Training under FSDP2 with FP8 all-gathers equals training of the replicated model: per recipe, situation, ranks."""

import itertools

import pytest

from tests.support import fsdp_situations as situations
from tests.support.fsdp_situations import RECIPES, SITUATIONS

SHAPES = {"1 rank": (1,), "2 ranks": (2,), "4 ranks": (4,), "2 replicas of 2": (2, 2)}
WAYS = {  # how weights are gathered of "even shards" on 2 ranks, and on 4
    "dynamic": {"in FP8"},
    "delayed": {"in FP8"},
    "power of two": {"in FP8"},
    "blockwise": {"in FP8", "cast after"},  # the head's 40 rows are no whole blocks
    "rowwise": {"cast after"},
    "mx": {"cast after"},
    "high_precision": {"as it is"},
}


def default(recipe, situation, shape):
    """On 2 ranks two recipes in every situation, and every recipe in one; uneven parts of 4, one of them empty."""
    if shape == "2 ranks":
        return recipe in ("delayed", "blockwise") or situation == "even shards"
    return (recipe, situation) == ("delayed", "uneven shards") and shape != "1 rank"


def cells():
    """Each recipe in each situation on each mesh, every other one with weights that stay gathered after forward."""
    found = []
    for names in itertools.product(*map(enumerate, (RECIPES, SITUATIONS, SHAPES))):
        places, (recipe, situation, shape) = zip(*names, strict=True)
        # a weight that stays gathered after evaluation is read by training as it is
        reshard = sum(places) % 2 == 0 or situation == "evaluation in between"
        marks = () if default(recipe, situation, shape) else pytest.mark.full
        name = ", ".join((recipe, situation, shape, "reshard" if reshard else "keep"))
        found.append(pytest.param((recipe, situation, shape, reshard), marks=marks, id=name))
    return found


@pytest.mark.parametrize("cell", cells())
def test_equal_to_the_replicated_model(pool, cell):
    recipe, situation, shape, reshard = cell
    ranks = pool.run(situations.compare, SHAPES[shape], recipe, situation, reshard)
    difference = max(found for found, _ in ranks)
    # Two ranks' gradients have one sum; of four the order of adding differs, in the plain model too.
    assert difference == 0.0 if shape in ("1 rank", "2 ranks") else difference <= 2.0**-20
    if situation == "even shards" and shape in ("2 ranks", "4 ranks"):
        assert {*ranks[0][1].values()} == WAYS[recipe]
