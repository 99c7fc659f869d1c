import contextlib
import dataclasses
import json
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import octavo
from octavo import recipes
from octavo.optim.masters import FP8_MASTERS, PLAIN_MASTERS
from octavo.train import (
    GPT,
    RECIPES,
    DataConfig,
    InspectConfig,
    ModelConfig,
    OptimizerConfig,
    RanksConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
)
from octavo.train.config import (
    BASELINE,
    UNCONVERTED,
    DivergedError,
    RunCheckpointError,
    TrainError,
    build,
    check_recipe_name,
    config_of,
    load_options,
    options_text,
)
from tests.support.damage import DEEP, damaged_json


@pytest.mark.parametrize("error", [TrainError, RunCheckpointError, DivergedError])
def test_one_except_clause_catches_all_of_them(error):
    assert issubclass(error, TrainError) and issubclass(error, octavo.OctavoError)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ModelConfig(width=0), "width is 0"),
        (lambda: ModelConfig(layers=-1), "layers is -1"),
        (lambda: ModelConfig(context=2**40), "context is 1099511627776"),
        (lambda: ModelConfig(width=100, heads=3), "choose width 96 or 102"),
        (lambda: ModelConfig(width=3, heads=3), "choose width 6"),  # heads of one feature
        (lambda: DataConfig(batch=0), "batch is 0"),
        (lambda: DataConfig(batch=10, micro_batches=4), "choose a batch of 12"),
        (lambda: OptimizerConfig(steps=-5), "steps is -5"),
        (lambda: OptimizerConfig(steps=True), "steps is True"),
        (lambda: OptimizerConfig(lr=0.0), "lr is 0.0"),
        (lambda: OptimizerConfig(lr=float("nan")), "lr is nan"),
        (lambda: OptimizerConfig(beta2=1.0), "beta2 is 1.0"),
        (lambda: OptimizerConfig(warmup=1.5), "warmup is 1.5"),
        (lambda: RunConfig(seed=-1), "seed is -1"),
        (lambda: RunConfig(dtype="float8"), "choose auto, bfloat16 or float32"),
        (lambda: RunConfig(checkpoint_every=-1), "checkpoint_every is -1"),
        (lambda: RunConfig(resume="now"), "resume is 'now': choose true or false or auto"),
        (lambda: RanksConfig("fsdp2"), "choose none, fsdp or ddp"),
        (lambda: RanksConfig(timeout=0), "timeout is 0"),
        (lambda: StateConfig(moments="fp4"), "moments is 'fp4'"),
        (lambda: StateConfig(master="fp64"), "master is 'fp64'"),
        (lambda: StateConfig(update_in_backward="1MB."), "update_in_backward is '1MB.': choose a number of bytes"),
        (lambda: StateConfig(master="split32", weight_storage="fp8"), "master is 'split32'"),
        (
            lambda: TrainConfig(ranks=RanksConfig("ddp"), state=StateConfig(update_in_backward="1MB")),
            "before ddp has exchanged them: choose shard fsdp",
        ),
        (
            lambda: TrainConfig(ranks=RanksConfig("fsdp", tensor_parallel=2), state=StateConfig(algorithm="muon")),
            "tensor_parallel 2 cuts columns of matrices, which muon takes whole: choose adamw",
        ),
        (lambda: TrainConfig(run=RunConfig(dtype="float32"), state=StateConfig(master="split24")), "master split24"),
        (lambda: check_recipe_name("fp8"), "unknown recipe 'fp8': choose from baseline, bf16"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value_and_the_remedy(make, says):
    with pytest.raises(ValueError) as fault:
        make()
    assert says in str(fault.value) and "choose" in str(fault.value)


CONFIGS = ModelConfig, DataConfig, OptimizerConfig, RunConfig, RanksConfig, StateConfig, InspectConfig


@pytest.mark.parametrize("config", CONFIGS)
def test_options_are_few_frozen_and_explained(config):
    assert len(dataclasses.fields(config)) <= 8
    assert all(field.metadata["help"] for field in dataclasses.fields(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().anything = 1


@pytest.mark.parametrize("sizes", [(32, 2, 2, 16), (30, 1, 3, 8), (192, 4, 3, 128)])
def test_parameters_are_counted(sizes):
    config = ModelConfig(*sizes)
    assert config.parameters == sum(p.numel() for p in GPT(config).parameters())


def test_identity_holds_what_decides_the_loss_and_nothing_else():
    config = TrainConfig()
    for dtype in ("bfloat16", "float32"):
        assert config.with_dtype([], dtype).identity()["dtype"] == dtype
    other_place = RunConfig(device="cpu", resume=True, eval_every=7, checkpoint_every=9, compile=True)
    other_parts = {"run": other_place, "ranks": RanksConfig("ddp"), "inspect": InspectConfig(True)}
    assert config.identity() == TrainConfig(**other_parts).identity()
    assert config.identity() != TrainConfig(run=RunConfig(seed=1)).identity()
    assert config.identity() != TrainConfig(optimizer=OptimizerConfig(steps=3)).identity()
    assert config.identity() != TrainConfig(state=StateConfig("fp8")).identity()
    assert config.identity() != TrainConfig(state=StateConfig(weight_storage="fp8")).identity()
    assert "data" not in config.identity()


def test_each_recipe_and_each_master_exists():
    assert all(callable(getattr(recipes, name)) for name in RECIPES if name not in UNCONVERTED)
    masters = {str(name).lower() for name in (*PLAIN_MASTERS, *FP8_MASTERS)}
    assert {*get_args(get_type_hints(StateConfig)["master"])} == masters | {"auto"}


@pytest.mark.parametrize(
    ("said", "recipes", "dtype", "baseline"),
    [
        ({}, [BASELINE, "dynamic"], "float32", "float32"),  # the fastest
        ({}, ["dynamic", "bf16"], "bfloat16", "bf16"),
        ({"dtype": "bfloat16"}, [BASELINE], "bfloat16", "bf16"),
        ({"master": "split24"}, [recipes.dynamic()], "bfloat16", "bf16"),
        ({"dtype": "float32"}, ["float32"], "float32", "float32"),
        ({"dtype": "float32"}, ["dynamic", "bf16"], None, None),
        ({"master": "split24"}, ["float32"], None, None),
        ({}, ["float32", "bf16"], None, None),
    ],
)
def test_the_dtype_is_settled_once_and_names_the_baseline(said, recipes, dtype, baseline):
    run = RunConfig(**{key: value for key, value in said.items() if key == "dtype"})
    state = StateConfig(**{key: value for key, value in said.items() if key == "master"})
    config = TrainConfig(run=run, state=state)
    if dtype is None:
        with pytest.raises(TrainError, match="choose one dtype, and recipe baseline"):
            config.with_dtype(recipes, "float32")
        return
    settled = config.with_dtype(recipes, "float32")
    assert settled.run.dtype == dtype and settled.with_dtype((), "bfloat16") == settled
    assert settled.called(BASELINE) == baseline and settled.called("mx") == "mx"


def test_what_is_saved_is_loaded_but_for_the_folder_and_resume(tmp_path):
    config = TrainConfig(
        ModelConfig(width=64, heads=4),
        DataConfig(Path("text.py"), batch=4),
        OptimizerConfig(lr=1e-9),
        RunConfig(compile=True, out=tmp_path, resume=True),
        state=StateConfig(master="split24", schedule="fp8-then-bf16@0.7"),
    )
    (tmp_path / "config.json").write_text(options_text(config, "mx"))
    for path in (tmp_path, tmp_path / "config.json"):
        options = load_options(path)
        assert options.pop("recipe") == "mx" and options["data"] == Path("text.py").absolute()
        again = config_of(options)
        assert (again.model, again.optimizer, again.state) == (config.model, config.optimizer, config.state)
        assert again.run == RunConfig(compile=True)


def test_toml_is_read_and_what_it_leaves_out_has_its_default(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "dynamic"\n[model]\nwidth = 32\nheads = 2\n[optimizer]\nlr = 1\n')
    options = load_options(path)
    assert options == {"recipe": "dynamic", "width": 32, "heads": 2, "lr": 1}
    assert build(ModelConfig, options) == ModelConfig(width=32, heads=2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "it has no sections: choose recipe, model"),
        ({"modle": {}}, "modle is no section: choose recipe"),
        ({"model": {"with": 3}}, "model has no option with: choose width, layers"),
        ({"model": 3}, "model has no option 3: choose width"),
        ({"model": {"width": "3"}}, "model.width is '3': choose a whole number from 1"),
        ({"run": {"compile": "yes"}}, "run.compile is 'yes': choose true or false"),
        ({"run": {"out": 3}}, "run.out is 3: choose a Path"),
        ({"run": {"device": None}}, "run.device is None: choose a string"),
        ({"state": {"moments": "fp4"}}, "state.moments is 'fp4': choose fp32, bf16 or fp8"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr is nan: choose a number above 0"),
        ({"recipe": ["mx"]}, "unknown recipe ['mx']: choose from"),
        ({"recipe": "mine"}, "unknown recipe 'mine': choose from"),
        ({"recipes": ["mx"]}, "recipes is no section: choose recipe, model"),
    ],
)
def test_what_is_no_option_is_refused_with_the_files_name_and_the_choices(content, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TrainError) as fault:
        load_options(path)
    assert str(fault.value).startswith(f"{path}: ") and says in str(fault.value)


def test_what_is_no_file_of_options_is_refused(tmp_path):
    with pytest.raises(TrainError, match="No such file"):
        load_options(tmp_path)
    for name, content in {"x.json": b"\xff\x00", "x.toml": b'{"model": {}}', "y.toml": f"a = {DEEP}".encode()}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TrainError, match="neither JSON nor"):
            load_options(tmp_path / name)


def test_a_damaged_file_of_options_is_a_train_error_or_options(tmp_path):
    recipe = recipes.to_json(octavo.RecipeMap(recipes.dynamic(), {"lm_head": None}))
    value, path, read = json.loads(options_text(TrainConfig(), recipe)), tmp_path / "config.json", 0
    for seed in range(100):
        path.write_bytes(damaged_json(value, seed))
        with contextlib.suppress(TrainError):
            options = load_options(path)
            read += 1
            with contextlib.suppress(ValueError):  # two options that do not go together
                config_of(options)
    assert 5 < read < 90
