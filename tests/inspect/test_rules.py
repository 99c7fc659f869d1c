"""The table of rules is whole: each row has a kind that incidents know, and its test gets all rows that name it."""

import inspect
import itertools
import re

from octavo.inspect import training
from octavo.inspect.incidents import KINDS
from octavo.inspect.rules import RULES
from octavo.inspect.training import Hit

HITS = "Iterator[Hit]"  # what a rule's test returns


def test_each_test_takes_the_rows_that_name_it() -> None:
    groups = [(test, dict(rows)) for test, rows in itertools.groupby(RULES.items(), key=lambda row: row[1].test)]
    assert len({test for test, _ in groups}) == len(groups), "rows of one test stand beside each other"
    for test, rows in groups:
        inspect.signature(test).bind("a training", **rows)
    origins = {name for name, rule in RULES.items() if rule.test is training.first_nonfinite}
    assert origins == set(re.findall(r'"(made_\w+)"', inspect.getsource(training)))
    assert {rule.kind for rule in RULES.values()} <= KINDS.keys()


def test_a_rule_can_say_its_level() -> None:
    rule = next(rule for rule in RULES.values() if rule.kind == "frozen")
    hit = Hit(rule, 3, 4.0, {"others": ""}, ("head", "weight"))
    noted = hit._replace(rule=rule._replace(level="note")).finding()
    assert (hit.finding().level, noted.level) == ("warning", "note") and noted.sentence == hit.finding().sentence


def test_each_test_and_each_kind_has_a_row() -> None:
    """No test of training.py is left out; kinds with a limit are casts', which findings.py tests."""
    tests = {test for test in vars(training).values() if getattr(test, "__annotations__", {}).get("return") == HITS}
    assert len(tests) > 20 and tests == {rule.test for rule in RULES.values()}
    assert {kind for kind, each in KINDS.items() if each.limit is None} <= {rule.kind for rule in RULES.values()}
