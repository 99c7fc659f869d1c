"""The tests that a run takes, by parametrisation and by seconds."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.support import sets
from tests.support.combinations import all_pairs, each_pair

OPTIONS = {"a": range(3), "b": "xyzw", "c": [True, False], "d": [None], "e": range(3)}


def met(cells, strength):
    return {combination for cell in cells for combination in itertools.combinations(sorted(cell.items()), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 18), (3, 50)])
def test_all_combinations_occur_in_few_cells(strength, most):
    values = itertools.product(range(3), "xyzw", map(sets._hashable, [True, 1]), range(3))
    cells = [dict(zip("abcd", one, strict=True)) for one in values]
    chosen = sets.covering(cells, strength)
    assert met([cells[index] for index in chosen], strength) == met(cells, strength)
    assert len(chosen) <= most  # of 72
    assert chosen == sets.covering(cells, strength)  # always the same ones


def test_every_pair_occurs_in_few_cases_and_by_default_each_value():
    cases, (_, params) = all_pairs(**OPTIONS), each_pair(**OPTIONS).args
    everything = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    assert met(cases, 2) == met(everything, 2) and [*cases[0]] == [*OPTIONS]
    usual = [param.values[0] for param in params if not param.marks]
    assert len(usual) < len(params) == len(cases) <= 16  # 12 at least; all of them are 72
    assert met(usual, 1) == met(everything, 1)


class Item:
    """The attributes of pytest's items that the sets read."""

    def __init__(self, nodeid, *marks, **params):
        self.nodeid, self.callspec = nodeid, SimpleNamespace(params=params)
        self.get_closest_marker = {mark.name: mark.mark for mark in marks}.get


def test_the_default_set():
    full, once = pytest.mark.full, pytest.mark.covering(1)
    items = [Item("a.py::one"), Item("a.py::two", full)]
    for name, marks in {"pairs": (), "once": (once,), "none": (full,)}.items():
        items += [Item(f"a.py::{name}[{a}-{b}]", *marks, a=a, b=[b]) for a in range(4) for b in range(3)]
    counts = Counter(item.nodeid.partition("[")[0] for item in sets.default_set(items))
    assert counts == {"a.py::one": 1, "a.py::pairs": 12, "a.py::once": 4}


def test_a_seed_draws_the_order_of_files_and_of_their_tests():
    items = [Item(f"{file}.py::{index}") for file in "abcdefgh" for index in range(8)]
    first, second = (sets.shuffled(items, seed) for seed in (0, 1))
    assert first == sets.shuffled(items, 0) and {*first} == {*items}
    files = [*map(sets.file_of, first)]
    assert sum(a != b for a, b in itertools.pairwise(files)) == 7  # each file is in one piece
    assert files != [*map(sets.file_of, second)]
    assert [item for item in first if sets.file_of(item) == "a.py"] != items[:8]


def test_parts_take_equally_long_and_cheap_files_come_first(monkeypatch, tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(sets, "SECONDS_FILE", tmp_path / "tests/seconds.csv")
    sets.write_seconds({"a.py": 9.0, "b.py": 5.0, "c.py": 4.0, "d.py": 1.0, "gone.py": 7.0})
    items = [Item(f"{name}.py::{index}") for name in "abcd" for index in range(2)]
    parts = [sets.part(items, f"{number}/2") for number in (1, 2)]
    assert [sorted({sets.file_of(item) for item in part}) for part in parts] == [["a.py", "d.py"], ["b.py", "c.py"]]
    assert sorted(item.nodeid for part in parts for item in part) == sorted(item.nodeid for item in items)
    items = [Item("a.py::0"), Item("new.py::0"), *(Item(f"b.py::{index}") for index in range(100)), Item("d.py::0")]
    assert [*dict.fromkeys(map(sets.file_of, sets.cheapest_first(items)))] == ["b.py", "new.py", "d.py", "a.py"]
    sets.write_seconds({"d.py": 2.04})  # the others stay
    assert sets.known_seconds() == {"a.py": 9.0, "b.py": 5.0, "c.py": 4.0, "d.py": 2.0}
    assert sets.seconds_of_part("1/2") == 10
