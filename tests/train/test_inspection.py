"""Runs that are recorded in their own folder."""

import math
from dataclasses import replace

import pytest

import octavo
from octavo.inspect import diagnose
from octavo.inspect.report import table
from octavo.train import DivergedError, Hooks, InspectConfig, StateConfig, TrainError, run
from octavo.train.progress import Progress
from tests.support.sharded_runs import changed, train_on

np = pytest.importorskip("numpy")


@pytest.fixture
def recorded(config, tmp_path):
    config = replace(config, inspect=InspectConfig(True, 4))
    return changed(config, run={"out": tmp_path, "checkpoint_every": 3}, optimizer={"steps": 10})


def test_a_resumed_run_goes_on_with_its_record(recorded, tmp_path):
    plain = run(replace(recorded, inspect=InspectConfig(), run=replace(recorded.run, out=None)), "delayed")
    seen = []
    hooks = Hooks(on_step=seen.append, should_stop=lambda: len(seen) >= 6)
    assert run(recorded, "delayed", hooks=hooks).interrupted
    result = run(changed(recorded, run={"resume": True}), "delayed")
    assert result.losses == plain.losses
    found = octavo.inspect.load(tmp_path / "delayed/inspect")
    assert found.steps == [0, 4, 8]
    assert found.scalars["loss"] == (list(range(10)), pytest.approx(plain.losses))
    assert {"loss", "grad_norm", "lr"} == found.scalars.keys()


def test_a_run_killed_before_its_first_checkpoint_begins_its_record_anew(recorded, tmp_path):
    folder = tmp_path / "dynamic/inspect"
    folder.mkdir(parents=True)
    (folder / "steps.jsonl").write_text('{"step": 0, "loss": 9}\n')
    run(changed(recorded, optimizer={"steps": 2}, run={"resume": True}), "dynamic")
    assert octavo.inspect.load(folder).scalars["loss"][0] == [0, 1]


def test_switches_and_phases_without_fp8(recorded, tmp_path):
    scheduled = replace(recorded, state=StateConfig(schedule="bf16-then-fp8@0.5"), inspect=InspectConfig(True, 2))
    run(scheduled, "dynamic")
    found = octavo.inspect.load(tmp_path / "dynamic/inspect")
    assert found.steps == [6, 8]
    assert [(step, kind) for step, kind, _ in found.events] == [(4, "switch")]


def test_a_recovery_and_the_step_that_it_leaves_out(recorded, tmp_path):
    def poison(model):
        model.blocks[1].register_forward_hook(lambda module, args, out: out * math.nan if len(seen) == 2 else out)

    seen = []
    result = run(replace(recorded, state=StateConfig(recover=3)), "delayed", hooks=Hooks(poison, seen.append))
    assert [step for step, loss in enumerate(result.losses) if math.isnan(loss)] == [2]
    assert [(switch.step, switch.name) for switch in result.switches[1:]] == [(3, "high_precision"), (6, "delayed")]
    found = octavo.inspect.load(tmp_path / "delayed/inspect")
    kinds = [(step, kind) for step, kind, _ in found.events if kind != "fault"]
    assert sorted(kinds) == [(2, "recovery"), (2, "skipped"), (5, "switch")]


def test_a_recovery_needs_fp8(recorded):
    with pytest.raises(TrainError, match="recover 3 switches FP8 layers, and bf16 has none"):
        run(replace(recorded, state=StateConfig(recover=3)), "bf16")


def test_a_run_without_fp8_layers_says_that_nothing_is_recorded(recorded, tmp_path):
    class Said(Progress):
        def message(self, text):
            lines.append(text)

    lines = []
    run(changed(recorded, optimizer={"steps": 1}), "baseline", hooks=Hooks(progress=Said()))
    assert "bf16 has no layers in FP8: nothing of it is recorded" in lines
    assert not (tmp_path / "bf16/inspect").exists()


def test_a_run_that_diverges_says_where(recorded, tmp_path):
    def poison(model):
        model.blocks[1].register_forward_hook(lambda module, args, out: out * math.nan if len(seen) == 2 else out)

    seen = []
    with pytest.raises(DivergedError, match=r"an inf or a NaN in the (input|loss)"):
        run(recorded, "dynamic", hooks=Hooks(on_model=poison, on_step=seen.append))
    ((_, kind, text),) = octavo.inspect.load(tmp_path / "dynamic/inspect").events
    assert kind == "fault" and "at step 2" in text


@pytest.mark.parametrize(
    ("shard", "tensor_parallel"),
    [("fsdp", 1), *(pytest.param(*case, marks=pytest.mark.full) for case in (("ddp", 1), ("fsdp", 2)))],
)
def test_ranks_record_together(shard, tensor_parallel, recorded, tmp_path, pool):
    parts = {"shard": shard, "tensor_parallel": tensor_parallel}
    config = changed(recorded, ranks=parts, optimizer={"steps": 3})
    (losses, *_), *_ = pool.run(train_on, (2 * tensor_parallel,), config, "delayed")
    found = octavo.inspect.load(tmp_path / "delayed/inspect")
    assert found.steps == [0]
    assert found.scalars["loss"][1] == pytest.approx([loss for loss, _ in losses])
    assert np.isfinite(found.measures["amax"]).all() and (found.weights["changed"] > 0).all()
    run(changed(recorded, optimizer={"steps": 3}, run={"out": tmp_path / "alone"}), "delayed")
    alone = octavo.inspect.load(tmp_path / "alone/delayed/inspect")
    assert found.rows == alone.rows
    inputs = [at for at, row in enumerate(alone.rows) if row.role == "input"]
    first, *others = inputs  # before the first nothing was rounded but to bf16; then ranks round by amaxes of their own
    amax, whole = found.measures["amax"][0], alone.measures["amax"][0]
    assert amax[first] == pytest.approx(whole[first], rel=2**-8)
    np.testing.assert_allclose(amax[others], whole[others], rtol=0.15)


def test_experts_are_recorded(recorded, tmp_path):
    run(changed(recorded, model={"experts": 4, "top_k": 2}, optimizer={"steps": 1}), "delayed")
    found = octavo.inspect.load(tmp_path / "delayed/inspect")
    assert found.experts.tokens.keys() == {
        f"blocks.{i}.mlp.experts.{part}" for i in (0, 1) for part in ("gate_up", "down")
    }
    rows = 2 * recorded.data.batch * recorded.model.context
    assert all(tokens.sum() == rows for tokens in found.experts.tokens.values())
    text = table(found, diagnose(found), 10)
    assert "blocks.0.mlp.experts: 4 experts, " in text
