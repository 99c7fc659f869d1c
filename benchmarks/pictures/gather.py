"""FSDP2's gather of a weight in FP8: each rank casts its own rows, and ranks send codes."""

from __future__ import annotations

from benchmarks.pictures.data_flow import HIGH, LEFT, PAIR, PRODUCT, RIGHT, TALL, box
from benchmarks.pictures.svg import SMALL, WIDTH, Picture


def gather() -> str:
    """Draw two ranks beside each other, and what they send across as bands."""
    picture = Picture(570, "How FSDP2 gathers a weight in FP8 on two ranks")
    boxes = {
        40: (HIGH, "{} half of rows", "bf16 or float32"),
        172: (PAIR, "codes of these rows", "1 byte an element"),
        304: (PAIR, "codes of all rows", "and their scale"),
        392: (PRODUCT, "products", "forward, then backward"),
    }
    for rank, (x, half) in enumerate(((LEFT, "first"), (RIGHT, "second"))):
        picture.text(x, 28, f"Rank {rank}", font_weight="700", text_anchor="middle")
        for y, (color, name, about) in boxes.items():
            box(picture, x, y, color, name.format(half), about)
        for above, below in ((40 + TALL, 104), (138, 172), (172 + TALL, 236), (270, 304), (304 + TALL, 392)):
            picture.arrow([(x, above), (x, below)])
        picture.text(x + 8, 160, "cast", size=SMALL)
    for y, words in (
        (104, "ranks agree on the largest amax: 4 bytes a weight"),
        (236, "all-gather: half of bf16's bytes"),
    ):
        picture.rect(16, y, WIDTH - 32, 34, "band", rx=6)
        picture.text(WIDTH / 2, y + 22, words, size=SMALL, text_anchor="middle")
    lines = ("After a block's forward FSDP2 frees the codes of all rows,", "and gathers them again for its backward.")
    for place, words in enumerate(lines):
        picture.text(WIDTH / 2, 464 + 19 * place, words, "soft", SMALL, text_anchor="middle")
    for place, (color, words) in enumerate(((HIGH, "high precision"), (PAIR, "pair in FP8"), (PRODUCT, "product"))):
        x = 24 + 140 * place
        picture.frame(x, 526, 18, 14, color)
        picture.text(x + 25, 538, words, size=SMALL)
    return str(picture)
