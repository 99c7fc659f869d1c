"""OctavoCallback in transformers' Trainer: eight architectures train as in bf16, save, and resume bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.nn.checkpointing import region_counts
from octavo.schedule import Phase
from tests.support.helpers import assert_equal, every_layer
from tests.support.schedule_situations import PROMOTING, SWITCHING
from tests.support.torchrun import let_accelerate_shard_on_cpus, on_ranks

transformers = pytest.importorskip("transformers")

from octavo.integrations.transformers import OctavoCallback, _read_hub_names  # noqa: E402
from tests.support import tiny_models  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # for another name

STEPS, SAVED = 4, 2  # a run's, and those done in the checkpoint that is resumed

HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "accumulating": {"gradient_accumulation_steps": 2},
    "evaluating": {"eval_strategy": "steps", "eval_steps": 1},
}
LOW = Phase(recipes.delayed(), moments="fp8", master="split24", weight_storage="fp8")
HIGH = Phase(recipes.high_precision(), moments="fp32", master="split32", weight_storage=None)
SCHEDULES = {
    "recipes": SWITCHING,
    "moments and masters": PROMOTING,
    "out of FP8 weights": [LOW, replace(HIGH, from_step=1)],
    "out of FP8 weights and back": [LOW, replace(HIGH, from_step=1), replace(LOW, from_step=3)],
    "into FP8 weights": [replace(HIGH, recipe=recipes.dynamic()), replace(LOW, from_step=1)],
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def fp8(recipe: Any = None, **arguments: Any) -> OctavoCallback:
    """A callback that takes layers of any size."""
    return OctavoCallback(recipe, select=every_layer, **arguments)


def trainer_of(folder: Path, kind: str, callbacks: list[Any], model: nn.Module | None = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1, "bf16": True}
    arguments |= {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    optimizer, kind_of_optimizer = (changes.pop(name, None) for name in ("optimizer", "optimizer_cls_and_kwargs"))
    arguments |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, **changes}
    trainer = transformers.Trainer(
        tiny_models.build(kind) if model is None else model,
        transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=tiny_models.data(kind),
        eval_dataset=tiny_models.data(kind, 4),
        callbacks=callbacks,
        optimizers=(optimizer, None),
        optimizer_cls_and_kwargs=kind_of_optimizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class Trained(NamedTuple):
    model: nn.Module
    losses: list[float]


def trained(trainer: Any, resume: bool = False) -> Trained:
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir, f"checkpoint-{SAVED}")) if resume else None)
    return Trained(trainer.model, [row["loss"] for row in trainer.state.log_history if "loss" in row])


def assert_alike(one: Trained, other: Trained) -> None:
    """Check losses, weights and delayed state bit for bit."""
    assert one.losses == other.losses
    assert_equal(*(net.state_dict() | octavo.nn.delayed_state_dict(net) for net in (one.model, other.model)))


def cases() -> list[Any]:
    quick = "llama", "plain"
    every = [(kind, how) for kind in tiny_models.MODELS for how in HOW]
    return [pytest.param(*case, marks=[] if case == quick else pytest.mark.full) for case in every]


@pytest.mark.parametrize(("kind", "how"), cases())
def test_it_trains_as_bf16_does_and_resumes_bit_for_bit(kind: str, how: str, tmp_path: Path) -> None:
    bf16 = trained(trainer_of(tmp_path / "bf16", kind, [], save_strategy="no", **HOW[how]))
    ours = trained(trainer_of(tmp_path, kind, [fp8(recipes.delayed())], **HOW[how]))
    assert ours.losses == pytest.approx(bf16.losses, rel=0.02)
    assert ours.losses != bf16.losses
    assert_alike(trained(trainer_of(tmp_path, kind, [fp8(recipes.delayed())], **HOW[how]), resume=True), ours)
    if how != "plain":
        return
    with pytest.raises(ValueError, match="in delayed, this model's in blockwise"):
        trained(trainer_of(tmp_path, kind, [fp8(recipes.blockwise())]), resume=True)
    with pytest.raises(ValueError, match="saved with a schedule and there is none here, or the other way round"):
        trained(trainer_of(tmp_path, kind, [fp8(schedule=SWITCHING)]), resume=True)
    forget(tmp_path)
    with pytest.raises(ValueError, match="holds no schedule"):
        trained(trainer_of(tmp_path, kind, [fp8(schedule=SWITCHING)]), resume=True)


def test_inputs_of_checkpointed_layers_are_kept_in_fp8(tmp_path: Path) -> None:
    losses: list[list[float]] = []
    changes: dict[str, Any] = {"max_steps": 2, "save_strategy": "no"}
    for in_fp8 in (False, True):
        callback = fp8(recipes.dynamic(), checkpoint_in_fp8=in_fp8)
        with region_counts() as bytes_of_layers:
            losses.append(trained(trainer_of(tmp_path, "llama", [callback], **changes, **HOW["not reentrant"])).losses)
        assert ("" in bytes_of_layers) is in_fp8
    assert losses[0][0] == losses[1][0] and losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] != losses[1]
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        trained(trainer_of(tmp_path, "llama", [callback], **changes))


BACK = SCHEDULES["out of FP8 weights and back"]


@pytest.mark.parametrize(
    ("phases", "kind"),
    [
        *(pytest.param(p, "llama", id=n, marks=[] if p is BACK else pytest.mark.full) for n, p in SCHEDULES.items()),
        pytest.param(BACK, "mixtral", id="of experts", marks=pytest.mark.full),
    ],
)
def test_a_schedule_switches_and_resumes(phases: list[Phase], kind: str, tmp_path: Path) -> None:
    def begun() -> tuple[OctavoCallback, Any]:
        model, callback = tiny_models.build(kind).bfloat16(), fp8(schedule=phases)
        changes: dict[str, Any] = {}
        if kind == "mixtral":
            experts = {"params": [p for p in model.parameters() if p.ndim == 3], "algorithm": "muon"}
            others = {"params": [p for p in model.parameters() if p.ndim != 3]}
            changes["optimizer"] = octavo.optim.Muon([experts, others], lr=1e-3, adamw={"lr": 1e-3})
        elif phases is not SWITCHING:
            changes["optimizer"] = octavo.optim.AdamW(model.parameters(), lr=1e-3)
        return callback, trainer_of(tmp_path, kind, [callback], model, **changes)

    whole, trainer = begun()
    ours = trained(trainer)
    resumed, trainer = begun()
    assert_alike(trained(trainer, resume=True), ours)
    assert whole.schedule is not None and resumed.schedule is not None
    assert resumed.schedule.switches == whole.schedule.switches
    assert [switch.step for switch in whole.schedule.switches] == [0, *(phase.from_step for phase in phases[1:])]


class Interrupts(transformers.TrainerCallback):
    """Ctrl-C between two micro-batches."""

    def on_substep_end(self, *arguments: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_training_leaves_no_hook(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-3, gradient_storage="fp8")
    changes = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "save_strategy": "no", "max_steps": 1}
    callbacks = [fp8(recipes.dynamic()), interrupts := Interrupts()]
    trainer = trainer_of(tmp_path, "llama", callbacks, model, optimizer=optimizer, **changes)
    hooks = len(model._forward_pre_hooks)
    for used in (lambda: model(**next(iter(trainer.get_train_dataloader()))).loss.backward(), trainer.train):
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert len(model._forward_pre_hooks) == hooks + 1 and optimizer._gradients.hooks.accumulating
        trainer.remove_callback(interrupts)
        used()
        assert len(model._forward_pre_hooks) == hooks and not optimizer._gradients.hooks.accumulating
        trainer.add_callback(interrupts)


@pytest.mark.filterwarnings("ignore:the checkpoint was saved without OctavoCallback")
def test_an_interrupted_record_is_closed_by_the_next_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters())
    callback = OctavoCallback(recipes.dynamic(), inspect=tmp_path / "record", inspect_every=1)
    arguments = SimpleNamespace(max_grad_norm=0, gradient_accumulation_steps=1)
    state = SimpleNamespace(stateful_callbacks={}, global_step=0, num_input_tokens_seen=0)
    callback.on_init_end(arguments, state, None, model=model, optimizer=optimizer)
    hooks = []
    for _ in range(2):  # the first is interrupted: on_train_end is not called
        callback.on_train_begin(arguments, state, None, model=model, optimizer=optimizer)
        hooks.append((len(optimizer._optimizer_step_pre_hooks), len(model._forward_pre_hooks)))
        callback.on_step_begin(arguments, state, None)
        model(torch.ones(4, 512)).sum().backward()
        optimizer.step()
        callback.on_step_end(arguments, state, None)
        state.global_step = 1
    callback.on_train_end(arguments, state, None)
    assert hooks[0] == hooks[1]
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert octavo.inspect.load(tmp_path / "record").steps == [1]  # the first training's was never logged


@pytest.mark.full
def test_training_again_begins_the_schedule_anew(tmp_path: Path) -> None:
    """Training again, by the same trainer or a new one of a moved model, begins the schedule anew."""
    model = tiny_models.build("llama")
    for _ in range(2):
        callback = fp8(schedule=SWITCHING[:2])
        trainer = trainer_of(tmp_path, "llama", [callback], model, save_strategy="no")
        for _ in range(2):
            trainer.train()
            assert callback.schedule is not None
            assert [switch.step for switch in callback.schedule.switches] == [0, 1]


def forget(folder: Path) -> None:
    """Take octavo's part from a checkpoint."""
    path = folder / f"checkpoint-{SAVED}" / "trainer_state.json"
    content = json.loads(path.read_text())
    del content["stateful_callbacks"]["octavo"]
    path.write_text(json.dumps(content))


def test_it_records_what_casts_do(tmp_path: Path) -> None:
    def callback() -> OctavoCallback:
        recording: dict[str, Any] = {"inspect": tmp_path / "record", "inspect_every": 1}
        return OctavoCallback(recipes.delayed(), select=lambda module, name: name.endswith("down_proj"), **recording)

    ours = trained(trainer_of(tmp_path, "llama", [callback()]))
    record = octavo.inspect.load(tmp_path / "record")
    assert record.steps == [*range(STEPS)]
    assert record.scalars["loss"][1] == pytest.approx(ours.losses)
    trained(trainer_of(tmp_path, "llama", [callback()]), resume=True)
    again = octavo.inspect.load(tmp_path / "record")
    assert again.steps == record.steps
    measures = [{name: values.tolist() for name, values in one.measures.items()} for one in (again, record)]
    assert measures[0] == measures[1]
    with pytest.raises(ValueError, match="holds a record"):
        trained(trainer_of(tmp_path, "llama", [callback()]))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_refused_before_it_trains(tmp_path: Path) -> None:
    """Names that are nobody's are torch's to report."""
    with pytest.raises(ValueError, match="need the optimizer before training begins"):
        trainer_of(tmp_path, "llama", [fp8(schedule=PROMOTING)])
    late = trainer_of(tmp_path, "llama", [], model := tiny_models.build("llama"))
    late.add_callback(fp8(recipes.delayed()))
    with pytest.raises(ValueError, match=r"Trainer\(callbacks=\[...\]\)"):
        late.train()
    by_tokens = fp8(schedule=[Phase(recipes.delayed()), Phase(recipes.dynamic(), from_tokens=9)])
    with pytest.raises(ValueError, match=r"from_tokens=9.*include_num_input_tokens_seen='all'"):
        trainer_of(tmp_path, "llama", [by_tokens]).train()
    octavo.convert(model, recipes.dynamic(), select=every_layer)
    with pytest.raises(ValueError, match="was converted with 'dynamic' already, not 'delayed'"):
        trainer_of(tmp_path, "llama", [fp8(recipes.delayed())], model)
    trained(trainer_of(tmp_path, "llama", [OctavoCallback()], model, max_steps=1))
    octavo.optim.update_in_backward(optimizer := octavo.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="clips after backward"):
        trainer_of(tmp_path, "llama", [OctavoCallback()], model, optimizer=optimizer).train()
    strange = {"strange": torch.zeros(3)}
    assert model.load_state_dict(strange, strict=False).unexpected_keys == ["strange"]
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(strange)


def test_a_model_that_is_not_of_transformers_and_what_callbacks_write(tmp_path: Path) -> None:
    """Of several ranks one writes, and in a search for hyperparameters none."""
    callback, model = fp8(recipes.delayed()), nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    callback.on_init_end(None, None, None, model=model, optimizer=optimizer)
    callback.on_init_end(None, None, None, model=model, optimizer=optimizer)
    assert isinstance(model[0], octavo.nn.Linear) and callback._state is not None
    state = transformers.TrainerState(global_step=3)
    arguments = SimpleNamespace(max_grad_norm=0.0, gradient_accumulation_steps=1, output_dir=tmp_path)
    arguments.should_save = False
    with pytest.warns(UserWarning, match="saved without OctavoCallback: delayed scaling begins anew"):
        callback.on_train_begin(arguments, state, None, model=model, optimizer=optimizer)
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    callback.on_save(arguments, state, None)
    arguments.should_save, state.is_hyper_param_search = True, True
    callback.on_save(arguments, state, None)
    assert not list(folder.iterdir())
    state.is_hyper_param_search = False
    callback.on_save(arguments, state, None)
    written = json.loads((folder / "trainer_state.json").read_text())
    assert list(written["stateful_callbacks"]) == ["octavo"] and not state.stateful_callbacks
    state.stateful_callbacks = written["stateful_callbacks"]
    callback.on_train_begin(arguments, state, None, model=model, optimizer=optimizer)


def test_weights_of_the_hubs_names_are_loaded(tmp_path: Path) -> None:
    """Each expert's matrices apart, as save_pretrained writes them."""
    files = pytest.importorskip("safetensors.torch")
    model, other = (octavo.convert(tiny_models.build("mixtral"), recipes.delayed(), every_layer) for _ in range(2))
    octavo.restore(model).save_pretrained(tmp_path)
    state = files.load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.register_load_state_dict_pre_hook(_read_hub_names)
    assert state.keys() - other.state_dict().keys()  # names that the model does not have
    other.load_state_dict(dict(state), strict=False)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    del state[min(state.keys() - expected.keys())]
    with pytest.raises(ValueError, match="names are the hub's, and not all that a weight is made of is in one file"):
        other.load_state_dict(state, strict=False)


@pytest.mark.full
def test_phases_by_tokens(tmp_path: Path) -> None:
    tokens = 4 * tiny_models.POSITIONS  # of a step
    callback = fp8(schedule=[Phase(recipes.delayed()), Phase(recipes.dynamic(), from_tokens=2 * tokens)])
    trained(trainer_of(tmp_path, "llama", [callback], include_num_input_tokens_seen="all"))
    assert callback.schedule is not None
    assert callback.schedule.tokens == STEPS * tokens
    assert [switch.step for switch in callback.schedule.switches] == [0, 2]


@pytest.mark.full
def test_a_checkpoint_in_several_files_of_hub_names_is_refused(tmp_path: Path) -> None:
    trained(trainer_of(tmp_path, "mixtral", [fp8(recipes.delayed())]))
    folder = tmp_path / f"checkpoint-{SAVED}"
    (folder / "model.safetensors").unlink()
    tiny_models.build("mixtral").save_pretrained(folder, max_shard_size="100KB")
    with pytest.raises(ValueError, match="is in one file"):
        trained(trainer_of(tmp_path, "mixtral", [fp8(recipes.delayed())]), resume=True)


# --- compiled, and on ranks -------------------------------------------------------------------------------------------


def on_two(folder: Path, how: str) -> list[Any]:
    """Return (losses, the resumed run's, sums of weights, all delayed scales) on this rank."""
    changes: dict[str, Any] = {"ddp_backend": "gloo"}
    if how != "ddp":
        let_accelerate_shard_on_cpus()
        kind = "SHARDED_STATE_DICT" if how == "fsdp2" else "FULL_STATE_DICT"
        config = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": kind}
        changes |= {"fsdp": True, "fsdp_config": config}
    if how == "fsdp2, one file":
        changes["optimizer_cls_and_kwargs"] = (octavo.optim.AdamW, {"lr": 1e-3})
    outcomes = []
    for resume in (False, True):
        model, losses = trained(trainer_of(folder, "llama", [fp8(schedule=SWITCHING)], **changes), resume)
        weights = [getattr(w, "full_tensor", lambda w=w: w)().double().sum().item() for w in model.parameters()]
        scales = {name: value.tolist() for name, value in octavo.nn.delayed_state_dict(model).items()}
        outcomes.append([losses, weights, scales, str(octavo.summary(model)).count("gathered in FP8")])
    return outcomes


@pytest.mark.full
@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp2, one file"])
def test_on_ranks(how: str, tmp_path: Path) -> None:
    ranks = on_ranks(on_two, tmp_path, how)
    for whole, resumed in ranks:
        assert len(whole[0]) == STEPS
        assert resumed == whole
        assert whole[3] == (0 if how == "ddp" else 15)
    (first, _), (second, _) = ranks
    assert first[:2] == second[:2]
    assert first[2] != second[2]  # each rank its own
