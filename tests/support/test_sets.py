import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import sets

CELLS = [dict(zip("abcd", values, strict=True)) for values in itertools.product(range(3), "xyzw", [True, 1], range(3))]


def met(cells: list[dict[str, Any]], strength: int) -> set[Any]:
    return {combination for cell in cells for combination in itertools.combinations(cell.items(), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 18), (3, 50)])
def test_all_combinations_occur_in_few_cells(strength: int, most: int) -> None:
    cells = [{**cell, "c": sets._hashable(cell["c"])} for cell in CELLS]
    chosen = sets.covering(cells, strength)
    assert met([cells[index] for index in chosen], strength) == met(cells, strength)
    assert len(chosen) <= most  # of 72
    assert chosen == sets.covering(cells, strength)  # always the same ones


class Item:
    """As much of pytest's as is asked for."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator, **params: Any) -> None:
        self.nodeid, self.marks = nodeid, {mark.name: mark.mark for mark in marks}
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def cells_of(name: str, *marks: pytest.MarkDecorator) -> list[Item]:
    return [Item(f"{name}[{a}-{b}]", *marks, a=a, b=[b]) for a in range(4) for b in range(3)]


def test_the_default_set() -> None:
    full, once = pytest.mark.full, pytest.mark.covering(1)
    items = [Item("a.py::one"), Item("a.py::two", full)]
    items += cells_of("a.py::pairs") + cells_of("a.py::once", once) + cells_of("a.py::none", full)
    found = Counter(item.nodeid.partition("[")[0] for item in sets.default_set(items))
    assert found == {"a.py::one": 1, "a.py::pairs": 12, "a.py::once": 4}


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Four files whose seconds are known."""
    (tmp_path / "tests").mkdir()
    for name in "abcd":
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(sets, "SECONDS_FILE", tmp_path / "tests/seconds.csv")
    sets.write_seconds({"a.py": 9.0, "b.py": 5.0, "c.py": 4.0, "d.py": 1.0, "gone.py": 7.0})
    return tmp_path


def test_seconds_are_kept_by_file(seconds: Path) -> None:
    sets.write_seconds({"d.py": 2.04})
    assert sets.known_seconds() == {"a.py": 9.0, "b.py": 5.0, "c.py": 4.0, "d.py": 2.0}
    assert sets.seconds_of_part("1/2") == 10


def test_parts_take_equally_long_and_hold_everything(seconds: Path) -> None:
    items = [Item(f"{name}.py::{index}") for name in "abcd" for index in range(2)]
    parts = [sets.part(items, f"{number}/2") for number in (1, 2)]
    assert [sorted({sets.file_of(item) for item in part}) for part in parts] == [["a.py", "d.py"], ["b.py", "c.py"]]
    assert sorted(item.nodeid for part in parts for item in part) == sorted(item.nodeid for item in items)


def test_cheap_files_come_first(seconds: Path) -> None:
    items = [Item("a.py::0"), Item("new.py::0"), *(Item(f"b.py::{index}") for index in range(100)), Item("d.py::0")]
    assert [*dict.fromkeys(map(sets.file_of, sets.cheapest_first(items)))] == ["b.py", "new.py", "d.py", "a.py"]


@pytest.mark.parametrize("which", ["0/2", "3/2", "2", "a/b", "-1/2"])
def test_a_part_that_is_none(which: str) -> None:
    with pytest.raises(ValueError, match="K/N"):
        sets.parse_part(which)
