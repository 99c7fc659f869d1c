import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import octavo
from octavo import cli
from octavo.train import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig, run
from tests.support.command_line import TEXT, one_line, train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with text.py and a finished run of delayed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.py").write_text(TEXT)
    sizes = ModelConfig(width=16, layers=1, heads=2, context=32)
    options = RunConfig(out=folder / "runs", device="cpu", eval_every=0)
    data = DataConfig(folder / "text.py", batch=2, eval_windows=2)
    run(TrainConfig(sizes, data, OptimizerConfig(steps=6), options), "delayed")
    return folder


def exported(capsys):
    """Exports the run; what is said of the file, and of its check."""
    assert cli.main(["export", "runs/delayed", "--onnx", "m.onnx", "--data", "text.py"]) == 0
    wrote, checked = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote m.onnx: {Path('m.onnx').stat().st_size:,} bytes, ")
    Path("m.onnx").unlink()
    return checked


def test_export_checks_what_it_wrote(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    seen = []

    def write(model, inputs, path, opset, weights):
        seen.append((model, opset, weights))
        path.write_bytes(b"ONNX")
        return path

    monkeypatch.setattr("octavo.export.to_onnx", write)
    monkeypatch.setattr("octavo.export.sqnr_in_onnxruntime", lambda model, tokens, path: 41.5)
    monkeypatch.setattr("octavo.export.run_onnx", lambda path, tokens: [torch.zeros(*tokens.shape, 256)])
    assert "SQNR 41.5 dB, validation loss 5.5452 nats a byte (octavo " in exported(capsys)
    assert [(opset, weights) for _, opset, weights in seen] == [(21, torch.bfloat16)] and not seen[0][0].training


@pytest.mark.parametrize("source", ["runs", "runs/delayed/checkpoint.pt"])
def test_what_if_of_a_run(source, trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    given = ["--recipes", "delayed", "--device", "H100", "--data", "text.py", "--keep", "1"]
    assert cli.main(["inspect", source, *given]) == 0
    out = capsys.readouterr().out
    assert "blocks.0.mlp.fc1" in out and '"default": "delayed"' in out and "head" not in out


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


def test_what_if_of_a_users_model(folder, capsys):
    lines = "import torch", "def job():", "    model = torch.nn.Linear(16, 16)"
    (folder / "users_job.py").write_text(
        "\n".join([*lines, "    return model, lambda m, x: m(x).sum(), [torch.ones(1, 16)]"])
    )
    assert cli.main(["inspect", "users_job:job", "--min-features", "16", "--recipes", "mx"]) == 0
    assert "(all layers)" in capsys.readouterr().out
    for source, says in (
        ("users_job:jib", "has no function jib"),
        ("runs", "module:function"),
        (".", "holds no record"),
    ):
        assert cli.main(["inspect", source]) == 2
        assert says in one_line(capsys)


def test_the_pages_what_ifs_run_word_for_word(folder, capsys, no_plot):
    page = (ROOT / "docs/inspect.md").read_text()
    (job,) = re.findall(r"```python\n([^`]*def training.*?)```", page, re.DOTALL)
    (folder / "job.py").write_text(job)
    assert train() == 0
    (commands,) = re.findall(r"```sh\n(octavo inspect job.*?)```", page, re.DOTALL)
    for command in commands.splitlines():
        assert cli.main(shlex.split(command)[1:]) == 0
        assert '"rules": {' in capsys.readouterr().out


@pytest.mark.full
def test_export_writes_a_file_that_onnxruntime_runs(trained, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(trained)
    checked = exported(capsys)
    assert float(checked.split("SQNR ")[1].split(" dB")[0]) >= 30
    theirs, ours = (
        float(part.split()[0].rstrip(")")) for part in (checked.split("loss ")[1], checked.split("octavo ")[1])
    )
    assert abs(theirs / ours - 1) <= 1e-3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no", "--onnx", "m.onnx"], "no does not exist"),
        (["runs/delayed", "--onnx", "no/m.onnx"], "the folder no does not exist"),
        (["runs/delayed", "--onnx", "m.onnx", "--opset", "3"], "opset=3: use 19 to 24"),
        (["runs/delayed", "--onnx", "m.onnx", "--data", "none"], "none"),
    ],
)
def test_an_export_that_fails_is_one_line_and_writes_nothing(arguments, says, trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    before = sorted(trained.rglob("*"))
    assert cli.main(["export", "--data", "text.py", *arguments]) == 2
    assert says in one_line(capsys)
    assert sorted(trained.rglob("*")) == before
