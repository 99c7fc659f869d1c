"""Casts of a tensor as it is: each equals its reference."""

from types import ModuleType

import pytest

from octavo.tune.plain_cases import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_kernel_and_reference(tuner: ModuleType, name: str) -> None:
    assert tuner.cases.wrong(name, tuner.cases.inputs(48, 128, 1)[0]) == ""


def test_weights_of_uneven_heights_are_all_rows(tuner: ModuleType) -> None:
    (x,) = tuner.cases.inputs(48, 16, 1)
    _, xs, q, t, *_ = tuner.cases.CASES["five weights at once"].arguments(x)
    assert [len(piece) for piece in xs] == [3, 6, 9, 12, 18] and [w.shape for w in q] == [w.t().shape for w in t]
