"""Tables as text: a wide one goes on below."""

from __future__ import annotations

from octavo.cost.text import folded


def test_a_wide_table_goes_on_below() -> None:
    rows = [["step", *(f"column {place}" for place in range(12))], ["bf16", *"abcdefghijkl"]]
    one, other = (table.splitlines() for table in folded(rows).split("\n\n"))
    assert max(map(len, (*one, *other))) <= 100 and one[1].split()[0] == other[1].split()[0] == "bf16"
    assert [*one[1].split()[1:], *other[1].split()[1:]] == [*"abcdefghijkl"]
