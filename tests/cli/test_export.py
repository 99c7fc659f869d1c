import json
import shutil
from pathlib import Path

import pytest
import torch

from octavo import cli
from tests.support.command_line import one_line


def exported(capsys):
    """Export a run, and check the messages about the file and about its check."""
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


def test_export_of_weights_that_servers_read(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    assert cli.main(["export", "runs/delayed", "--safetensors", "served"]) == 0
    assert capsys.readouterr().out.startswith("wrote served: ")
    assert json.loads(Path("served/config.json").read_text())["quantization_config"]["format"] == "float-quantized"
    shutil.rmtree("served")


@pytest.mark.full
def test_export_writes_a_file_that_onnxruntime_runs(trained, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(trained)
    checked = exported(capsys)
    assert float(checked.split("SQNR ")[1].split(" dB")[0]) >= 30
    parts = checked.split("loss ")[1], checked.split("octavo ")[1]
    theirs, ours = (float(part.split()[0].rstrip(")")) for part in parts)
    assert abs(theirs / ours - 1) <= 1e-3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no", "--onnx", "m.onnx"], "no does not exist"),
        (["runs/delayed", "--onnx", "no/m.onnx"], "the folder no does not exist"),
        (
            ["runs/delayed", "--onnx", "m.onnx", "--layout", "mxfp8"],
            "--layout would change nothing here: only --safetens",
        ),
        (
            ["runs/delayed", "--safetensors", "served", "--opset", "21", "--data", "text.py"],
            "--opset, --data would change",
        ),
        (["runs/delayed", "--onnx", "m.onnx", "--opset", "3"], "opset=3: use 21 to 24"),
        (["runs/delayed", "--onnx", "m.onnx", "--data", "none"], "none"),
        (["runs/delayed", "--safetensors", "served", "--layout", "mxfp8"], "layout='compressed-tensors' holds those"),
    ],
)
def test_an_export_that_fails_is_one_line_and_writes_nothing(arguments, says, trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    before = sorted(trained.rglob("*"))
    data = [] if "--data" in arguments or "--safetensors" in arguments else ["--data", "text.py"]
    assert cli.main(["export", *data, *arguments]) == 2
    assert says in one_line(capsys)
    assert sorted(trained.rglob("*")) == before
