"""The three products of a linear layer: the casts, the products, and the tensors that forward saves for backward."""

from __future__ import annotations

from benchmarks.pictures.svg import SMALL, WIDTH, Picture

LEFT, RIGHT, MIDDLE = 116.0, 324.0, WIDTH / 2  # of columns, their middles
HIGH, PAIR, PRODUCT = "series5", "series0", "series1"  # colors of the borders
WIDE, TALL = 176.0, 44.0


def box(picture: Picture, x: float, y: float, color: str, name: str, about: str, width: float = WIDE) -> None:
    """Draw a tensor or a product about x, its top at y."""
    picture.frame(x - width / 2, y, width, TALL, color)
    picture.text(x, y + 18, name, size=SMALL, text_anchor="middle", font_weight="600")
    picture.text(x, y + 35, about, "soft", SMALL, text_anchor="middle")


def cast(picture: Picture, x: float, above: float, below: float) -> None:
    """Draw an arrow with the word."""
    picture.arrow([(x, above), (x, below)])
    side, anchor = (7, "start") if x < MIDDLE else (-7, "end")
    picture.text(x + side, (above + below) / 2 + 4.5, "cast", size=SMALL, text_anchor=anchor)


def data_flow() -> str:
    """Draw, from above to below, forward, the saved tensors, and backward from below."""
    picture = Picture(676, "The three products of a linear layer in FP8, and what is saved for backward")
    heading = {"font_weight": "700"}
    picture.text(16, 28, "Forward", **heading)
    box(picture, LEFT, 40, HIGH, "input", "T × K, bf16")
    box(picture, RIGHT, 40, HIGH, "weight", "N × K, bf16")
    for x, name in ((LEFT, "input"), (RIGHT, "weight")):
        cast(picture, x, 84, 116)
        box(picture, x, 116, PAIR, name, "codes and scales")
        picture.arrow([(x, 160), (MIDDLE + (x - MIDDLE) * 0.4, 190)])
    box(picture, MIDDLE, 190, PRODUCT, "output", "input · weightᵀ → T × N, bf16", 236)

    picture.rect(12, 250, WIDTH - 24, 94, "band", rx=6)
    picture.text(24, 270, "Saved for backward, and nothing else", **heading)
    for x, side, name in ((LEFT, 18, "input, transposed"), (RIGHT, WIDTH - 18, "weight, transposed")):
        picture.arrow(
            [(x + (side - x) * 0.94, 100), (side, 100), (side, 306), (x + (WIDE / 2) * (1 if side > x else -1), 306)]
        )
        picture.path([(x, 100), (side, 100)], "soft")
        box(picture, x, 284, PAIR, name, "codes and scales")

    picture.text(16, 372, "Backward", **heading)
    box(picture, LEFT, 388, PRODUCT, "grad_weight", "→ N × K, bf16")
    box(picture, RIGHT, 388, PRODUCT, "grad_input", "→ T × K, bf16")
    picture.text(LEFT, 448, "grad_outputᵀ · input", "soft", SMALL, text_anchor="middle")
    picture.text(RIGHT, 448, "grad_output · weight", "soft", SMALL, text_anchor="middle")
    for x, name in ((LEFT, "grad_output, transposed"), (RIGHT, "grad_output")):
        picture.arrow([(x, 328), (x, 388)])
        box(picture, x, 484, PAIR, name, "codes and scales", WIDE + 16)
        picture.arrow([(x, 484), (x, 454)])
        picture.arrow([(MIDDLE + (x - MIDDLE) * 0.3, 568), (x, 528)])
    picture.text(MIDDLE, 556, "cast", size=SMALL, text_anchor="middle")
    box(picture, MIDDLE, 568, HIGH, "grad_output", "T × N, bf16")

    for place, (color, words) in enumerate(((HIGH, "high precision"), (PAIR, "pair in FP8"), (PRODUCT, "product"))):
        x = 24 + 140 * place
        picture.frame(x, 640, 18, 14, color)
        picture.text(x + 25, 652, words, size=SMALL)
    return str(picture)
