"""The memory of a training by kind, each choice on top of the one before."""

from __future__ import annotations

from benchmarks.common.pages import read
from benchmarks.pictures.svg import SMALL, WIDTH, Picture, ticks
from benchmarks.training.memory_kinds import KINDS

LEFT, RIGHT = 16.0, WIDTH - 52.0
GB = 1e9


def memory() -> str:
    """Draw a bar for each variant, in gigabytes."""
    rows = read("memory_kinds")
    totals = [sum(int(row[kind]) for kind in KINDS) / GB for row in rows]
    parameters = int(rows[0]["parameters"]) / GB
    pitch, top = 50.0, 58.0
    bottom = top + pitch * len(rows)
    picture = Picture(bottom + 104, "The memory of a training by kind")
    picture.text(16, 28, f"Memory of a training, {parameters:.0f} billion parameters, GB", font_weight="700")
    by_unit = (RIGHT - LEFT) / max(totals)
    for value in ticks(0, max(totals)):
        x = LEFT + value * by_unit
        picture.path([(x, top - 12), (x, bottom)], "rule", 1)
        picture.text(x, bottom + 17, f"{value:.0f}", "soft", SMALL, text_anchor="middle")
    for place, (row, total) in enumerate(zip(rows, totals, strict=True)):
        x, y = LEFT, top + pitch * place
        picture.text(LEFT, y + 10, row["variant"], size=SMALL)
        for kind, name in enumerate(KINDS):
            width = int(row[name]) / GB * by_unit
            picture.rect(x, y + 16, width, 22, f"series{kind}")
            x += width
        picture.text(x + 6, y + 32, f"{total:.0f}", size=SMALL, font_weight="600")
    for place, name in enumerate(KINDS):
        x, y = 16 + 140 * (place % 3), bottom + 44 + 22 * (place // 3)
        picture.rect(x, y - 11, 16, 14, f"series{place}")
        picture.text(x + 23, y, name, size=SMALL)
    picture.text(16, bottom + 92, "Blocks of Llama 3 8B, 4,096 tokens; planned, not measured", "soft", SMALL)
    return str(picture)
