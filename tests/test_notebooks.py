"""The notebooks: committed ones have their sources' cells, and each runs within a minute."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run_python

SOURCES = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
_spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_committed_notebook_has_the_sources_cells(source: Path) -> None:
    committed = json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    cells = notebooks.cells_of(source.read_text(encoding="utf-8"))
    assert [cell | {"outputs": []} if "outputs" in cell else cell for cell in committed] == cells, (
        f"run: python docs/notebooks.py {source.stem}"
    )
    assert any(cell.get("outputs") for cell in committed)


@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_runs_within_a_minute_of_a_core(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notebooks.py").write_text((ROOT / "docs" / "notebooks.py").read_text(encoding="utf-8"))
    (tmp_path / "notebooks").mkdir()
    copied = tmp_path / "notebooks" / source.name
    copied.write_text(source.read_text(encoding="utf-8"))
    code = """if True:
        import runpy, sys, time
        sys.argv = ["notebooks.py"]
        runpy.run_path("notebooks.py", run_name="__main__")
        assert time.process_time() < 60, time.process_time()"""
    result = run_python("-W", "error::UserWarning", "-c", code, cwd=tmp_path, timeout=600)
    assert result.returncode == 0, result.stderr
    assert '"stdout"' in copied.with_suffix(".ipynb").read_text(encoding="utf-8")


def test_cells_and_pages() -> None:
    source = "# %% [markdown]\n# # Title\n#\n# [next](two.ipynb)\n\n# %%\nprint(1 + 1)\n"
    cells = notebooks.run(notebooks.cells_of(source))
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code"]
    assert cells[1]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["2\n"]}]
    page = notebooks.as_markdown(notebooks.written(cells), "one")
    assert page.split("\n\n")[0] == "# Title" and "[next](two.md)" in page and "```text\n2\n```" in page
