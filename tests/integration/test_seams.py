"""Every feature in every situation: each cell of the table has docs/combinations.md's verdict.

The lists are in tests/support/seams; a cell is built by one function from a feature and a situation.
"""

import pytest
import torch

from tests.support.seams import cells
from tests.support.seams.cells import OPEN
from tests.support.seams.features import FEATURES
from tests.support.seams.mutants import MUTANTS, ROOT
from tests.support.seams.page import PAGE, page
from tests.support.seams.situations import SITUATIONS, Documented
from tests.test_docs import broken_link

SAMPLE = cells.sample()
# situations that an older torch fails by itself: it can't split the backward of an autograd.Function, and its Adam asks
# for the value of a step count that a default device of "meta" makes
NEEDS_TORCH_2_13 = ("pipeline, zero-bubble", "another default dtype and device")
IS_OLDER = torch.__version__ < "2.13"


def params(on_ranks):
    cells_of_kind = []
    for cell in cells.all_cells():
        if bool(SITUATIONS[cell[1]].ranks) == on_ranks:
            marks = [] if cell in SAMPLE else [pytest.mark.full]
            if cell[1].startswith(NEEDS_TORCH_2_13):
                marks.append(pytest.mark.skipif(IS_OLDER, reason=f"torch {torch.__version__} fails {cell[1]}"))
            if cell in OPEN:
                marks.append(pytest.mark.xfail(strict=True, reason=OPEN[cell]))
            cells_of_kind.append(pytest.param(cell, marks=marks, id=" x ".join(cell)))
    return cells_of_kind


@pytest.mark.parametrize("cell", params(on_ranks=False))
def test_in_one_process(cell):
    assert cells.fault(None, *cell) == ""


@pytest.mark.parametrize("cell", params(on_ranks=True))
def test_on_ranks(pool, cell):
    assert {*pool.run(cells.fault, SITUATIONS[cell[1]].ranks, *cell, seconds=60)} == {""}


def test_names_are_of_the_table():
    """An exception or a defect of a cell that is not there holds nothing."""
    assert all(situation.exceptions.keys() <= FEATURES.keys() for situation in SITUATIONS.values())
    assert OPEN.keys() <= set(cells.all_cells())


def test_mutants_are_of_the_source_and_of_the_table():
    """``python -m tests.support.seams.mutants`` runs them."""
    texts = {mutant: (ROOT / "octavo" / mutant.file).read_text(encoding="utf-8") for mutant in MUTANTS}
    assert [mutant for mutant, text in texts.items() if text.count(mutant.old) != 1] == []
    assert {(mutant.feature, mutant.situation) for mutant in MUTANTS} <= set(cells.all_cells()) - OPEN.keys()
    assert len(MUTANTS) >= 30


def test_the_sample_covers():
    features = [feature for feature, _ in SAMPLE]
    assert all(features.count(feature) >= 2 for feature in FEATURES if FEATURES[feature].alone is None)
    assert {situation for _, situation in SAMPLE} == {name for name, one in SITUATIONS.items() if not one.slow}


def test_links_lead_somewhere():
    verdicts = {cells.verdict_of(cell) for cell in cells.all_cells()}
    assert [broken_link(PAGE, v.link) for v in verdicts if isinstance(v, Documented) if broken_link(PAGE, v.link)] == []


def test_the_page_is_of_the_table():
    """``python -m tests.support.seams.page`` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()
