"""A small set of cases that covers every pair of options, where all combinations would be too many."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.sets import covering


def all_pairs(**options: Sequence[Any]) -> list[dict[str, Any]]:
    """Return cases such that any value of one option occurs with any value of another; always the same ones."""
    choices = [[(name, i) for i in range(len(values))] for name, values in options.items()]
    uncovered = {frozenset(pair) for a, b in itertools.combinations(choices, 2) for pair in itertools.product(a, b)}
    shuffle, cases = random.Random(0), []
    while uncovered:
        case = set(min(uncovered, key=sorted))
        unset = [c for c in choices if not case & {*c}]
        shuffle.shuffle(unset)
        for values in unset:
            case.add(max(values, key=lambda v: (sum(frozenset((v, c)) in uncovered for c in case), shuffle.random())))
        uncovered -= {frozenset(pair) for pair in itertools.combinations(case, 2)}
        cases.append({name: options[name][i] for name, i in sorted(case, key=lambda c: [*options].index(c[0]))})
    return cases


def dealt(seed: int, count: int, **options: Sequence[Any]) -> list[dict[str, Any]]:
    """Return cases in which an option's values occur equally often, any value with any of another's."""
    shuffle, cases = random.Random(seed), [dict[str, Any]() for _ in range(count)]
    for name, values in options.items():
        decks = (shuffle.sample(values, len(values)) for _ in itertools.count())
        for case, value in zip(cases, itertools.chain.from_iterable(decks), strict=False):
            case[name] = value
    return cases


def each_pair(**options: Sequence[Any]) -> pytest.MarkDecorator:
    """Return a parametrisation by these cases, as ``case``; by default as few as contain each value."""
    cases = all_pairs(**options)
    named = [{name: _short(value) for name, value in case.items()} for case in cases]
    by_default = {*covering(named, 1)}
    params = [
        pytest.param(case, marks=[] if at in by_default else [pytest.mark.full], id="-".join(named[at].values()))
        for at, case in enumerate(cases)
    ]
    return pytest.mark.parametrize("case", params)


def in_full(*cases: Sequence[Any]) -> list[Any]:
    """Return cases of several parameters that only the full set has."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")
