"""Every kind of model and step in one graph, forward and backward, bit for bit as in eager; faults would show."""

import dataclasses
import itertools

import pytest
import torch

from octavo.kernels.cpu import KERNELS
from tests.support import compile_cells
from tests.support.compile_cells import RECIPES, WHATS, Result, built, compiled_step, difference, measure, trained

GREEN = Result(graphs=1, breaks=0, recompiles=0, difference=0.0)


# A cell is seconds of tracing: of what holds another row only the larger one. The others are in the full set; a layer
# by itself, in each recipe, is in tests/support/seams.
QUICK = {
    "Linear": ("high_precision",),
    "fused modules": ("delayed",),
    "training step in autocast": ("recipe map",),
    "activation checkpointing": ("mx",),
}


@pytest.mark.parametrize(
    ("what", "recipe"),
    [
        pytest.param(what, recipe, marks=[] if recipe in QUICK.get(what, ()) else pytest.mark.full)
        for what, recipe in itertools.product(WHATS, RECIPES)
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


def test_graphs_and_breaks_are_counted():
    class Breaks(torch.nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    what = compile_cells.What(lambda layers: Breaks(32, 32))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        trained(what, what.build(1), compiled_step(what, "aot_eager"), 1)


# --- what a compiler could get wrong must show as a difference --------------------------------------------------------


def forgets_the_update(name, call):
    """A commit that writes no state."""

    def forgetful(x, *args, **named):
        if name != "cast_and_commit":
            return call(x, *args, **named)
        return call(x, *(state.clone() for state in args[:3]), *args[3:])

    return forgetful


def reads_a_stale_scale(name, call):
    """Casts of activations by the scale of the step before."""
    before = {}

    def stale(x, delayed_scale, *args, **named):
        if name != "cast" or delayed_scale is None or "gamma" in named:
            return call(x, delayed_scale, *args, **named)
        used = before.get(delayed_scale.data_ptr(), delayed_scale)
        before[delayed_scale.data_ptr()] = delayed_scale.clone()
        return call(x, used, *args, **named)

    return stale


def moves_the_scale_before_recomputation(name, call):
    """Every second cast of one input, which recomputation does, by another scale."""
    seen = set()

    def moved(x, delayed_scale, *args, **named):
        if name != "cast" or delayed_scale is None or args[0] != 0 or "gamma" in named:
            return call(x, delayed_scale, *args, **named)
        again = (tuple(x.shape), float(x.double().sum()))
        scale = delayed_scale * 0.7 if again in seen else delayed_scale
        seen.symmetric_difference_update({again})
        return call(x, scale, *args, **named)

    return moved


def test_a_fault_in_the_graph_is_seen():
    torch.compiler.reset()
    what, steps = WHATS["activation checkpointing"], 6  # a history is of 4
    expected = trained(what, built(what, "delayed"), what.step, steps)
    step = compiled_step(what, "aot_eager")
    assert difference(trained(what, built(what, "delayed"), step, steps), expected) == 0.0
    faults = [forgets_the_update, reads_a_stale_scale]
    if torch.__version__ >= "2.12":  # 2.11's graphs compute casts of activations only once
        faults.append(moves_the_scale_before_recomputation)
    for fault in faults:
        with torch.library._scoped_library("octavo", "IMPL") as library:  # eager goes past the dispatcher, graphs don't
            for name in ("cast", "cast_and_commit"):
                library.impl(name, fault(name, KERNELS[name]), "CPU")
            assert difference(trained(what, built(what, "delayed"), step, steps), expected) > 0.0, fault
