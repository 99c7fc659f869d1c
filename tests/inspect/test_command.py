"""``octavo inspect``."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo import cli
from octavo.inspect import command
from octavo.inspect.command import Subject, entry_point, what_if_command
from octavo.inspect.what_if import WhatIfError


def record(folder: Path, steps: range = range(2)) -> None:
    pytest.importorskip("numpy")
    layer = octavo.nn.Linear(32, 32)
    with octavo.inspect.record(layer, folder, every=1, step=steps.start) as recorder:
        for _ in steps:
            layer(torch.randn(8, 32)).square().sum().backward()
            recorder.step()


def test_a_record_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of a model are not for it."""
    record(tmp_path / "run")
    assert cli.main(["inspect", str(tmp_path / "run"), "--json", str(tmp_path / "x.json")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 layers, 2 of the steps 0 to 1 recorded, no findings") and err == ""
    assert json.loads((tmp_path / "x.json").read_text())["steps"] == [0, 1]
    assert cli.main(["inspect", str(tmp_path / "run"), "--keep", "1"]) == 2
    assert "--keep: " in (said := capsys.readouterr().err) and "is a record, and these are for models" in said
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert f"such as {tmp_path / 'run'}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["inspect", str(tmp_path / "empty")]) == 2
    assert "holds no record: give the folder that octavo.inspect.record wrote to" in capsys.readouterr().err


def test_what_mends_casts_is_written_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    delayed = octavo.recipes.delayed(history_length=8)
    layer, path = octavo.nn.Linear(32, 32, recipe=delayed), tmp_path / "rules.json"
    with octavo.inspect.record(layer, tmp_path / "run", every=1) as recorder:
        for step in range(6):
            layer(torch.randn(16, 32) * (300 if step == 4 else 1)).square().sum().backward()
            recorder.step()
    json_path = tmp_path / "x.json"
    assert cli.main(["inspect", str(tmp_path / "run"), "--write", str(path), "--json", str(json_path)]) == 0
    assert f"octavo.convert(model, '{path}')" in capsys.readouterr().out
    findings = octavo.inspect.diagnose(octavo.inspect.load(tmp_path / "run"))
    mended = octavo.RecipeMap(delayed, findings[0].rules)
    assert octavo.recipes.load(path) == mended and octavo.set_recipe(layer, path).recipe == mended.of("") != delayed
    written = [each["rules"] for each in json.loads(json_path.read_text())["findings"]]
    assert written[0].items() <= json.loads(path.read_text())["rules"].items()


def test_damaged_recipes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    (tmp_path / "run" / "recipes.json").write_text("{")
    assert cli.main(["inspect", str(tmp_path / "run"), "--write", str(tmp_path / "rules.json")]) == 2
    assert "recipes.json is damaged" in capsys.readouterr().err and not (tmp_path / "rules.json").exists()


def test_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle of the page's library, which takes seconds, is put together in the full set."""
    monkeypatch.setattr(pytest.importorskip("vl_convert"), "javascript_bundle", "bundle({})".format)
    record(tmp_path / "run")
    assert cli.main(["inspect", str(tmp_path / "run"), "--html", str(tmp_path / "x.html")]) == 0
    texts = "octavo inspect: ", "bundle(window.vegaEmbed = vegaEmbed;)"
    assert all(text in (tmp_path / "x.html").read_text() for text in texts)


def test_what_was_found_of_the_model_is_shown_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    row = {"layer": "0", "recipe": "mx", "predicted": 0.01}
    (tmp_path / "run/what_if.json").write_text(json.dumps({"what_if": [row]}))
    assert cli.main(["inspect", str(tmp_path / "run"), "--json", str(tmp_path / "x.json")]) == 0
    assert json.loads((tmp_path / "x.json").read_text())["what_if"] == [row]
    arguments = ["--json", str(tmp_path / "y.json"), "--what-if", str(tmp_path / "x.json")]
    assert cli.main(["inspect", str(tmp_path / "run"), *arguments]) == 0
    assert json.loads((tmp_path / "y.json").read_text())["what_if"] == [row]
    for text in ("", "[]", '{"what_if": [1]}'):
        (tmp_path / "run/what_if.json").write_text(text)
        assert cli.main(["inspect", str(tmp_path / "run")]) == 2
        assert "holds no what-if: write one by octavo inspect MODEL --json FILE" in capsys.readouterr().err


def test_a_training_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "run")
    looks = iter([lambda: None, lambda: record(tmp_path / "run", range(2, 3))])

    def sleep(seconds: float) -> None:
        look = next(looks, None)
        if look is None:
            raise KeyboardInterrupt
        look()

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert cli.main(["inspect", str(tmp_path / "run"), "--live"]) == 0
    out = capsys.readouterr().out
    assert [line[:42] for line in out.splitlines() if "of the steps" in line] == [
        "1 layers, 2 of the steps 0 to 1 recorded, ",
        "1 layers, 3 of the steps 0 to 2 recorded, ",
    ]


MODULE = """
import torch

def training():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    return model, lambda model, batch: model(batch).square().mean(), [torch.randn(8, 32)]

def pair():
    return torch.nn.Linear(2, 2), 3

def nothing():
    pass

def one_batch():
    return torch.nn.Linear(2, 2), int, 3

def imports_late():
    import what_if_helper
    return what_if_helper.subject

number = 3
"""


def options(*arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser.parse_args(["model", *arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "what_if_user.py").write_text(MODULE)
    (tmp_path / "what_if_broken.py").write_text("import there_is_no_such_module")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("what_if_user", "no folder of a record or a run; of a model give module:function"),
        (":training", "give module:function"),
        ("what_if_absent:training", "can't import what_if_absent: No module named 'what_if_absent'"),
        ("what_if_broken:training", "can't import what_if_broken: No module named 'there_is_no_such_module'"),
        ("what_if_user:trainig", "what_if_user has no function trainig"),
        ("what_if_user:number", "has no function number"),
        ("what_if_user:pair", r"must return \(model, loss, batches\) .* returned \(Linear, int\)"),
        ("what_if_user:nothing", "returned NoneType"),
        ("what_if_user:one_batch", r"must return \(model, loss, batches\) .* returned \(Linear, type, int\)"),
    ],
)
def test_wrong_entry_points(folder, name, says):
    with pytest.raises(WhatIfError, match=says):
        entry_point(name)


def test_the_function_itself_may_import_from_the_current_folder(folder, monkeypatch):
    (folder / "what_if_helper.py").write_text("import torch\nsubject = torch.nn.Linear(2, 2), int, []")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    path = [*sys.path]
    assert isinstance(entry_point("what_if_user:imports_late").model, nn.Linear) and sys.path == path


@pytest.mark.parametrize("budget", [("--keep", "1"), ("--loss", "0.01%")])
def test_it_writes_a_map_that_converts_the_model(folder, capsys, budget):
    subject = entry_point("what_if_user:training")
    arguments = options(
        "--recipes", "dynamic,mx", "--min-features", "16", "--write", "map.json", "--device", "H200", *budget
    )
    assert what_if_command(arguments, subject) == 0
    printed, written = capsys.readouterr().out, (folder / "map.json").read_text()
    how = "wrote map.json: octavo.convert(model, 'map.json')"
    for text in (written, "(all layers)", "mx", "measured with it", "NVIDIA H200", " us a batch, predicted loss", how):
        assert text in printed
    model = subject.model
    assert type(model[0]) is nn.Linear
    octavo.convert(model, "map.json", lambda *_: True)
    names = [model[i].recipe.name for i in (0, 2)]
    assert names.count("high_precision") == 1 or "--loss" in budget
    assert isinstance(model[0], octavo.nn.Linear) and isinstance(model[2], octavo.nn.Linear)


def test_without_a_budget_it_shows_and_writes_for_the_page_of_a_record(folder, capsys):
    (folder / "record").mkdir()
    subject = entry_point("what_if_user:training")
    assert what_if_command(options("--min-features", "16"), subject, folder / "record") == 0
    printed, names = capsys.readouterr().out, ("dynamic", "delayed", "rowwise", "blockwise", "mx")
    assert all(name in printed for name in names) and "rules" not in printed and "wrote" in printed
    rows = json.loads((folder / "record/what_if.json").read_text())["what_if"]
    assert [(row["recipe"], row["layer"]) for row in rows[:6]] == [*((name, "") for name in names), ("dynamic", "0")]
    assert all(row["predicted"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recipes", "dynamic,fast"], "no recipe 'fast'; there are dynamic, delayed"),
        (["--loss", "much"], "'much' is no share: such as 0.1% or 0.001"),
        (["--loss=-1%"], "is no share"),
        (["--loss", "150%"], "is no share"),
        (["--keep", "2", "--loss", "1%"], "not allowed with"),
        (["--keep", "-1"], "argument --keep: invalid value: '-1' .choose a whole number from 0 on"),
        (["--runs", "-2"], "argument --runs: invalid value: '-2'"),
        (["--min-features", "0"], "argument --min-features: invalid value: '0' .choose a whole number from 1 on"),
    ],
)
def test_wrong_options(arguments, says):
    with pytest.raises(argparse.ArgumentError, match=says):
        options(*arguments)
    assert options("--loss", "0.1%").loss == pytest.approx(options("--loss", "0.001").loss) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--write", "x.json"], "needs a budget"),
        (["--device", "TPU"], "nothing is published of 'TPU'"),
        ([], "no layer to compare"),
    ],
)
def test_what_can_not_be_done(arguments, says):
    subject = Subject(nn.Linear(4, 4), lambda model, x: model(x).sum(), [torch.ones(1, 4)])
    with pytest.raises(octavo.OctavoError, match=says):
        what_if_command(options(*arguments), subject)


def test_what_a_files_rules_would_bring(folder, capsys):
    """A file's rules are compared with the model's own recipes; a layer that has none is left out."""
    torch.manual_seed(0)
    subject = entry_point("what_if_user:training")
    octavo.convert(subject.model, octavo.recipes.dynamic(), lambda module, name: name == "0")
    subject = subject._replace(batches=[torch.randn(8, 32) * torch.logspace(0, 9, 32)])  # wide: worse with one scale
    (folder / "mine.json").write_text('{"default": "mx", "rules": {"0": {"output": null}}}')
    assert what_if_command(options("--rules", "mine.json"), subject, folder) == 0
    out = capsys.readouterr().out
    columns = {line.split("  ")[0]: line.split() for line in out.partition("high precision   ")[2].splitlines()[1:]}
    assert float(columns["its own"][2]) > float(columns["mine.json"][1]) > 0 and not (folder / "what_if.json").exists()
    assert "exact" in out and "\n2 " not in out
    (folder / "mine.json").write_text('{"default": "mx", "rules": {"head": null}}')
    with pytest.raises(WhatIfError, match=r"mine.json: no module of the model is called head"):
        what_if_command(options("--rules", "mine.json"), subject)
    (folder / "mine.json").write_text('{"default": "mxx"}')
    with pytest.raises(WhatIfError, match=r"mine\.json holds no recipes by layer: .*mxx"):
        what_if_command(options("--rules", "mine.json"), subject)


@pytest.mark.parametrize("option", ["--json", "--write"])
def test_a_file_that_can_not_be_is_refused_before_anything_is_computed(option, tmp_path):
    subject = Subject(nn.Linear(64, 64), lambda model, x: 1 / 0, [torch.ones(1, 64)])
    for path in (tmp_path, tmp_path / "no" / "x"):
        with pytest.raises(OSError):
            what_if_command(options("--keep", "1", option, str(path)), subject)


def test_a_place_without_a_folder_is_named_before_the_work(tmp_path: Path) -> None:
    for path, named in ((tmp_path, tmp_path), (tmp_path / "no" / "file", tmp_path / "no")):
        with pytest.raises(OSError) as fault:
            command.file_to_write(str(path))
        assert fault.value.filename == str(named)
    assert command.file_to_write(str(tmp_path / "file")) == tmp_path / "file"
