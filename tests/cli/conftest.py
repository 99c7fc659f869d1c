import pytest

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
