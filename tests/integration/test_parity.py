"""The arithmetic of the experiment of loss parity, against tables of Student's distribution and rows of known gaps."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("triton")
parity = importlib.import_module("benchmarks.training.parity")

# Student's t below which 95 % lie, by degrees of freedom: any printed table.
TABLE = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 10: 1.812, 11: 1.796, 30: 1.697}


def rows_of(losses: dict[tuple[str, int, int], float]) -> list[dict[str, str]]:
    """Return rows of the experiment's runs, by experiment, bytes a parameter and seed."""
    columns, size = ("experiment", "size", "seed", "steps", "val_loss"), parity.PARITY
    rows = [(name, size, seed, parity.parity_steps(length), loss) for (name, length, seed), loss in losses.items()]
    return [dict(zip(columns, map(str, row), strict=True)) for row in rows]


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_table(freedom: int) -> None:
    assert parity.quantile(0.95, freedom) == pytest.approx(TABLE[freedom], abs=6e-4)
    assert parity.student(TABLE[freedom], freedom) == pytest.approx(0.95, abs=1e-4)
    assert parity.student(-TABLE[freedom], freedom) == pytest.approx(0.05, abs=1e-4)


def test_both_sides_of_the_interval_decide() -> None:
    """Of five seeds 0.1 to 0.5 the mean is 0.3, its standard error 0.0707, and t 2.132."""
    gaps = [0.1, 0.2, 0.3, 0.4, 0.5]
    within = parity.Paired(dict(enumerate(gaps)))
    assert (within.mean, within.half) == (pytest.approx(0.3), pytest.approx(0.1507, abs=1e-4))
    assert within.within and within.above and str(within) == "+0.30 ± 0.15"
    mirrored = parity.Paired({seed: -gap for seed, gap in enumerate(gaps)})
    assert mirrored.within and not mirrored.above
    for beyond in (0.06, -0.66):  # the interval's end is at ± 0.51
        assert not parity.Paired({seed: gap + beyond for seed, gap in enumerate(gaps)}).within
    one = parity.Paired({0: 0.1})
    assert not one.within and not one.above and str(one) == "+0.10"


def test_gaps_are_of_pairs_of_one_seed_and_length() -> None:
    losses = {("bf16", 20, 0): 2.0, ("dynamic", 20, 0): 2.02, ("bf16", 20, 1): 4.0, ("dynamic", 20, 1): 4.12}
    losses |= {("bf16", 5, 0): 8.0, ("dynamic", 5, 0): 8.04, ("dynamic", 20, 2): 9.0, ("bf16", 10, 2): 1.0}
    experiment = parity.Losses([*rows_of(losses), rows_of({("dynamic", 20, 0): 99.0})[0] | {"size": "0.5M"}])
    assert experiment.gap("dynamic").by_seed == pytest.approx({0: 1.0, 1: 3.0})
    assert experiment.gap("dynamic", 5).by_seed == pytest.approx({0: 0.5})
    assert experiment.growth("dynamic").by_seed == pytest.approx({0: 0.25})
    assert not experiment.gap("blockwise").by_seed


def test_three_lengths_have_the_slope_of_their_ends() -> None:
    assert [length / parity.SHORTER[-1] for length in (*parity.SHORTER[::-1], parity.LONGEST)] == [1, 2, 4]
