"""A mesh of eight ranks: which of them share what, and what they send each other."""

from __future__ import annotations

from benchmarks.pictures.svg import SMALL, WIDTH, Picture

ROWS, COLUMNS = 4, 2  # ranks of fsdp and of tensor
WIDE, TALL, TOP = 92.0, 38.0, 84.0
FSDP, TENSOR = "series0", "series1"


def mesh() -> str:
    """Draw the ranks as a grid, tensor parallelism along rows and FSDP2 along columns."""
    picture = Picture(498, "A mesh of 4 × 2 ranks")
    picture.text(16, 28, f"--mesh fsdp={ROWS},tensor={COLUMNS}", font_weight="700")
    picture.text(16, 50, "Eight ranks, in two kinds of groups", "soft", SMALL)
    xs, pitch = (66.0, 282.0), 66.0
    for row in range(ROWS):
        y = TOP + pitch * row
        for column, x in enumerate(xs):
            picture.frame(x, y, WIDE, TALL, "ink")
            words = f"rank {row * COLUMNS + column}"
            picture.text(x + WIDE / 2, y + 24, words, size=SMALL, text_anchor="middle", font_weight="600")
            if row:
                picture.path([(x + WIDE / 2, y - pitch + TALL), (x + WIDE / 2, y)], FSDP, 4)
        picture.path([(xs[0] + WIDE, y + TALL / 2), (xs[1], y + TALL / 2)], TENSOR, 4)
    y = TOP + pitch * ROWS
    words = {
        TENSOR: (
            "tensor: neighbours, by NVLink, share matrices.",
            "They send inputs and gradients, in FP8 too.",
        ),
        FSDP: ("fsdp: ranks share weights, and have other tokens.", "They gather codes and reduce gradients."),
    }
    for color, lines in words.items():
        picture.path([(18, y + 12), (40, y + 12)], color, 4)
        for line in lines:
            picture.text(50, y + 17, line, size=SMALL)
            y += 19
        y += 14
    picture.text(
        WIDTH / 2, y + 24, "Together a row of ranks multiplies whole matrices.", "soft", SMALL, text_anchor="middle"
    )
    return str(picture)
