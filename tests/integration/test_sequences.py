"""Random sequences of everything that can touch a layer: nothing is stale and nothing is read in halves.

Hypothesis finds the sequences and shortens those that fail. A few examples run by default, thousands in the full set.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.support import sequences

FACTOR, FLAG = st.sampled_from(sequences.FACTORS), st.booleans()
RULES = {
    "forward": {"size": st.sampled_from((1.0, 8.0)), "mode": st.sampled_from(("grad", "grad", "no_grad", "inference"))},
    "backward": {"which": st.integers(0, 3), "again": FLAG},
    "unroll": {"calls": st.integers(2, 3)},
    "step": {"name": st.sampled_from(list(sequences.OPTIMIZERS))},
    "other_step": {"rank": st.integers(0, 1)},
    "zero_grad": {"to_none": FLAG},
    "write": {"name": st.sampled_from(list(sequences.WRITES)), "factor": FACTOR},
    "write_data": {"replace": FLAG, "factor": FACTOR},
    "rest": {},
    "set_recipe": {"recipe": st.sampled_from(list(sequences.RECIPES))},
    "load": {"assign": FLAG},
    "replace": {},
    "call_functionally": {},
    "parametrize": {},
    "copy": {},
    "to": {"dtype": st.sampled_from((torch.float32, torch.bfloat16))},
    "train": {"training": st.sampled_from((True, True, False))},
    "freeze": {"frozen": FLAG},
    "recompute": {"reentrant": FLAG},
    "keep": {"anew": FLAG},
}


class Layers(RuleBasedStateMachine):
    """A layer of any recipe and storage."""

    @initialize(
        recipe=st.sampled_from(list(sequences.RECIPES)),
        stored=FLAG,
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    )
    def begin(self, recipe, stored, dtype):
        self.subject = sequences.Subject(recipe, stored, dtype)


class Experts(RuleBasedStateMachine):
    """Linear layers of experts, of any recipe."""

    @initialize(recipe=st.sampled_from(list(sequences.RECIPES)), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
    def begin(self, recipe, dtype):
        self.subject = sequences.GroupedSubject(recipe, dtype)


def _rule(name, arguments):
    def do(self, **arguments):
        getattr(self.subject, name)(**arguments)

    do.__name__ = name
    return rule(**arguments)(do)


for name, arguments in RULES.items():
    setattr(Layers, name, _rule(name, arguments))
    setattr(Experts, name, _rule(name, arguments))


def examples(count, steps):
    """Found anew each time in the full set; always the same ones by default."""
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        derandomize=count < 1000,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.full)])
def test_a_layer_on_one_device(count):
    run_state_machine_as_test(Layers, settings=examples(count, 30))


@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.full)])
def test_experts_on_one_device(count):
    run_state_machine_as_test(Experts, settings=examples(count, 30))


def play(mesh, recipe, stored, steps):
    """A sequence on a sharded layer; an error is an answer, so that ranks stay together."""
    subject = sequences.Subject(recipe, stored, mesh=mesh)
    for name, arguments in steps:
        getattr(subject, name)(**arguments)


SHARDED = "forward backward step other_step zero_grad write write_data set_recipe load train recompute".split()
STEPS = st.one_of(*(st.tuples(st.just(name), st.fixed_dictionaries(RULES[name])) for name in SHARDED))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.full)])
def test_a_layer_under_fsdp2(pool, ranks, count):
    @examples(count, 30)
    @given(st.sampled_from(list(sequences.RECIPES)), FLAG, st.lists(STEPS, max_size=30))
    def run(recipe, stored, steps):
        pool.run(play, (ranks,), recipe, stored, steps)

    run()
