"""Every kind of model and step in one graph, forward and backward, bit for bit as in eager."""

import dataclasses
import itertools

import pytest
import torch

from tests.support.compile_cells import RECIPES, WHATS, Result, measure

GREEN = Result(graphs=1, breaks=0, recompiles=0, difference=0.0)


# A cell is seconds of tracing: one by default. Layers of each recipe, in one graph too, are in tests/support/seams.
QUICK = ("activation checkpointing", "recipe map")


@pytest.mark.parametrize(
    ("what", "recipe"),
    [
        pytest.param(*cell, marks=[] if cell == QUICK else pytest.mark.full)
        for cell in itertools.product(WHATS, RECIPES)
    ],
)
def test_one_graph_and_bit_for_bit(what, recipe):
    assert measure(what, recipe) == GREEN


def unless(quick, values):
    """The others are in the full set."""
    return [pytest.param(value, marks=[] if value == quick else pytest.mark.full) for value in values]


@pytest.mark.parametrize("recipe", unless("delayed", RECIPES))
@pytest.mark.parametrize(
    "what", unless("Linear", ["Linear", "fused modules", "training step in autocast", "activation checkpointing"])
)
def test_one_graph_in_inductor(what, recipe):
    # Left to itself inductor keeps in float32 what eager's autocast rounds to bf16, and a code in FP8 is 16 times
    # coarser than a bf16 ulp: rounding as eager does shows that nothing else differs.
    with torch._inductor.config.patch(emulate_precision_casts=WHATS[what].whole_step):
        found = measure(what, recipe, "inductor")
    assert dataclasses.replace(found, difference=0.0) == GREEN
    assert found.difference <= 2.0**-20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", ["fused modules", "training step in autocast", "activation checkpointing"])
def test_one_graph_on_a_gpu(what, recipe, mode):
    found = measure(what, recipe, "inductor", device="cuda", mode=mode)
    assert dataclasses.replace(found, difference=0.0) == GREEN
    assert found.difference <= 2.0**-6  # atomics and other tiles add up in another order
