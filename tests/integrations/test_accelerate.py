"""TrainingState in accelerate: prepare, clipping, loss scaling, accumulation, FSDP2; save_state and load_state."""

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import recipes
from octavo.integrations.accelerate import TrainingState, check_clip, convert_once, follow_accumulation, recipes_of
from octavo.schedule import Phase, PrecisionSchedule
from octavo.weights.stored import StoredWeight
from tests.support.helpers import assert_equal, every_layer
from tests.support.schedule_situations import PROMOTING, SWITCHING
from tests.support.torchrun import let_accelerate_shard_on_cpus, on_ranks

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

WIDTH, BATCH, STEPS, SAVED = 64, 8, 5, 2
WIDENING = [
    Phase(recipes.delayed(), moments="fp8", master="split24", weight_storage="fp8"),
    Phase(recipes.delayed(), moments="fp32", master="split32", weight_storage=None, from_step=1),
]


@pytest.fixture(autouse=True)
def _new_state() -> Iterator[None]:
    begin_anew()  # another file's tests may have left a state
    yield
    begin_anew()


def begin_anew() -> None:
    """accelerate keeps its state in classes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


class Run:
    """A program with accelerate: what it prepares, and its steps from the one that a checkpoint was saved after."""

    def __init__(
        self,
        mixed_precision: str = "bf16",
        *,
        accumulate: int = 1,
        optimizer: dict[str, Any] | None = None,
        phases: list[Phase] | None = None,
        dtype: torch.dtype = torch.float32,
        weight_storage: Any = None,
        plugin: Any = None,
    ) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulate, fsdp_plugin=plugin
        )
        if mixed_precision == "fp16":  # which accelerate has for accelerators only
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plain = net().to(dtype)
        self.plain = octavo.convert(plain, recipes.delayed(), select=every_layer, weight_storage=weight_storage)
        kind = torch.optim.AdamW if optimizer is None else octavo.optim.AdamW
        own_optimizer: Any = kind(self.plain.parameters(), lr=1e-2, **(optimizer or {}))
        self.schedule = None if phases is None else PrecisionSchedule(self.plain, own_optimizer, phases)
        scheduler = torch.optim.lr_scheduler.LinearLR(own_optimizer, total_iters=20)
        inputs = torch.randn(8 * BATCH, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(3))
        loader = torch.utils.data.DataLoader(inputs, batch_size=BATCH)  # type: ignore[arg-type]
        prepared = self.accelerator.prepare(self.plain, own_optimizer, loader, scheduler)
        self.model, self.optimizer, loader, self.scheduler = prepared
        self.accelerator.register_for_checkpointing(TrainingState(self.plain, self.schedule))
        self.batches, self.accumulate, self.max_norm = list(loader), accumulate, 0.05
        self.done, self.losses, self.norms = 0, list[float](), list[float]()

    def step(self) -> None:
        for micro in range(self.accumulate):
            with self.accelerator.accumulate(self.model):
                x = self.batches[(self.done * self.accumulate + micro) % len(self.batches)]
                loss = (self.model(x).float() - x.float()).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        self.done += 1
        self.losses.append(loss.item())

    def state(self) -> dict[str, Tensor]:
        weights = {name: getattr(w, "full_tensor", lambda w=w: w)() for name, w in self.plain.state_dict().items()}
        return {**weights, **octavo.nn.delayed_state_dict(self.plain)}


def whole(folder: Path, **changes: Any) -> Run:
    """A run that leaves a checkpoint on its way."""
    run = Run(**changes)
    for _ in range(STEPS):
        run.step()
        if run.done == SAVED:
            run.accelerator.save_state(str(folder))
    begin_anew()
    return run


def resumed(folder: Path, **changes: Any) -> Run:
    run = Run(**changes)
    if changes.get("plugin") is not None and run.schedule is not None:  # it loads by form
        run.schedule.load_state_dict(torch.load(folder / "custom_checkpoint_0.pkl")["schedule"])
    run.accelerator.load_state(str(folder))
    run.done = SAVED
    while run.done < STEPS:
        run.step()
    return run


PURE: dict[str, Any] = {"optimizer": {"master": "split24"}, "mixed_precision": "no", "dtype": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"mixed_precision": "fp16"},
    "accumulating": {"accumulate": 2},
    "octavo.optim": {"optimizer": {}},
    "octavo.optim, fp16": {"optimizer": {}, "mixed_precision": "fp16"},
    "bf16 weights": PURE,
    "FP8 weights": {**PURE, "weight_storage": "fp8"},
    "FP8 weights of bf16": {"optimizer": {}, "dtype": torch.bfloat16, "weight_storage": "fp8"},  # made float32 by FSDP2
    "gradients in FP8": {"optimizer": {"gradient_storage": "fp8"}},
    "schedule": {"phases": SWITCHING},
    "moments and masters": {"phases": PROMOTING, **PURE},
    "out of FP8 weights": {"phases": WIDENING, **PURE},
}
QUICK = ("octavo.optim", "schedule")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.full) for c in CASES])
def test_it_trains_saves_and_resumes_bit_for_bit(case: str, tmp_path: Path) -> None:
    ours = whole(tmp_path, **CASES[case])
    assert all(norm > 0.05 for norm in ours.norms)  # so that clipping changes something
    resumed_run = resumed(tmp_path, **CASES[case])
    assert resumed_run.losses == ours.losses[SAVED:]
    assert_equal(resumed_run.state(), ours.state())
    if resumed_run.schedule is not None and ours.schedule is not None:
        assert resumed_run.schedule.switches == ours.schedule.switches
    if case == "octavo.optim":  # without what octavo keeps a resumed run differs
        run = Run(**CASES[case])
        run.accelerator._custom_objects.clear()
        (tmp_path / "custom_checkpoint_0.pkl").unlink()
        run.accelerator.load_state(str(tmp_path))
        run.done = SAVED
        run.step()
        assert run.losses[0] != ours.losses[SAVED]


# --- TrainingState alone ----------------------------------------------------------------------------------------------


def delayed_net() -> nn.Module:
    model = octavo.convert(net(), recipes.delayed(), select=every_layer)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    model.zero_grad()
    return model


def test_wrapped_models_have_the_plain_names() -> None:
    model = delayed_net()
    wrapped = nn.Sequential(*map(checkpoint_wrapper, model))
    plain, state = TrainingState(model).state_dict(), TrainingState(wrapped).state_dict()
    assert plain["recipes"] == state["recipes"]
    assert plain["delayed"]["shapes"] == state["delayed"]["shapes"]
    other = octavo.convert(net(), recipes.delayed(), select=every_layer)
    TrainingState(other).load_state_dict(state)
    assert_equal(octavo.nn.delayed_state_dict(other), octavo.nn.delayed_state_dict(model))


def test_of_another_recipe_model_or_schedule() -> None:
    state = TrainingState(delayed_net()).state_dict()
    other = octavo.convert(net(), recipes.blockwise(), select=every_layer)
    with pytest.raises(ValueError, match=r"layer '0.linear' computes in delayed, this model's in blockwise"):
        TrainingState(other).load_state_dict(state)
    part = octavo.convert(net(), recipes.delayed(), select=lambda module, name: name != "1.linear")
    with pytest.raises(ValueError, match=r"layer '1.linear' computes in delayed, this model's in no recipe"):
        TrainingState(part).load_state_dict(state)
    model = delayed_net()
    schedule = PrecisionSchedule(model, torch.optim.SGD(model.parameters(), 0.1), SWITCHING)
    with pytest.raises(ValueError, match="the other way round"):
        TrainingState(model, schedule).load_state_dict(state)
    with pytest.raises(ValueError, match="holds no octavo module"):
        TrainingState(net())
    with pytest.raises(ValueError, match=r"no state that TrainingState\.state_dict returned: it has no 'delayed'"):
        TrainingState(model).load_state_dict({})


def test_a_recipe_of_another_name_is_the_same() -> None:
    state = TrainingState(octavo.convert(net(), recipes.delayed(), select=every_layer)).state_dict()
    renamed = replace(recipes.delayed(), name="8: bits")
    other = TrainingState(octavo.convert(net(), renamed, select=every_layer))
    other.load_state_dict(state)
    TrainingState(octavo.convert(net(), recipes.delayed(), select=every_layer)).load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="computes in 8: bits, this model's in rowwise"):
        TrainingState(octavo.convert(net(), recipes.rowwise(), select=every_layer)).load_state_dict(other.state_dict())


def test_a_state_of_another_recipe_leaves_the_schedule_as_it_was() -> None:
    def begun(select: Any) -> TrainingState:
        model = octavo.convert(net(), recipes.delayed(), select=select)
        return TrainingState(model, PrecisionSchedule(model, torch.optim.SGD(model.parameters(), 0.1), SWITCHING))

    saved, other = begun(every_layer), begun(lambda module, name: name != "1.linear")
    for _ in range(SWITCHING[1].from_step or 0):
        saved.schedule.step()  # type: ignore[union-attr]
    assert other.schedule is not None
    before = other.schedule.state_dict()
    with pytest.raises(ValueError, match=r"layer '1.linear' computes in"):
        other.load_state_dict(saved.state_dict())
    assert other.schedule.state_dict() == before and other.model[0].linear.recipe == recipes.delayed()  # type: ignore[union-attr]


def test_a_state_that_is_removed_leaves_no_hooks() -> None:
    model = delayed_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = PrecisionSchedule(model, optimizer, SWITCHING)
    for _ in range(3):
        TrainingState(model, schedule).remove()
    assert not model._load_state_dict_pre_hooks and not optimizer._optimizer_state_dict_post_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_a_phase_of_another_form_comes_before_the_optimizer() -> None:
    def begun(phases: list[Phase], **options: Any) -> TrainingState:
        model = octavo.convert(net().bfloat16(), recipes.delayed(), select=every_layer)
        optimizer = octavo.optim.AdamW(model.parameters(), **options)
        return TrainingState(model, PrecisionSchedule(model, optimizer, phases))

    def step(state: TrainingState, switch: bool = True) -> None:
        assert state.schedule is not None
        state.model(torch.randn(BATCH, WIDTH, dtype=torch.bfloat16)).sum().backward()
        state.schedule.optimizer.step()
        if switch:
            state.schedule.step()

    saved, late = begun(PROMOTING), begun(PROMOTING)
    step(saved)
    begun(PROMOTING).load_state_dict(saved.state_dict())
    step(late, switch=False)
    with pytest.raises(ValueError, match="keeps optimizer otherwise"):
        late.load_state_dict(saved.state_dict())
    storing = [PROMOTING[0], Phase(recipes.delayed(), weight_storage="fp8", from_step=1)]
    saved = begun(storing)
    step(saved)
    with pytest.raises(ValueError, match="keeps weights otherwise"):
        begun(storing).load_state_dict(saved.state_dict())


def test_weights_follow_what_is_loaded_until_training_begins() -> None:
    """Of no phase's storage the schedule stays where it was; weights of a model in training are left as they are."""
    model = octavo.convert(net().bfloat16(), recipes.delayed(), select=every_layer)
    optimizer = octavo.optim.AdamW(model.parameters())
    phases = [Phase(recipes.delayed()), Phase(recipes.delayed(), weight_storage="fp8", from_step=1)]
    schedule = PrecisionSchedule(model, optimizer, phases)
    TrainingState(model, schedule)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    stored = octavo.convert(net().bfloat16(), recipes.delayed(), select=every_layer, weight_storage="fp8").state_dict()
    model.load_state_dict(stored)
    assert schedule.state_dict()["index"] == 1 and isinstance(model[0].linear.weight, StoredWeight)
    of_one = {name: value for name, value in stored.items() if name.startswith("0.")}
    model.load_state_dict({name: value for name, value in plain.items() if name.startswith(("1.", "2."))} | of_one)
    assert schedule.state_dict()["index"] == 1
    model(torch.randn(BATCH, WIDTH, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    model.load_state_dict(plain)
    assert schedule.state_dict()["index"] == 1 and isinstance(model[0].linear.weight, StoredWeight)


def test_weights_that_a_library_loads_without_the_state_are_warned_of_in_training(monkeypatch, lone_mesh) -> None:
    """Lightning's Fabric loads sharded weights, and perhaps nothing else."""
    monkeypatch.setitem(sys.modules, "lightning.fabric", None)
    model = delayed_net()
    state, x = TrainingState(model), torch.randn(BATCH, WIDTH)
    model.load_state_dict(model.state_dict())
    model(x)  # nothing is sharded
    fully_shard(model, mesh=lone_mesh)
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        model(x)
    model.train()
    with pytest.warns(UserWarning, match="weights were loaded but no TrainingState"):
        model(x)
    model(x)  # once
    model.load_state_dict(model.state_dict())
    state.load_state_dict(state.state_dict())
    model(x)


def test_a_model_is_converted_once() -> None:
    model = net()
    convert_once(model, recipes.delayed(), every_layer)
    before = recipes_of(model)
    convert_once(model, recipes.delayed())
    assert recipes_of(model) == before == {f"{i}.linear": recipes.delayed() for i in range(3)}
    with pytest.raises(ValueError, match=r"0.linear was converted with 'delayed' already, not 'dynamic'"):
        convert_once(model, recipes.dynamic())
    with pytest.warns(UserWarning, match="converted nothing"), pytest.raises(ValueError, match="layers by select="):
        convert_once(net(), recipes.dynamic())


def test_gradients_that_are_gone_before_a_clip() -> None:
    stored, early = (octavo.optim.AdamW(net().parameters(), **options) for options in ({"gradient_storage": "fp8"}, {}))
    for fine in (stored, early, torch.optim.AdamW(net().parameters())):
        check_clip(fine, "clip=1.0")
    octavo.optim.update_in_backward(early)
    with pytest.raises(ValueError, match=r"clip=1.0 clips after backward"):
        check_clip(early, "clip=1.0")


def teach_after(model: nn.Module) -> None:
    """Evaluate after each training forward and before its backward, as with a teacher that is the model itself."""

    def teach(module: nn.Module, arguments: Any, output: Any) -> None:
        if module.training:
            module.eval()(*arguments)
            module.train()

    model.register_forward_hook(teach)


@pytest.mark.parametrize("how", ["gradients in FP8", "updates in backward"])
def test_micro_batches_are_one_step(how: str) -> None:
    """Micro-batches are one step, as with ``optimizer.accumulate()``; updates in backward are those after it."""

    def weights(follow: bool) -> dict[str, Tensor]:
        run = Run("no", accumulate=4, optimizer={"gradient_storage": "fp8"} if how == "gradients in FP8" else {})
        optimizer, run.max_norm = run.optimizer.optimizer, math.inf
        if how == "updates in backward" and follow:
            octavo.optim.update_in_backward(optimizer)
        if follow:
            follow_accumulation(run.plain, run.optimizer)
            teach_after(run.plain)
            run.step()
            run.step()
        else:
            for step in range(2):
                for micro in range(4):
                    with optimizer.accumulate() if micro < 3 else nullcontext():
                        x = run.batches[4 * step + micro]
                        ((run.plain(x) - x).square().mean() / 4).backward()
                optimizer.step()
                run.scheduler.step()
                optimizer.zero_grad()
        begin_anew()
        return dict(run.plain.state_dict())

    assert_equal(weights(follow=True), weights(follow=False))


# --- on ranks ---------------------------------------------------------------------------------------------------------

SHARDED = ["schedule", "moments and masters", "out of FP8 weights"]
ON_RANKS = ["bf16", "fp16", "accumulating", "octavo.optim", "FP8 weights", "FP8 weights of bf16", *SHARDED]


def on_two(folder: Path, how: str) -> list[Any]:
    """Return whether resumed runs are the whole ones, and whether models are gathered in FP8, on this rank."""
    plugin = None
    if how == "fsdp2":
        let_accelerate_shard_on_cpus()
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    outcomes = []
    for case in [case for case in ON_RANKS if how == "fsdp2" or case not in SHARDED]:
        ours = whole(folder / case, plugin=plugin, **CASES[case])
        resumed_run = resumed(folder / case, plugin=plugin, **CASES[case])
        same = resumed_run.losses == ours.losses[SAVED:]
        assert_equal(resumed_run.state(), ours.state())
        outcomes.append([case, same, "gathered" in str(octavo.summary(ours.plain))])
        begin_anew()
    return outcomes


@pytest.mark.full
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_on_ranks(how: str, tmp_path: Path) -> None:
    for outcomes in on_ranks(on_two, tmp_path, how):
        assert len(outcomes) == len(ON_RANKS) - (len(SHARDED) if how == "ddp" else 0)
        assert all(same and gathered == (how == "fsdp2") for _, same, gathered in outcomes), outcomes
