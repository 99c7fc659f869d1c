"""Layers with named splits under tensor parallelism: each split is sharded, and computes what it does on one rank."""

import pytest

import octavo
from octavo.nn.parted_linear import part
from tests.support import parallel_tasks as tasks


@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("recipe", ["high_precision", "power of two", "delayed", "rowwise", "mx"])
def test_a_transformer_block(pool, recipe, norm, sequence):
    """Of the largest elements: what another order of additions, in float32, makes of a code here and there."""
    for found in pool.run(tasks.block, (2,), recipe, norm, sequence):
        assert max(found.values()) < (1e-5 if recipe == "high_precision" else 5e-3)


def test_splits_that_do_not_divide(pool):
    assert pool.run(tasks.uneven_splits, (2,))[0].startswith("splits {'b': 5} do not divide into 2 ranks")


def test_weights_that_live_in_fp8_are_not_parted():
    layer = octavo.nn.Linear(256, {"a": 128, "b": 128})
    octavo.convert(layer, octavo.recipes.dynamic(), lambda module, name: True, weight_storage="fp8")
    with pytest.raises(ValueError, match="apply ColwiseParallel before weights are stored in FP8"):
        part(layer, 2)
