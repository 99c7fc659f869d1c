import pytest

from octavo.train import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig, run
from tests.support.command_line import TEXT


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text(TEXT)
    return tmp_path


@pytest.fixture
def no_plot(monkeypatch):
    """Training draws nothing, which takes longer than the training here."""
    monkeypatch.setattr("octavo.train.report.plot", lambda results, path: None)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with text.py and a finished run of delayed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.py").write_text(TEXT)
    sizes = ModelConfig(width=16, layers=1, heads=2, context=32)
    options = RunConfig(out=folder / "runs", device="cpu", eval_every=0)
    data = DataConfig(folder / "text.py", batch=2, eval_windows=2)
    run(TrainConfig(sizes, data, OptimizerConfig(steps=6), options), "delayed")
    return folder
