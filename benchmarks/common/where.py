"""Which recipe runs where, as a page's table: made of the code that chooses, so nothing is measured."""

from __future__ import annotations

from benchmarks.common.pages import markdown
from octavo import recipes
from octavo.nn.where import ARCHITECTURES, described


def where_table() -> str:
    """Of docs/guides/which-recipe.md: a recipe's architectures together where the same holds."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name in recipes.NAMED[1:-1]:  # default is one of the others, and high_precision has no product in FP8
        for architecture, capability in ARCHITECTURES.items():
            found = described(getattr(recipes, name)(), capability)
            rows.setdefault((f"`{name}()`", *found), []).append(architecture)
    header = ("recipe", "on", "its products are", "lost first")
    return markdown(header, ((name, ", ".join(on), who, loss) for (name, who, loss), on in rows.items()))


TABLES = {"where": where_table}
