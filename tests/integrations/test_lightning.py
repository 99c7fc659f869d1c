"""OctavoPrecision in Lightning's Trainer: it converts, clips, accumulates, switches, resumes exactly; and Fabric."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import octavo
from octavo import recipes
from tests.support.helpers import assert_equal, every_layer
from tests.support.schedule_situations import PROMOTING, SWITCHING
from tests.support.torchrun import on_ranks

lightning = pytest.importorskip("lightning")

from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402

from octavo.integrations.accelerate import TrainingState  # noqa: E402
from octavo.integrations.lightning import OctavoPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory")
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
ALONE = QUIET | {"accelerator": "cpu", "devices": 1}
WIDTH, BATCH, LR = 64, 4, 1e-3
STEPS, SAVED = 5, 2  # the checkpoint lies at an epoch's end: no loader goes on within one


class Module(lightning.LightningModule):
    """An autoencoder; ``options`` are octavo's AdamW's, or Muon's; None: torch's."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.options, self.losses = options, list[float]()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        loss = (x.float() - batch.float()).square().mean()
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: Tensor, index: int) -> None:
        self.training_step(batch, index)

    def configure_optimizers(self) -> Any:
        if self.options is None:
            return torch.optim.AdamW(self.parameters(), lr=LR)
        kind = octavo.optim.Muon if "adamw" in self.options else octavo.optim.AdamW
        return kind(self.parameters(), lr=LR, **self.options)


class Sharded(Module):
    """Sharded by FSDP2, as Lightning's ModelParallelStrategy has it: in configure_model."""

    convert = True

    def configure_model(self) -> None:
        if isinstance(self.layers[0], FSDPModule):
            return
        if self.convert:
            octavo.convert(self, recipes.delayed(), select=every_layer)
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Unconverted(Sharded):
    convert = False


def plugin(recipe: Any = "delayed", precision: str = "bf16-mixed", **changes: Any) -> OctavoPrecision:
    return OctavoPrecision(recipe, precision, select=every_layer, **changes)


def fit(
    folder: Path, precision: Any, module: Any = None, *, resume: bool = False, batches: int = 2, **changes: Any
) -> Any:
    """The module, fitted; with a checkpoint after SAVED steps, or from it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module() if module is None else module
    where = folder / ("resumed" if resume else "whole")
    saved = ModelCheckpoint(where, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = lightning.Trainer(**{**ALONE, "max_steps": STEPS, **changes}, callbacks=[saved], plugins=[precision])
    inputs: Any = torch.randn(batches * BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(inputs, batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=str(folder / "whole" / f"step={SAVED}.ckpt") if resume else None)
    return module


def state(module: nn.Module) -> dict[str, Tensor]:
    weights = {name: getattr(w, "full_tensor", lambda w=w: w)() for name, w in module.state_dict().items()}
    return {**weights, **octavo.nn.delayed_state_dict(module)}


class Recording(lightning.Callback):
    """Records each step of a Whole's network into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.steps = 0
        self.recorder = octavo.inspect.record(module.layers, self.folder, 1, optimizer=trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step > self.steps:  # not in each micro-batch
            self.steps = trainer.global_step
            self.recorder.step(loss=outputs["loss"])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.recorder.close()


class Whole(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = (self.layers(batch).float() - batch.float()).square().mean()
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_recorded_training_has_twins_and_the_bits_of_one_without(micro_batches: int, tmp_path: Path) -> None:
    """The Trainer gives each step of the optimizer a closure that computes, and clips, the gradients."""
    np = pytest.importorskip("numpy")
    results = []
    for callbacks in ([Recording(tmp_path)], []):
        module, inputs = Whole(), torch.randn(3 * micro_batches * BATCH, WIDTH, generator=torch.Generator())
        options = {"max_epochs": 1, "gradient_clip_val": 1e-3, "accumulate_grad_batches": micro_batches}
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            **ALONE, **options, callbacks=callbacks, plugins=[plugin()], enable_checkpointing=False
        )
        trainer.fit(module, torch.utils.data.DataLoader(inputs, batch_size=BATCH))
        results.append((module.losses, state(module)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])
    record = octavo.inspect.load(tmp_path)
    assert record.events == [] and (record.weights["twin_cosine"] > 0.95).all()
    sizes = np.sqrt(np.square(record.weights["gradient"]).sum(1)) * WIDTH  # of this step, as the optimizer gets it
    assert ((sizes > 5e-4) & (sizes < 1.2e-3)).all()  # which clipping makes at most 0.001, with biases


CASES: dict[str, dict[str, Any]] = {
    "bf16-mixed": {},
    "bf16-true": {"precision": "bf16-true"},
    "32-true": {"precision": "32-true"},
    "octavo.optim": {"options": {}},
    "Muon, bf16-true": {"options": {"master": "split24", "adamw": {"lr": LR}}, "precision": "bf16-true"},
    "accumulating": {"accumulate_grad_batches": 2, "batches": 4},
    "schedule": {"schedule": SWITCHING},
    "moments and masters": {"schedule": PROMOTING, "precision": "bf16-true", "options": {}},
}
QUICK = ("octavo.optim", "schedule")


def both(folder: Path, case: dict[str, Any], **changes: Any) -> tuple[Any, Any, Any]:
    """Return a whole run's module, a run's that is resumed from its checkpoint, and the latter's plugin."""
    case = {**changes, **case}
    options, kind = case.pop("options", None), case.pop("kind", Module)
    options_of_plugin = {name: case.pop(name) for name in ("precision", "schedule") if name in case}
    plugins = [plugin(**options_of_plugin) for _ in range(2)]
    strategy = case.pop("strategy", lambda: "auto")
    ours, resumed = (
        fit(folder, used, kind(options), resume=resume, gradient_clip_val=0.05, strategy=strategy(), **case)
        for used, resume in zip(plugins, (False, True), strict=True)
    )
    return ours, resumed, plugins[1]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.full) for c in CASES])
def test_it_trains_saves_and_resumes_bit_for_bit(case: str, tmp_path: Path) -> None:
    ours, resumed, last = both(tmp_path, dict(CASES[case]))
    assert resumed.losses == ours.losses[-len(resumed.losses) :]
    assert len(ours.losses) - len(resumed.losses) == SAVED * CASES[case].get("accumulate_grad_batches", 1)
    assert_equal(state(resumed), state(ours))
    if schedule := CASES[case].get("schedule"):
        assert last.schedule is not None
        assert [switch.step for switch in last.schedule.switches] == [0, *(phase.from_step for phase in schedule[1:])]


def test_another_recipe_and_a_checkpoint_without_its_state(tmp_path: Path) -> None:
    ours = fit(tmp_path, plugin())
    with pytest.raises(ValueError, match="computes in delayed, this model's in blockwise"):
        fit(tmp_path, plugin("blockwise"), resume=True)
    with pytest.raises(ValueError, match="the other way round"):
        fit(tmp_path, plugin(schedule=SWITCHING), resume=True)
    path = tmp_path / "whole" / f"step={SAVED}.ckpt"
    content = torch.load(path)
    del content["OctavoPrecision"]
    torch.save(content, path)
    with pytest.warns(UserWarning, match="its state begins anew"):
        resumed = fit(tmp_path, plugin(), resume=True)
    assert resumed.losses[0] != ours.losses[SAVED]


def recipes_of(module: nn.Module) -> set[str]:
    return {part.recipe.name for part in module.modules() if isinstance(part, octavo.nn.Linear)}


def test_each_fit_begins_the_schedule_anew_and_testing_keeps_the_phase(tmp_path: Path) -> None:
    """Each fit of one plugin begins the schedule anew, also another's of a model that an earlier schedule moved on."""
    first, module = plugin(schedule=SWITCHING[:2]), Module()
    for used in (first, first, plugin(schedule=SWITCHING[:2])):
        fit(tmp_path, used, module)
        assert recipes_of(module) == {"blockwise"} and used.schedule is not None
        assert [switch.step for switch in used.schedule.switches] == [0, 1]
        assert len(module._load_state_dict_pre_hooks) == (1 if used is first else 2)  # one of each plugin
    loader = torch.utils.data.DataLoader(torch.randn(BATCH, WIDTH), batch_size=BATCH)  # type: ignore[arg-type]
    module.trainer.test(module, loader, verbose=False)
    assert recipes_of(module) == {"blockwise"}
    with pytest.raises(ValueError, match="was converted with 'blockwise' already, not 'rowwise'"):
        fit(tmp_path, plugin(recipes.rowwise()), module)
    lightning.Trainer(plugins=[plugin()], **ALONE).test(fresh := Module(), loader, verbose=False)
    assert recipes_of(fresh) == {"delayed"}


@mock.patch.dict(os.environ)  # in which it leaves its ranks
def test_fabrics_sharded_checkpoints_take_one_line_more(tmp_path: Path) -> None:
    """fabric.load puts what TrainingState keeps in its place: a warning says so where nobody loads it."""
    sizes: dict[str, Any] = {"data_parallel_size": 1, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
    strategy = FabricModelParallel(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]), **sizes)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    try:

        def built() -> tuple[Any, nn.Module, dict[str, Any]]:
            net = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.delayed(), select=every_layer)
            training_state = TrainingState(net)
            return fabric.setup_module(net), net, {"model": net, "octavo": training_state}

        model, net, state = built()
        fabric.backward(model(x := torch.randn(8, 64)).square().mean())
        state["model"] = model
        fabric.save(tmp_path / "sharded", state)
        for loads in (False, True):
            model, again, state = built()
            training_state, state["model"] = state["octavo"], model
            fabric.load(tmp_path / "sharded", state)
            assert isinstance(state["octavo"], dict)
            if loads:
                training_state.load_state_dict(state["octavo"])
                assert torch.equal(again[0].delayed_scale, net[0].delayed_scale) and net[0].delayed_scale.all()
                model(x)
            else:
                with pytest.warns(UserWarning, match=r"call load_state_dict\(state\['octavo'\]\) of the TrainingState"):
                    model(x)
                model(x)  # once
    finally:
        dist.destroy_process_group()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_arguments_that_mean_nothing() -> None:
    for arguments, message in (
        (("delaid",), "'delaid' is no recipe"),
        (("Recipe",), "'Recipe' is no recipe"),
        (("delayed", "16-mixed"), "use one of bf16-mixed, bf16-true, 32-true"),
    ):
        with pytest.raises(ValueError, match=message):
            OctavoPrecision(*arguments)
    with pytest.raises(ValueError, match="the recipe is another"):
        OctavoPrecision("dynamic", schedule=SWITCHING)
    with pytest.raises(ValueError, match=r"Phase\(delayed, from_tokens=9\): Lightning counts no tokens"):
        OctavoPrecision("delayed", schedule=[SWITCHING[0], replace(SWITCHING[2], from_step=None, from_tokens=9)])


def test_a_model_that_was_sharded_first_is_refused(lone_mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"sharded the model before it was converted: call octavo\.convert"):
        plugin().convert_module(fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=lone_mesh))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("32-true", torch.float32)]
)
def test_modules_and_tensors_are_made_in_the_dtype_of_the_precision(precision: str, dtype: torch.dtype) -> None:
    octavos = plugin(precision=precision)
    with octavos.module_init_context():
        assert nn.Linear(4, 4).weight.dtype == dtype
    with octavos.tensor_init_context():
        assert torch.ones(2).dtype == dtype
    assert octavos.convert_input(torch.ones(2)).dtype == dtype and octavos.state_dict() == {}
    octavos.load_state_dict({"delayed": "of a fit that has not begun"})
    assert octavos.state_dict() == {} and torch.get_default_dtype() == torch.float32


class Early(Module):
    def configure_optimizers(self) -> Any:
        octavo.optim.update_in_backward(optimizer := super().configure_optimizers())
        return optimizer


def test_micro_batches_with_gradients_in_fp8_or_used_in_backward(tmp_path: Path) -> None:
    modules = Module({}), Early({}), Module({"gradient_storage": "fp8"})
    after, early, stored = (fit(tmp_path, plugin(), m, accumulate_grad_batches=2, batches=4).losses for m in modules)
    assert early == after
    assert stored == pytest.approx(after, rel=1e-3)
    with pytest.raises(ValueError, match=r"gradient_clip_val=0.05 clips after backward"):
        fit(tmp_path, plugin(), Early({}), gradient_clip_val=0.05)


class Two(Module):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [super(Two, self).configure_optimizers() for _ in range(2)]


def test_a_schedule_follows_one_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gave 2"):
        fit(tmp_path, plugin(schedule=SWITCHING), Two())


# --- on ranks ---------------------------------------------------------------------------------------------------------


def on_two(folder: Path, how: str) -> list[Any]:
    """Return (losses, the resumed run's, how many layers gather in FP8) of each case, on this rank."""
    common: dict[str, Any] = {"strategy": DDPStrategy, "devices": 2, "batches": 4}
    cases = ["bf16-mixed", "octavo.optim", "schedule"]
    if how == "fsdp2":
        common |= {"strategy": lambda: ModelParallelStrategy(2, 1, process_group_backend="gloo"), "kind": Sharded}
    outcomes: list[Any] = []
    for case in cases:
        ours, resumed, _ = both(folder / case, dict(CASES[case]), **common)
        assert_equal(state(resumed), state(ours))
        outcomes.append([ours.losses, resumed.losses, str(octavo.summary(ours)).count("gathered in FP8")])
    if how == "fsdp2":
        with pytest.raises(ValueError, match="sharded the model before it was converted"):
            fit(folder, plugin(), Unconverted(), strategy=common["strategy"](), devices=2)
    return outcomes


@pytest.mark.full
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_on_ranks(how: str, tmp_path: Path) -> None:
    ranks = on_ranks(on_two, tmp_path, how)
    for outcomes in ranks:
        for losses, resumed, gathered in outcomes:
            assert len(losses) == STEPS
            assert losses[SAVED:] == resumed
            assert gathered == (3 if how == "fsdp2" else 0)
    assert ranks[0][0][0] != ranks[1][0][0]  # each on batches of its own
