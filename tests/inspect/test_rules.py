"""The table of rules is whole: each row has a kind that incidents know, and its test gets all rows that name it."""

import inspect
import itertools

from octavo.inspect.incidents import KINDS
from octavo.inspect.rules import RULES
from octavo.inspect.training import Hit


def test_each_test_takes_the_rows_that_name_it() -> None:
    groups = [(test, list(rows)) for test, rows in itertools.groupby(RULES, key=lambda rule: rule.test)]
    assert len({test for test, _ in groups}) == len(groups), "rows of one test stand beside each other"
    for test, rows in groups:
        inspect.signature(test).bind("a training", *rows)
    assert {rule.kind for rule in RULES} <= KINDS.keys()


def test_a_rule_can_say_its_level() -> None:
    rule = next(rule for rule in RULES if rule.kind == "frozen")
    hit = Hit(rule, 3, 4.0, {"others": ""}, ("head", "weight"))
    noted = hit._replace(rule=rule._replace(level="note")).finding()
    assert (hit.finding().level, noted.level) == ("warning", "note") and noted.sentence == hit.finding().sentence
