"""The lint of what upper rooms take from below sees each way to take a name."""

import textwrap

import pytest

from tests.support import seam


def taken(source: str) -> set[str]:
    return {name for _, name in seam.taken(textwrap.dedent(source))}


@pytest.mark.parametrize(
    "source",
    [
        "from octavo.errors import first_line",
        "from octavo.errors import first_line as line",
        "def read():\n    from octavo.errors import first_line",
        "from octavo import errors\nerrors.first_line(error)",
        "import octavo.errors\nx = octavo.errors.first_line(error).strip()",
        "import octavo.errors as e\ne.first_line(error)",
        'import importlib\ne = importlib.import_module("octavo.errors")\ne.first_line(error)',
        "from octavo.errors import OctavoError, first_line",
    ],
)
def test_a_private_name_is_seen(source: str) -> None:
    assert taken(source) == {"errors.first_line"}


def test_public_names_and_those_of_upper_rooms_are_free() -> None:
    source = """
        import octavo
        from octavo import E4M3, recipes
        from octavo.cost.text import columns
        from octavo.errors import OctavoError
        from octavo.scaling.recipe import Recipe
        octavo.nn.Linear(8, 8, recipe=recipes.delayed())
        print(octavo.__version__)
    """
    assert taken(source) == set()


def test_a_name_that_is_passed_on_counts_where_it_is_defined() -> None:
    assert taken("from octavo.autograd.casts import State") == {"scaling.delayed.State"}


def test_a_name_that_is_not_listed_or_not_taken_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "UPPER", ("compat",))
    monkeypatch.setattr(seam, "SEAM", {"errors": "first_line"})
    monkeypatch.setattr(seam, "MOST", 0)
    *lines, unused, too_many = seam.faults()
    assert any("octavo.nn.candidates.Select is neither public nor in SEAM: use a public" in line for line in lines)
    assert unused == "SEAM has octavo.errors.first_line, which no upper room takes: leave it out"
    assert too_many.startswith("SEAM has 1 names, and may have 0: ")
