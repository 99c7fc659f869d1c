"""Cells whose verdict does not hold yet, each with what shows the defect; to be emptied."""

OPEN: dict[tuple[str, str], str] = {}
