import json
from pathlib import Path

import pytest

from octavo.train import DataConfig, ModelConfig, OptimizerConfig, RunConfig, StateConfig, TrainConfig
from octavo.train.config_file import build, config_of, load, save
from octavo.train.errors import TrainError


def test_what_is_saved_is_loaded_but_for_the_folder_and_resume(tmp_path):
    config = TrainConfig(
        ModelConfig(width=64, heads=4),
        DataConfig(Path("text.py"), batch=4),
        OptimizerConfig(lr=1e-9),
        RunConfig(compile=True, out=tmp_path, resume=True),
        state=StateConfig(master="split24", schedule="fp8-then-bf16@0.7"),
    )
    save(tmp_path, config, "mx")
    for path in (tmp_path, tmp_path / "config.json"):
        found = load(path)
        assert found.pop("recipe") == "mx" and found["data"] == Path("text.py").absolute()
        again = config_of(found)
        assert (again.model, again.optimizer, again.state) == (config.model, config.optimizer, config.state)
        assert again.run == RunConfig(compile=True)


def test_toml_is_read_and_what_it_leaves_out_has_its_default(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('recipes = ["baseline", "dynamic"]\n[model]\nwidth = 32\nheads = 2\n[optimizer]\nlr = 1\n')
    found = load(path)
    assert found == {"recipes": ["baseline", "dynamic"], "width": 32, "heads": 2, "lr": 1}
    assert build(ModelConfig, found) == ModelConfig(width=32, heads=2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "it has no sections: choose recipe, recipes, model"),
        ({"modle": {}}, "modle is no section: choose recipe"),
        ({"model": {"with": 3}}, "model has no option with: choose width, layers"),
        ({"model": 3}, "model has no option 3: choose width"),
        ({"model": {"width": "3"}}, "model.width is '3': choose a whole number from 1"),
        ({"run": {"compile": "yes"}}, "run.compile is 'yes': choose true or false"),
        ({"run": {"out": 3}}, "run.out is 3: choose a Path"),
        ({"run": {"device": None}}, "run.device is None: choose a string"),
        ({"state": {"moments": "fp4"}}, "state.moments is 'fp4': choose fp32, bf16 or fp8"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr is nan: choose a number above 0"),
        ({"recipe": ["mx"]}, "recipe is ['mx']: choose a name"),
        ({"recipe": "mine"}, "unknown recipe 'mine': choose from"),
        ({"recipes": "mx"}, "recipes is 'mx': choose a list of names"),
        ({"recipes": []}, "recipes is []"),
        ({"recipes": ["mx", {}]}, "choose a list of names"),
    ],
)
def test_what_is_no_option_is_refused_with_the_files_name_and_the_choices(content, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TrainError) as fault:
        load(path)
    assert str(fault.value).startswith(f"{path}: ") and says in str(fault.value)


def test_what_is_no_file_of_options_is_refused(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\x00")
    (tmp_path / "json.toml").write_text('{"model": {}}')
    with pytest.raises(TrainError, match="neither JSON nor"):
        load(tmp_path / "binary.json")
    with pytest.raises(TrainError, match="neither JSON nor"):
        load(tmp_path / "json.toml")
    with pytest.raises(TrainError, match="No such file"):
        load(tmp_path)
