from dataclasses import replace

import pytest
import torch

from octavo import recipes
from octavo.schedule import Phase
from octavo.tensor.stored_weight import StoredWeight
from octavo.train import (
    DataConfig,
    Hooks,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
    TrainError,
    compare,
    run,
)
from octavo.train.phases import BELOW, phases_of

DYNAMIC = recipes.dynamic()
STATE = StateConfig("fp8", "none", "fp8")
HIGH = Phase(recipes.high_precision(), "fp32", "fp32", None)
TINY = TrainConfig(
    ModelConfig(width=32, layers=1, heads=2, context=16),
    DataConfig(batch=4, eval_windows=4),
    OptimizerConfig(steps=10),
    RunConfig(eval_every=0),
)


def test_names_and_shares():
    low = Phase(DYNAMIC, "fp8", None, "fp8")
    assert phases_of("fp8-then-bf16@0.7", DYNAMIC, 240, STATE) == [low, replace(HIGH, from_step=168)]
    found = phases_of("bf16-then-blockwise@.3-then-fp8@0.5", DYNAMIC, 100, STATE)
    assert found == [
        HIGH,
        Phase(recipes.blockwise(), "fp8", None, "fp8", from_step=30),
        Phase(DYNAMIC, "fp8", None, "fp8", from_step=50),
    ]
    assert phases_of("auto", DYNAMIC, 9, StateConfig()) == [
        Phase(DYNAMIC, "fp32", "auto", None),
        replace(HIGH, when_update_below_resolution=BELOW),
    ]


@pytest.mark.parametrize("text", ["fp8", "fp8-then-bf16", "fp8-then-bf16@1.5", "fp9-then-bf16@0.5", "fp8@0.3", "AUTO"])
def test_what_is_no_schedule(text):
    with pytest.raises(ValueError, match="choose auto, or phases"):
        StateConfig(schedule=text)


@pytest.mark.parametrize("text", ["fp8-then-bf16@0.01", "fp8-then-bf16@0.5-then-fp8@0.4", "fp8-then-bf16@0.99"])
def test_phases_that_begin_in_no_step(text):
    with pytest.raises(TrainError, match="would begin at step"):
        phases_of(text, DYNAMIC, 10, STATE)


@pytest.mark.parametrize("state", [STATE, StateConfig(), StateConfig("fp8", "split16", "fp8", "8KB")])
def test_a_run_switches_and_resumes_bit_for_bit(state, tmp_path):
    config = replace(TINY, state=replace(state, schedule="fp8-then-bf16@0.4-then-fp8@0.8"))
    whole = run(config, "dynamic")
    assert [(s.step, s.name) for s in whole.switches] == [(0, "dynamic"), (4, "high_precision"), (8, "dynamic")]
    config = replace(config, run=replace(config.run, out=tmp_path))
    for stop in (3, 6, 9):  # in each phase, and gone on with from there
        done = iter(range(3))
        part = run(config, "dynamic", hooks=Hooks(should_stop=lambda done=done: next(done, None) is None))
        assert part.interrupted and len(part.rows) == stop
        config = replace(config, run=replace(config.run, resume=True))
    for _ in range(2):  # to its end; and read again
        rest = run(config, "dynamic")
        assert rest.losses == whole.losses and rest.final_validation == whole.final_validation
        assert rest.switches == whole.switches


def test_weights_take_the_form_of_the_phase():
    config = replace(TINY, state=replace(STATE, schedule="bf16-then-fp8@0.5"))
    models = []
    run(config, "dynamic", hooks=Hooks(on_model=models.append))
    weights = [p for p in models[0].parameters() if isinstance(p, StoredWeight)]
    assert len(weights) == 4 and all(p.dtype == torch.bfloat16 for p in weights)


def test_the_baseline_has_no_phases_and_stands_beside_runs_that_do():
    config = replace(TINY, state=StateConfig(schedule="fp8-then-bf16@0.5"))
    with pytest.raises(TrainError, match="switches FP8 layers, and bf16 has none"):
        run(config, "bf16")
    baseline, scheduled = compare(config, ["bf16", "dynamic"])
    assert baseline.switches == [] and baseline.losses == run(replace(TINY, state=StateConfig()), "bf16").losses
    assert len(scheduled.switches) == 2
