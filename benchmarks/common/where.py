"""A page's table of recipes and GPUs, made of the code that chooses products; nothing is measured."""

from __future__ import annotations

from benchmarks.common.pages import markdown
from octavo import recipes
from octavo.nn.where import ARCHITECTURES, kernels_and_loss


def where_table() -> str:
    """Return the table of docs/guides/which-recipe.md: architectures with the same products share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    in_fp8 = [name for name in recipes.NAMED if name != "high_precision"]
    for name in in_fp8:
        for architecture, capability in ARCHITECTURES.items():
            description = kernels_and_loss(getattr(recipes, name)(), capability)
            rows.setdefault((f"`{name}()`", *description), []).append(architecture)
    header = ("recipe", "on", "its products are", "main slowdown")
    return markdown(header, ((name, ", ".join(on), who, loss) for (name, who, loss), on in rows.items()))


TABLES = {"where": where_table}
