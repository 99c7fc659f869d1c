"""The pictures of the pages: legible at a telephone's width, inside their cards, with the right texts."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ET

import pytest

report = importlib.import_module("benchmarks.report")
svg = importlib.import_module("benchmarks.pictures.svg")
SVG = "{http://www.w3.org/2000/svg}"
PHONE = 350  # of 390 px, less a page's margins
LETTER = 0.56  # a letter of such words, by the size, in DejaVu Sans, the widest of the fonts named


@pytest.fixture(scope="module", params=report.PICTURES)
def picture(request: pytest.FixtureRequest) -> ET.Element:
    return ET.fromstring(report.PICTURES[request.param]())


def test_text_is_legible_and_inside(picture: ET.Element) -> None:
    for text in picture.iter(f"{SVG}text"):
        size, x, words = float(text.get("font-size")), float(text.get("x")), text.text
        assert size * PHONE / svg.WIDTH >= 10
        wide = LETTER * size * len(words) * (1.06 if text.get("font-weight") else 1)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[text.get("text-anchor", "start")]
        assert left >= 0 and left + wide <= svg.WIDTH, words
        assert 0 < float(text.get("y")) < float(picture.get("height")) - 4, words


def test_every_color_is_known_and_has_a_dark_one(picture: ET.Element) -> None:
    used = {name for shape in picture.iter() for name in re.findall(r"[fs]-(\w+)", shape.get("class", ""))}
    assert used and used <= svg.LIGHT.keys() == svg.DARK.keys()


@pytest.mark.parametrize("colors", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_colors_stand_out_from_their_card(colors: dict[str, str]) -> None:
    """WCAG 2.1: text 4.5 : 1, graphics 3 : 1."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(colors[a]), luminance(colors[b])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert min(contrast(name, "page") for name in ("ink", "soft")) >= 4.5 and contrast("soft", "band") >= 4.5
    assert min(contrast(name, "page") for name in colors if name.startswith("series")) >= 3.0
