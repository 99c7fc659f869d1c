import json
import shutil
from pathlib import Path

import torch

import octavo
from octavo import cli
from octavo.train.loop import trained_model
from tests.support.command_line import one_line, train


def test_inspect_of_a_run_is_of_its_record_unless_more_is_asked(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    layer = octavo.nn.Linear(16, 16)
    with octavo.inspect.record(layer, "runs/delayed/inspect") as recorder:
        layer(torch.randn(4, 16)).sum().backward()
        recorder.step()
    assert cli.main(["inspect", "runs/delayed", "--json", "found.json"]) == 0
    assert Path("found.json").exists() and "(all layers)" not in capsys.readouterr().out
    assert cli.main(["inspect", "runs/delayed", "--keep", "1", "--html", "more.html"]) == 2
    assert "--html: runs/delayed is a model" in one_line(capsys)
    assert cli.main(["inspect", "runs/delayed/inspect", "--runs", "3", "--device", "H100"]) == 2
    assert "--runs, --device: runs/delayed/inspect is a record" in one_line(capsys)
    assert cli.main(["inspect", "runs/delayed", "--recipes", "dynamic", "--min-features", "8"]) == 0
    assert Path("runs/delayed/inspect/what_if.json").exists()
    shutil.rmtree("runs/delayed/inspect")
    capsys.readouterr()
    arguments = ["--recipes", "delayed", "--device", "H100", "--data", "text.py", "--keep", "1"]
    assert cli.main(["inspect", "runs", *arguments]) == 0
    out = capsys.readouterr().out
    assert "blocks.0.mlp.fc1" in out and '"default": "delayed"' in out and "head" not in out


def test_remedies_of_a_run_are_applied(folder, capsys, no_plot):
    assert train("--recipe", "delayed", "--out", "a", "--steps", "1") == 0
    assert cli.main(["inspect", "a", "--recipes", "delayed", "--keep", "1", "--apply"]) == 0
    assert "rules.json: octavo train --config a/delayed" in capsys.readouterr().out
    arguments = "--config", "a/delayed", "--out", "b", "--lr", "0.001", "--steps", "1"
    assert train(*arguments) == train(*arguments, "--resume") == 0
    assert train("--recipe", "a/delayed/rules.json", "--out", "c", "--steps", "1") == 0
    rules = json.loads(Path("a/delayed/rules.json").read_text())
    assert len(rules["rules"]) == 1 and json.loads(Path("b/delayed/config.json").read_text())["recipe"] == rules
    for out in ("b", "c"):
        layers = {n: m.recipe.name for n, m in trained_model(Path(out)).named_modules() if hasattr(m, "recipe")}
        assert [name for name, recipe in layers.items() if recipe == "high_precision"] == list(rules["rules"])
    capsys.readouterr()
    assert cli.main(["inspect", "a/delayed/checkpoint", "--apply"]) == 2
    assert "is no run of octavo train: give --write FILE" in one_line(capsys)
