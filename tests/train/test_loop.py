import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import octavo
from octavo.distributed import checkpoint
from octavo.distributed.checkpoint import checkpoints_in, load_extra, save_checkpoint
from octavo.inspect import diagnose
from octavo.inspect.report import table
from octavo.nn.linear import SeparateSplits
from octavo.train import (
    DivergedError,
    Hooks,
    InspectConfig,
    ModelConfig,
    RunCheckpointError,
    StateConfig,
    TrainError,
    compare,
    loop,
    run,
)
from octavo.train.checkpoint import HEADER, RunFolder
from octavo.train.loop import trained_model
from octavo.train.progress import Progress, StepReader
from octavo.train.trainer import build_model
from octavo.weights.stored import StoredWeight
from tests.support.combinations import in_full
from tests.train.test_shard import changed, curve, rows, stop_after, train_on


@pytest.fixture
def recorded(config, tmp_path):
    config = replace(config, inspect=InspectConfig(True, 2))
    return changed(config, run={"out": tmp_path, "checkpoint_every": 3}, optimizer={"steps": 6})


def test_a_resumed_run_goes_on_with_its_record(recorded, tmp_path):
    plain = run(replace(recorded, inspect=InspectConfig(), run=replace(recorded.run, out=None)), "delayed")
    assert run(recorded, "delayed", hooks=stop_after(3)).interrupted
    assert run(changed(recorded, run={"resume": True}), "delayed").losses == plain.losses
    record = octavo.inspect.load(tmp_path / "delayed/inspect")
    assert record.steps == [0, 2, 4]
    assert record.scalars["loss"] == (list(range(6)), pytest.approx(plain.losses))
    named = {name for name in record.scalars if " of group " not in name}  # options of the optimizer
    assert named == {"loss", "grad_norm", "lr", "state_age", "twin_loss", "twin_slope", "left_gradient"}
    assert "betas 1 of group 0" in record.scalars


class Messages(Progress):
    def __init__(self):
        super().__init__()
        self.lines = []

    def message(self, text):
        self.lines.append(text)


def test_a_run_killed_before_its_first_checkpoint_begins_anew_with_its_record(recorded, tmp_path):
    folder = tmp_path / "dynamic/inspect"
    folder.mkdir(parents=True)
    (folder / "steps.jsonl").write_text('{"step": 0, "loss": 9}\n')
    (tmp_path / "dynamic/log.csv").write_text(HEADER + "1,9.9,0.1,5.0,\n")
    plain = changed(replace(recorded, inspect=InspectConfig()), optimizer={"steps": 2}, run={"out": None})
    resumed = run(changed(recorded, optimizer={"steps": 2}, run={"resume": True}), "dynamic")
    assert curve(resumed) == curve(run(plain, "dynamic"))
    assert octavo.inspect.load(folder).scalars["loss"][0] == [0, 1]


def test_switches_and_phases_without_fp8(recorded, tmp_path):
    state = StateConfig(schedule="bf16-then-fp8@0.5")
    run(replace(recorded, state=state), "dynamic")
    record = octavo.inspect.load(tmp_path / "dynamic/inspect")
    assert record.steps == [4]
    assert [(step, kind) for step, kind, _ in record.events] == [(2, "switch")]


def test_without_fp8_layers_nothing_is_recorded(recorded, tmp_path):
    shown = Messages()
    run(changed(recorded, optimizer={"steps": 1}), "baseline", hooks=Hooks(progress=shown))
    assert "bf16 has no layers in FP8: nothing of it is recorded" in shown.lines
    assert not (tmp_path / "bf16/inspect").exists()


def diverging():
    """Hooks by which the loss of the fifth step becomes NaN."""

    def poison(model):
        model.blocks[0].register_forward_hook(lambda module, args, out: out * math.nan if len(seen) == 4 else out)

    seen = []
    return Hooks(on_model=poison, on_step=seen.append)


def test_a_run_that_diverges_says_where_and_keeps_its_checkpoint(recorded, tmp_path):
    says = r"dynamic diverged: the loss became nan in step 5.* an inf or a NaN in .* step 3 is kept in .*/dynamic.*--lr"
    with pytest.raises(DivergedError, match=says):
        run(recorded, "dynamic", hooks=diverging())
    ((_, kind, text),) = octavo.inspect.load(tmp_path / "dynamic/inspect").events
    assert kind == "fault" and "at step 4" in text
    assert len((tmp_path / "dynamic/log.csv").read_text().splitlines()) == 1 + 4
    assert RunFolder(tmp_path / "dynamic").load(None)["step"] == 3
    assert len(run(changed(recorded, run={"resume": True}), "dynamic").rows) == 6
    with pytest.raises(DivergedError) as caught:  # without a folder nothing is recorded, and the fault is found
        run(changed(recorded, run={"out": None}), "dynamic", hooks=diverging())
    says = r"dynamic diverged: the loss became nan in step 5; an inf .*; try a lower --lr"
    assert re.fullmatch(says, str(caught.value))


def test_a_run_that_diverges_says_too_what_failed_in_the_background(recorded, monkeypatch):
    monkeypatch.setattr(checkpoint, "_publish", lambda *args: (_ for _ in ()).throw(OSError(28, "Full")))
    config = changed(replace(recorded, inspect=InspectConfig()), ranks={"async_save": True})
    says = r"diverged: the loss became nan in step 5; cannot write .*Full.*is kept \(nothing yet\).*; try a lower --lr"
    with pytest.raises(DivergedError, match=says):
        run(config, "dynamic", hooks=diverging())


@pytest.mark.parametrize(("shard", "tensor_parallel"), [("fsdp", 1), *in_full(("ddp", 1), ("fsdp", 2))])
def test_ranks_record_together(shard, tensor_parallel, recorded, tmp_path, pool, monkeypatch):
    config = changed(recorded, ranks={"shard": shard, "tensor_parallel": tensor_parallel}, optimizer={"steps": 2})
    (losses, *_), *_ = pool.run(train_on, (2 * tensor_parallel,), config, "delayed")
    record = octavo.inspect.load(tmp_path / "delayed/inspect")
    assert record.steps == [0]
    assert record.scalars["loss"][1] == pytest.approx([loss for loss, _ in losses])
    assert np.isfinite(record.measures["amax"]).all() and (record.weights["changed"] > 0).all()
    if tensor_parallel > 1:  # which makes named splits layers of their own
        monkeypatch.setattr(loop, "build_model", lambda *options: octavo.nn.separate_splits(build_model(*options)))
    run(changed(recorded, optimizer={"steps": 2}, run={"out": tmp_path / "alone"}), "delayed")
    alone = octavo.inspect.load(tmp_path / "alone/delayed/inspect")
    assert record.rows == alone.rows
    inputs = [at for at, row in enumerate(alone.rows) if row.role == "input"]
    first, *others = inputs  # before the first nothing was rounded but to bf16; then ranks round by amaxes of their own
    amax, whole = record.measures["amax"][0], alone.measures["amax"][0]
    assert amax[first] == pytest.approx(whole[first], rel=2**-8)
    np.testing.assert_allclose(amax[others], whole[others], rtol=0.15)


def test_experts_are_recorded(recorded, tmp_path):
    run(changed(recorded, model={"experts": 4, "top_k": 2}, optimizer={"steps": 1}), "delayed")
    record = octavo.inspect.load(tmp_path / "delayed/inspect")
    assert record.experts.tokens.keys() == {f"blocks.0.mlp.experts.{part}" for part in ("gate_up", "down")}
    rows = 2 * recorded.data.batch * recorded.model.context
    assert all(tokens.sum() == rows for tokens in record.experts.tokens.values())
    assert "blocks.0.mlp.experts: 4 experts, " in table(record, diagnose(record), 10)


def at(config, folder, **changes):
    return replace(config, run=replace(config.run, out=folder, **changes))


def steps(config, count):
    return replace(config, optimizer=replace(config.optimizer, steps=count))


def test_it_learns_and_says_what_it_did(config):
    result = run(changed(config, model={"layers": 2}))
    assert result.name == "bf16" and result.steps == len(result.rows) == 20 and not result.interrupted
    assert result.losses[-1] < result.losses[0] - 1
    assert [step for step, _ in result.validations] == [5, 10, 15, 20]
    assert result.final_validation == result.validations[-1][1] < 4.5
    assert result.tokens_per_step == 64 and result.tokens_per_s > 0 and result.seconds_per_step > 0
    assert result.folder is None


IN_FP8 = {"moments": "fp8", "master": "split16", "weight_storage": "fp8"}
PHASES = {"schedule": "fp8-then-bf16@0.43-then-fp8@0.72"}
MUON = IN_FP8 | PHASES | {"update_in_backward": "8KB", "algorithm": "muon"}


@pytest.mark.parametrize(
    ("recipe", "state", "experts"),
    [
        ("delayed", IN_FP8 | {"update_in_backward": "1MB"}, 4),
        ("dynamic", MUON, 0),
        *in_full(("bf16", {}, 0), ("delayed", {"moments": "bf16", "master": "none"} | PHASES, 0), ("mx", {}, 4)),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_run_in_one_piece(config, recipe, state, experts, tmp_path):
    plain = changed(config, model={"experts": experts}, optimizer={"steps": 7 if "schedule" in state else 4})
    config = changed(plain, state=state)
    whole = run(at(config, tmp_path / "whole"), recipe)
    parts = at(config, tmp_path / "parts")
    for stop in (2, 4, 6) if "schedule" in state else (2,):  # in each phase, and gone on with from there
        part = run(parts, recipe, hooks=stop_after(2))
        assert part.interrupted and len(part.rows) == stop and math.isnan(part.final_validation)
        parts = changed(parts, run={"resume": True})
    for _ in range(2):  # to its end; and read again
        resumed = run(parts, recipe)
        assert not resumed.interrupted and curve(resumed) == curve(whole) and resumed.switches == whole.switches
    assert rows(tmp_path / "parts" / recipe) == rows(tmp_path / "whole" / recipe)
    if "schedule" in state:
        assert [switch.step for switch in whole.switches] == [0, 3, 5]
    elif state:
        exact = run(plain, recipe)
        assert whole.final_validation == pytest.approx(exact.final_validation, rel=0.05)
        assert curve(whole) != curve(exact)
    if experts:
        assert all(mixture.bias.any() for mixture in trained_model(tmp_path / "parts" / recipe).mixtures)
        with pytest.raises(RunCheckpointError, match="has experts 4, not 0"):
            run(changed(parts, model={"experts": 0}), recipe)


def test_nothing_is_lost_to_a_second_run_in_the_same_folder(config, tmp_path):
    config = steps(config, 2)
    run(at(config, tmp_path))
    before = (tmp_path / "bf16" / "log.csv").read_bytes()
    with pytest.raises(RunCheckpointError, match="already holds a run"):
        run(at(config, tmp_path))
    with pytest.raises(RunCheckpointError, match="has steps 2, not 30"):
        run(at(steps(config, 30), tmp_path, resume=True))
    config.data.data.write_text(config.data.data.read_text() + "more")
    with pytest.raises(RunCheckpointError, match="has text"):
        run(at(config, tmp_path, resume=True))
    assert (tmp_path / "bf16" / "log.csv").read_bytes() == before


def test_recipes_start_from_the_same_weights_and_see_the_same_bytes(config):
    bf16, dynamic, again = compare(steps(config, 4), ["bf16", "dynamic", "high_precision", "bf16"])
    assert bf16.losses == again.losses  # high_precision is bf16's arithmetic
    assert bf16.losses[0] == pytest.approx(dynamic.losses[0], rel=0.01)
    assert bf16.losses != dynamic.losses
    assert bf16.losses[-1] == pytest.approx(dynamic.losses[-1], rel=0.02)


def test_a_recipe_by_names(config, tmp_path):
    models, config = [], changed(config, model={"layers": 2})
    recipe = octavo.RecipeMap(octavo.recipes.dynamic(), {"blocks.0.*": None, "*.fc2": {"grad_weight": None}})
    result = run(at(steps(config, 3), tmp_path), recipe, hooks=Hooks(on_model=models.append))
    assert result.name == "dynamic" and len(result.rows) == 3
    first, second = models[0].blocks
    assert first.mlp.fc2.recipe.is_high_precision and second.attention.out.recipe == octavo.recipes.dynamic()
    assert second.mlp.fc2.recipe.grad_weight is None and second.mlp.fc2.recipe.output is not None
    with pytest.raises(RunCheckpointError, match="has recipe"):
        run(at(steps(config, 3), tmp_path, resume=True), octavo.recipes.dynamic())


def test_comparison_checks_all_before_it_trains(config, tmp_path):
    def refuse(model):
        raise AssertionError("it trains")

    with pytest.raises(ValueError, match="unknown recipe 'fp9'"):
        compare(config, ["bf16", "fp9"], hooks=Hooks(on_model=refuse))
    run(at(config, tmp_path), "dynamic", hooks=stop_after(3))
    with pytest.raises(RunCheckpointError, match=r"dynamic already holds"):
        compare(at(config, tmp_path), ["bf16", "dynamic"], hooks=Hooks(on_model=refuse))
    (tmp_path / "dynamic/checkpoint/save-00000001/octavo.pt").write_bytes(b"junk")
    with pytest.raises(RunCheckpointError, match="damaged"):
        compare(at(config, tmp_path, resume=True), ["bf16", "dynamic"], hooks=Hooks(on_model=refuse))
    with pytest.raises(TrainError, match="too small"):
        too_long = replace(config, model=ModelConfig(32, 2, 2, context=10**5))
        compare(at(too_long, tmp_path / "new"), ["bf16"], hooks=Hooks(on_model=refuse))
    assert not (tmp_path / "new").exists()


def test_a_comparisons_folders_are_its_own_while_it_trains(config, tmp_path):
    config, refused = at(steps(config, 1), tmp_path, resume=True), []

    def another(row):
        for name in ("dynamic", "mx"):
            with pytest.raises(RunCheckpointError, match="another run trains in") as fault:
                run(config, name)
            refused.append(fault.value)

    compare(config, ["dynamic", "mx"], hooks=Hooks(on_step=another))
    assert len(refused) == 4 and run(config, "mx").rows


def test_on_an_accelerator_losses_are_read_every_few_steps(config, monkeypatch):
    config = changed(config, run={"eval_every": 0}, optimizer={"steps": 13})
    expected, reads, read = run(config), [], StepReader.read
    monkeypatch.setattr(loop, "StepReader", lambda config, rows, on_accelerator: StepReader(config, rows, True))
    monkeypatch.setattr(StepReader, "read", lambda self: reads.append(len(self._pending)) or read(self))
    assert curve(run(config)) == curve(expected) and reads == [10, 3]


def test_layers_of_each_split_are_made_again_where_a_run_goes_on(config, tmp_path, monkeypatch):
    """Tensor parallelism makes them; the checkpoint says so, also to one process."""
    config = at(steps(config, 2), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "build_model", lambda *options: octavo.nn.separate_splits(build_model(*options)))
        whole = run(at(config, None), "delayed")
        assert run(config, "delayed", hooks=stop_after(1)).interrupted
    models = []
    resumed = run(changed(config, run={"resume": True}), "delayed", hooks=Hooks(on_model=models.append))
    assert curve(resumed) == curve(whole)
    tokens, model = torch.randint(0, 256, (2, 16)), trained_model(tmp_path)
    assert model.state_dict().keys() == models[0].state_dict().keys()
    assert isinstance(model.blocks[0].attention.qkv.linear, SeparateSplits)
    assert torch.equal(model(tokens), models[0].eval()(tokens))


def test_gradients_that_are_not_finite_stop_the_run_too(config, tmp_path):
    def poison(model):
        model.blocks[0].attention.out.weight.register_hook(lambda gradient: gradient * math.inf)

    with pytest.raises(DivergedError, match=r"norm of the gradients became (nan|inf) in step 1"):
        run(at(config, tmp_path, checkpoint_every=1), hooks=Hooks(on_model=poison))
    assert not (tmp_path / "bf16" / "checkpoint").exists()


@pytest.mark.parametrize("fast", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_the_devices_dtype_names_the_baseline_and_is_said_first(config, fast, monkeypatch, tmp_path):
    for module in ("trainer", "loop"):
        monkeypatch.setattr(f"octavo.train.{module}.fast_dtype", lambda device: fast)
    config = replace(config, run=replace(config.run, dtype="auto"))
    config, shown, dtypes = at(steps(config, 5), tmp_path), Messages(), set()

    def see(model):
        model.head.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))

    results = compare(config, ["baseline", "dynamic"], hooks=Hooks(on_model=see, progress=shown))
    name, dtype = ("bf16", "bfloat16") if fast == torch.bfloat16 else ("float32", "float32")
    assert dtypes == {fast} and {result.dtype for result in results} == {dtype}
    assert [result.name for result in results] == [name, "dynamic"] and (tmp_path / name / "log.csv").exists()
    assert shown.lines[0].startswith(f"{name}, dynamic: 5 steps each on cpu; what is not FP8 is {dtype} (")
    assert ("no instructions for bfloat16" in shown.lines[0]) == (fast == torch.float32)
    assert [line.rpartition(" for ")[2] for line in shown.lines if line.startswith("about ")] == ["2 runs", "this run"]
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    shown.lines.clear()
    chosen = replace(config, run=replace(config.run, dtype=other, out=None))
    assert run(steps(chosen, 1), hooks=Hooks(progress=shown)).dtype == other in shown.lines[0]
    with pytest.raises(RunCheckpointError, match=f"has dtype {dtype}, not {other}"):
        run(at(chosen, tmp_path, resume=True), "dynamic")


@pytest.mark.parametrize(
    ("recipe", "state", "stored"),
    [
        ("bf16", StateConfig(), False),
        ("delayed", StateConfig("fp8", "split16", "fp8"), True),
        ("delayed", StateConfig("fp8", "split16", "fp8", schedule="fp8-then-bf16@0.5"), False),
    ],
)
def test_it_is_the_model_that_was_trained_stored_as_at_the_end(config, recipe, state, stored, tmp_path):
    models, config = [], replace(at(steps(config, 2), tmp_path), state=state)
    run(config, recipe, hooks=Hooks(on_model=models.append))
    model, tokens = trained_model(tmp_path), torch.randint(0, 256, (2, 16))
    assert not model.training and isinstance(model.blocks[0].mlp.fc2.weight, StoredWeight) == stored
    octavo.set_recipe(model, models[0].blocks[0].mlp.fc2.recipe)
    assert torch.equal(model(tokens), models[0].eval()(tokens))


def test_what_is_no_run(config, tmp_path):
    models, out = [], tmp_path / "runs"
    compare(at(steps(config, 1), out), ["bf16", "dynamic"], hooks=Hooks(on_model=models.append))
    for path, says in ((tmp_path / "no", "does not exist"), (tmp_path, "no run"), (out, "holds 2 runs: choose one of")):
        with pytest.raises(RunCheckpointError, match=says):
            trained_model(path)
    content = load_extra(out / "bf16/checkpoint")
    others = {"a recipe of its own": {"recipe": "Recipe(...)"}, "cannot read the check": {"width": 64}}
    for says, identity in others.items():
        extra = content | {"identity": content["identity"] | identity}
        save_checkpoint(tmp_path / "checkpoint", models[0], extra=extra)
        with pytest.raises(RunCheckpointError, match=says):
            trained_model(tmp_path)
    (last,) = checkpoints_in(tmp_path / "checkpoint")
    (last / ".metadata").write_text("damaged")
    with pytest.raises(RunCheckpointError, match="damaged"):
        trained_model(tmp_path)
