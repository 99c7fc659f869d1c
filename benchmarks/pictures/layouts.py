"""A picture of the elements that share a scale, by granularity."""

from __future__ import annotations

import math

from benchmarks.pictures.svg import SMALL, WIDTH, Picture
from octavo.granularity import Granularity, PerBlock, PerRow, PerTensor

SHOWN: dict[Granularity, str] = {
    PerTensor(): "dynamic, delayed",
    PerRow(): "rowwise",
    PerBlock(1, 128): "blockwise: inputs, gradients",
    PerBlock(128, 128): "blockwise: weights",
    PerBlock(1, 32): "mx",
}
SIDE = 256  # rows and columns of the tensor that is drawn
DRAWN = 8  # rows in place of SIDE, where single rows have scales
EDGE = 144.0  # of a drawn tensor


def layouts() -> str:
    """Draw all of SHOWN."""
    pitch = EDGE + 88
    picture = Picture(34 + pitch * math.ceil((len(SHOWN) + 1) / 2) - 8, "Which elements of a tensor share a scale")
    for place, (granularity, recipes) in enumerate(SHOWN.items()):
        left, top = 34 + (place % 2) * WIDTH / 2, 48 + (place // 2) * pitch
        down, across = granularity.scale_shape((SIDE, SIDE))
        drawn = min(down, DRAWN)
        for i in range(drawn):
            for j in range(across):
                shade = (i + j) % 2
                box = left + j * EDGE / across, top + i * EDGE / drawn, EDGE / across, EDGE / drawn
                picture.rect(*box, f"series{shade}")
        count = f"{down * across:,} scale{'s' * (down * across > 1)}"
        picture.text(left, top - 10, f"{granularity}", size=SMALL + 1, font_weight="600")
        picture.text(left, top + EDGE + 18, count, size=SMALL)
        picture.text(left, top + EDGE + 35, recipes, "soft", SMALL)
    left, top = 34 + WIDTH / 2, 48 + 2 * pitch
    words = {0: "One tensor of", 1: f"{SIDE} × {SIDE} each.", 3: "What has one color", 4: "and lies together"}
    words |= {5: "shares one scale.", 7: f"Of {SIDE} rows,", 8: f"{DRAWN} are drawn."}
    for line, line_text in words.items():
        picture.text(left, top + 12 + 17 * line, line_text, "soft", SMALL)
    return str(picture)
