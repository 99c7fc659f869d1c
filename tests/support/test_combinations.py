import itertools

from tests.support.combinations import all_pairs, each_pair

OPTIONS = {"a": [0, 1, 2], "b": ["x", "y", "z", "w"], "c": [True, False], "d": [None], "e": range(3)}


def test_every_pair_occurs_in_few_cases() -> None:
    cases = all_pairs(**OPTIONS)
    for one, other in itertools.combinations(OPTIONS, 2):
        found = {(case[one], case[other]) for case in cases}
        assert found == set(itertools.product(OPTIONS[one], OPTIONS[other]))
    assert all([*case] == [*OPTIONS] for case in cases)
    assert len(cases) <= 16  # 12 at least; all of them are 72


def test_by_default_each_value_occurs() -> None:
    _, params = each_pair(**OPTIONS).args
    usual = [param.values[0] for param in params if not param.marks]
    assert len(usual) < len(params) == len(all_pairs(**OPTIONS))
    assert all(sum(case[name] == value for case in usual) >= 1 for name in OPTIONS for value in OPTIONS[name])
