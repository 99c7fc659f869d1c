"""The table of what is tested with other libraries is what the tests are."""

from tests.support.tested import rows, written


def test_the_table_is_true() -> None:
    def without_version(found: list[list[str]]) -> list[list[str]]:
        return [[row[0], row[2]] for row in found]

    assert without_version(written()) == without_version(rows()), "python -m tests.support.tested writes it anew"
