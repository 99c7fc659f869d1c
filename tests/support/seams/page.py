"""docs/combinations.md, made from the table: ``python -m tests.support.seams.page`` writes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.support.seams.cells import PAGE, verdict_of
from tests.support.seams.features import FEATURES
from tests.support.seams.situations import SITUATIONS, Documented, Exact, Refused, Sound, Verdict

HEAD = """# Every feature in every situation

After this page you know what a feature of octavo does in a situation of a training, alone and on ranks.

A machine wrote this page from the table that the tests hold: `tests/integration/test_seams.py` computes each cell.

| in a cell | means |
|---|---|
| = | bit for bit what a twin computes that keeps nothing: it casts anew at every call, alone or in a pipeline; \
under delayed scaling also at most 6 dB worse than casts by each tensor's own amax, where tensors do not grow |
| 20 dB | outputs and gradients are within so many dB of float64's; below the table is why |
| refused | an error that names the remedy |
| see | below the table is a link |
"""


def shown(verdict: Verdict) -> str:
    return "=" if isinstance(verdict, Exact) else verdict.word


def reason(verdict: Verdict) -> str:
    """A line below the table, without its cells."""
    if isinstance(verdict, Refused):
        return f"`{verdict.error.__name__}`: {verdict.why}"
    if isinstance(verdict, Documented) and not verdict.link.startswith("#"):
        return f"[{verdict.link.partition('.')[0]}]({verdict.link}): {verdict.why}"
    return f"{verdict.db:g} dB: {verdict.why}" if isinstance(verdict, Sound) else verdict.why


def lines() -> Iterator[str]:
    yield HEAD
    for feature in FEATURES.values():
        if feature.alone is not None:
            yield f"{feature.name} on one process: {reason(feature.alone)}.\n"
    for group in dict.fromkeys(situation.group for situation in SITUATIONS.values()):
        members = [situation for situation in SITUATIONS.values() if situation.group == group]
        yield f"## {group}\n"
        yield "| | " + " | ".join(feature.heading or feature.name for feature in FEATURES.values()) + " |"
        yield "|---|" + "---|" * len(FEATURES)
        reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for situation in members:
            verdicts = {feature: verdict_of((feature, situation.name)) for feature in FEATURES}
            yield f"| {situation.name} | " + " | ".join(map(shown, verdicts.values())) + " |"
            for feature, verdict in verdicts.items():
                if (text := reason(verdict)) and verdict is not FEATURES[feature].alone:
                    reasons[text][situation.name].append(feature)
        yield ""
        for text, cells in reasons.items():
            by_features: dict[tuple[str, ...], list[str]] = defaultdict(list)
            for name, features in cells.items():
                by_features[tuple(features)].append(name)
            where = "; ".join(
                f"{', '.join(features)} in {'every situation' if len(names) == len(members) else ', '.join(names)}"
                for features, names in by_features.items()
            )
            yield f"- {where}: {text}"
        yield ""


def page() -> str:
    return "\n".join(lines()).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
