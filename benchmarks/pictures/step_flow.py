"""A training step: what computes, what memory holds between, and which of it FP8 makes smaller."""

from __future__ import annotations

from benchmarks.pictures.data_flow import HIGH, LEFT, PAIR, PRODUCT, RIGHT, TALL, WIDE, box
from benchmarks.pictures.svg import SMALL, WIDTH, Picture

INNER = (LEFT + WIDE / 2, RIGHT - WIDE / 2)  # the edges of both columns that face each other


def step_flow() -> str:
    """Draw the step from above to below on the left, and on the right the tensors that live between its parts."""
    picture = Picture(546, "How a training step flows, and what memory holds meanwhile")
    heading = {"font_weight": "700"}
    picture.text(16, 28, "The step", **heading)
    picture.text(RIGHT - WIDE / 2, 28, "In memory", **heading)
    steps = {
        44: ("forward", "casts, products in FP8", PRODUCT),
        144: ("loss", "in high precision", HIGH),
        244: ("backward", "casts, products in FP8", PRODUCT),
        344: ("optimizer.step()", "one launch", HIGH),
    }
    for y, (name, about, color) in steps.items():
        box(picture, LEFT, y, color, name, about)
    for y in (88, 188, 288):
        picture.arrow([(LEFT, y), (LEFT, y + 56)])
    tensors = {
        44: ("weights", "bf16, or codes in FP8"),
        144: ("saved for backward", "codes and scales"),
        294: ("gradients", "bf16, or codes in FP8"),
        394: ("moments, masters", "float32, or 8 bits each"),
    }
    for y, (name, about) in tensors.items():
        box(picture, RIGHT, y, PAIR, name, about)
    left, right = INNER
    picture.arrow([(right, 66), (left, 66)])
    picture.arrow([(left, 80), (right, 158)])
    picture.arrow([(right, 176), (left, 258)])
    picture.arrow([(left, 274), (right, 310)])
    picture.arrow([(right, 326), (left, 358)])
    picture.arrow([(right, 416), (left, 376)])
    edge = WIDTH - 14
    picture.arrow([(LEFT, 344 + TALL), (LEFT, 466), (edge, 466), (edge, 66), (RIGHT + WIDE / 2, 66)])
    picture.text(LEFT + 12, 459, "new weights", "soft", SMALL)
    words = ((PRODUCT, "computed in FP8"), (PAIR, "can be FP8"), (HIGH, "high precision"))
    for x, (color, about) in zip((20, 172, 298), words, strict=True):
        picture.frame(x, 500, 18, 14, color)
        picture.text(x + 25, 512, about, size=SMALL)
    return str(picture)
