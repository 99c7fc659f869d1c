"""SVG by hand: a card with its own background, light or dark as the reader's system is, so that any page may hold it.

A picture is WIDTH units wide and its text at least SMALL high, which is legible where a telephone shows it 350 wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, SMALL, TEXT = 440, 13.0, 14.5
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"
LIGHT = {"page": "#ffffff", "ink": "#1f2328", "soft": "#57606a", "rule": "#d0d7de", "band": "#eef1f4"}
DARK = {"page": "#161b22", "ink": "#f0f6fc", "soft": "#a9b4bf", "rule": "#3d444d", "band": "#262c34"}
SERIES = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#a37f00", "#6e7781")
SERIES_DARK = ("#58b4f0", "#ff8f4d", "#35c99b", "#e58ad0", "#e0b83c", "#a9b4bf")
LIGHT |= {f"series{i}": color for i, color in enumerate(SERIES)}
DARK |= {f"series{i}": color for i, color in enumerate(SERIES_DARK)}


def number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


class Picture:
    """Shapes on a card, drawn in the order in which they are added.

    Colors are names of LIGHT and DARK: "ink" and "soft" for text, "rule" for lines, "series0" and on for data.
    """

    def __init__(self, height: float, title: str) -> None:
        self.height, self.title = height, title
        self.shapes: list[str] = []

    def _add(self, shape: str, content: str = "", **attributes: object) -> None:
        named = ((name.replace("_", "-").rstrip("-"), value) for name, value in attributes.items())
        text = "".join(
            f' {name}="{number(value) if isinstance(value, float | int) else value}"' for name, value in named
        )
        self.shapes.append(f"<{shape}{text}>{content}</{shape}>" if content else f"<{shape}{text}/>")

    def text(self, x: float, y: float, words: str, color: str = "ink", size: float = TEXT, **more: object) -> None:
        """Write words from x on; ``text_anchor="middle"`` about it, ``"end"`` up to it; y is the line under them."""
        self._add("text", escape(words), x=x, y=y, class_=f"f-{color}", font_size=size, **more)

    def rect(
        self, x: float, y: float, width: float, height: float, color: str, line: str = "page", **more: object
    ) -> None:
        """Draw a filled rectangle, parted from its neighbours by a line."""
        self._add("rect", x=x, y=y, width=width, height=height, class_=f"f-{color} s-{line}", **more)

    def frame(self, x: float, y: float, width: float, height: float, color: str, fill: str = "page") -> None:
        """Draw a rounded box with a border."""
        self._add("rect", x=x, y=y, width=width, height=height, rx=5, class_=f"f-{fill} s-{color}", stroke_width=1.5)

    def path(self, points: Sequence[tuple[float, float]], color: str, width: float = 1.5, **more: object) -> None:
        """Draw a line through points; ``marker_end="url(#arrow)"`` ends it in an arrow."""
        d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._add("path", d=d, class_=f"s-{color}", fill="none", stroke_width=width, **more)

    def arrow(self, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line that ends in an arrow."""
        self.path(points, "soft", marker_end="url(#arrow)")

    def dot(self, x: float, y: float, color: str, radius: float = 3.5) -> None:
        """Draw a filled circle."""
        self._add("circle", cx=x, cy=y, r=radius, class_=f"f-{color}")

    def __str__(self) -> str:
        rules = [_rules(LIGHT), "@media (prefers-color-scheme: dark){", _rules(DARK), "}"]
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(self.height)}" width="{WIDTH}" '
            f'height="{number(self.height)}" font-family="{FONTS}">'
        )
        marker = (
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            '<path d="M0 0L8 4L0 8z" class="f-soft"/></marker>'
        )
        size = f'width="{WIDTH - 1}" height="{number(self.height - 1)}"'
        card = f'<rect x="0.5" y="0.5" {size} rx="8" class="f-page s-rule"/>'
        parts = [head, f"<title>{escape(self.title)}</title>", f"<style>{''.join(rules)}</style>"]
        return "\n".join([*parts, f"<defs>{marker}</defs>", card, *self.shapes, "</svg>"]) + "\n"


def _rules(colors: dict[str, str]) -> str:
    return "".join(f".f-{name}{{fill:{color}}}.s-{name}{{stroke:{color}}}" for name, color in colors.items())


class Axes:
    """A rectangle of a picture, in which data have places.

    Args:
        picture: to draw on.
        box: (left, top, right, bottom).
        x, y: the smallest and the largest value of each axis.
    """

    def __init__(
        self,
        picture: Picture,
        box: tuple[float, float, float, float],
        x: tuple[float, float],
        y: tuple[float, float],
    ) -> None:
        self.picture, self.box, self.x, self.y = picture, box, x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point in the picture."""
        left, top, right, bottom = self.box
        across, up = (x - self.x[0]) / (self.x[1] - self.x[0]), (y - self.y[0]) / (self.y[1] - self.y[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    def grid(self, xs: Sequence[float], ys: Sequence[float], digits: int = 1, x_words: str = "{:,.0f}") -> None:
        """Draw lines and numbers at values of both axes."""
        for value in ys:
            _, y = self.at(self.x[0], value)
            self.picture.path([(self.box[0], y), (self.box[2], y)], "rule", 1)
            words = f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")
            self.picture.text(self.box[0] - 6, y + 4.5, words, "soft", SMALL, text_anchor="end")
        for value in xs:
            x, _ = self.at(value, self.y[0])
            words = x_words.format(value).replace("-", "\N{MINUS SIGN}")
            self.picture.text(x, self.box[3] + 17, words, "soft", SMALL, text_anchor="middle")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round values between two, at most ``most``."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 10) for place in range(first, math.floor(high / step + 1e-9) + 1)]
