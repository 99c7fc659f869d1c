"""``octavo inspect``."""

import json
from pathlib import Path

import pytest
import torch

import octavo
from octavo import cli
from octavo.inspect import command

pytest.importorskip("numpy")


def record(folder: Path, steps: range = range(2)) -> None:
    layer = octavo.nn.Linear(32, 32)
    with octavo.inspect.record(layer, folder, every=1, step=steps.start) as recorder:
        for _ in steps:
            layer(torch.randn(8, 32)).square().sum().backward()
            recorder.step()


def test_a_record_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    assert cli.main(["inspect", str(tmp_path / "run"), "--json", str(tmp_path / "x.json")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 layers, 2 of the steps 0 to 1 recorded, no findings") and err == ""
    assert json.loads((tmp_path / "x.json").read_text())["steps"] == [0, 1]


def test_what_mends_casts_is_written_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    layer, path = octavo.nn.Linear(32, 32, recipe=octavo.recipes.delayed()), tmp_path / "rules.json"
    with octavo.inspect.record(layer, tmp_path / "run", every=1) as recorder:
        for step in range(6):
            layer(torch.randn(16, 32) * (300 if step == 4 else 1)).square().sum().backward()
            recorder.step()
    json_path = tmp_path / "x.json"
    assert cli.main(["inspect", str(tmp_path / "run"), "--write", str(path), "--json", str(json_path)]) == 0
    assert f"octavo.recipes.load('{path}', DEFAULT)" in capsys.readouterr().out
    found = octavo.inspect.diagnose(octavo.inspect.load(tmp_path / "run"))
    assert found and octavo.recipes.load(path, octavo.recipes.delayed()).rules[""] == found[0].rules[""]
    written = [each["rules"] for each in json.loads(json_path.read_text())["findings"]]
    assert written[0].items() <= json.loads(path.read_text())["rules"].items()


def test_the_page_is_written(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    record(tmp_path / "run")
    assert cli.main(["inspect", str(tmp_path / "run"), "--html", str(tmp_path / "x.html")]) == 0
    assert "octavo inspect: " in (tmp_path / "x.html").read_text()


def test_what_was_found_of_the_model_is_shown_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    row = {"layer": "0", "recipe": "mx", "predicted": 0.01}
    (tmp_path / "run/what_if.json").write_text(json.dumps({"what_if": [row]}))
    assert cli.main(["inspect", str(tmp_path / "run"), "--json", str(tmp_path / "x.json")]) == 0
    assert json.loads((tmp_path / "x.json").read_text())["what_if"] == [row]
    given = ["--json", str(tmp_path / "y.json"), "--what-if", str(tmp_path / "x.json")]
    assert cli.main(["inspect", str(tmp_path / "run"), *given]) == 0
    assert json.loads((tmp_path / "y.json").read_text())["what_if"] == [row]
    for text in ("", "[]", '{"what_if": [1]}'):
        (tmp_path / "run/what_if.json").write_text(text)
        assert cli.main(["inspect", str(tmp_path / "run")]) == 2
        assert "holds no what-if: write one by octavo inspect MODEL --json FILE" in capsys.readouterr().err


def test_options_of_a_model_are_not_for_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    assert cli.main(["inspect", str(tmp_path / "run"), "--keep", "1"]) == 2
    assert "--keep: " in (said := capsys.readouterr().err) and "is a record, and these are for models" in said


def test_a_folder_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "below/run")
    assert cli.main(["inspect", str(tmp_path / "below")]) == 2
    assert f"such as {tmp_path / 'below/run'}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    tmp_path = tmp_path / "empty"
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "holds no record: give the folder that octavo.inspect.record wrote to" in capsys.readouterr().err


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
    assert [line[:42] for line in out.splitlines() if "recorded" in line] == [
        "1 layers, 2 of the steps 0 to 1 recorded, ",
        "1 layers, 3 of the steps 0 to 2 recorded, ",
    ]
