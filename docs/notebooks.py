"""Notebooks: `python docs/notebooks.py [NAME...]` runs docs/notebooks/NAME.py and writes NAME.ipynb with what it shows.

In the sources `# %%` begins a cell of code and `# %% [markdown]` one of text, as editors know it. The site renders the
.ipynb files; tests compare their cells with the sources, and in the full set run them.
"""

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().with_name("notebooks")
Cell = dict[str, Any]


def cells_of(source: str) -> list[Cell]:
    """The cells of a source, without outputs."""
    found: list[Cell] = []
    for number, part in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)[1:]):
        heading, _, body = part.partition("\n")
        text = body.strip("\n")
        cell: Cell = {"id": f"cell-{number}", "metadata": {}}
        if "[markdown]" in heading:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
            cell |= {"cell_type": "markdown"}
        else:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        found.append(cell | {"source": text.splitlines(keepends=True)})
    return found


def pictures() -> list[Cell]:
    """The open figures as outputs; they are closed."""
    import matplotlib.pyplot as plt

    found: list[Cell] = []
    for number in plt.get_fignums():
        written = io.BytesIO()
        plt.figure(number).savefig(written, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(written.getvalue()).decode()}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return found


def run(cells: list[Cell]) -> list[Cell]:
    """The same cells with what they print and draw; an error is raised."""
    import matplotlib as mpl

    mpl.use("agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    done: list[Cell] = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            code = compile(ast.parse("".join(cell["source"])), f"cell {number}", "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
            text = printed.getvalue().splitlines(keepends=True)
            stream = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
            cell = cell | {"outputs": [*stream, *pictures()]}
        done.append(cell)
    return done


def written(cells: list[Cell]) -> str:
    """A notebook of these cells, as its file has it."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def as_markdown(notebook: str, name: str) -> str:
    """A notebook as a page."""
    parts: list[str] = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\((\w+)\.ipynb\)", r"(\1.md)", source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            else:
                parts.append(f"![what the cell draws](data:image/png;base64,{output['data']['image/png']})")
    parts.insert(1, f"[The notebook]({name}.ipynb), to run it yourself.")
    return "\n\n".join(parts) + "\n"


def main(names: list[str]) -> None:
    """Run the named notebooks, or all."""
    for source in [FOLDER / f"{name}.py" for name in names] or sorted(FOLDER.glob("*.py")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            cells = run(cells_of(source.read_text(encoding="utf-8")))
        source.with_suffix(".ipynb").write_text(written(cells), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
