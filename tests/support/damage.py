"""Damages files, as drawn by a seed: bits, ends and bytes of any file; values, names and the form of one of JSON."""

from __future__ import annotations

import json
import random
from typing import Any

SCALARS = (None, True, False, 0, -1, 7, 0.5, 1e400, float("nan"), 10**400, "", "a", "nul\0", "\ud800", "../x", "/x")
DEEP = "[" * 100_000 + "]" * 100_000


def damaged_bytes(data: bytes, seed: int) -> bytes:
    """Return the data with a flipped bit, with other bytes somewhere, or without its end."""
    draw, damaged = random.Random(seed), bytearray(data)
    at = draw.randrange(len(data))
    match seed % 4:
        case 0:
            return data[:at]
        case 1:
            damaged[at : at + 8] = draw.randbytes(8)
        case _:
            damaged[at] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def damaged_json(value: Any, seed: int) -> bytes:
    """Return a document that begins as that of ``value``, with something else in it, or that is no document at all."""
    draw = random.Random(seed)
    text = json.dumps(with_another(value, draw))
    match seed % 8:
        case 0:
            return json.dumps(value).replace("[", f"[{DEEP},", 1).encode()
        case 1:
            return f'{{"a": {DEEP}}}'.encode()
        case 2:
            return b"\xef\xbb\xbf" + text.encode()
        case 3:
            return text.encode("utf-16" if draw.random() < 0.5 else "utf-32")
        case 4:
            return damaged_bytes(json.dumps(value).encode(), draw.randrange(10**6))
    return text.encode()


def with_another(value: Any, draw: random.Random) -> Any:
    """Return a value in which one part is another, or has another name, or is gone."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.15:
        return _any(draw, 0)
    place = draw.choice([*value] if isinstance(value, dict) else range(len(value)))
    changed: Any = value.copy()
    match draw.randrange(6):
        case 0:
            del changed[place]
        case 1 if isinstance(value, dict):
            changed[draw.choice(("a", "", *value))] = changed.pop(place)
        case _:
            changed[place] = with_another(value[place], draw)
    return changed


def _any(draw: random.Random, depth: int) -> Any:
    match draw.randrange(4) if depth < 3 else 0:
        case 1:
            return [_any(draw, depth + 1) for _ in range(draw.randrange(4))]
        case 2:
            return {draw.choice(("a", "b", "")): _any(draw, depth + 1) for _ in range(draw.randrange(4))}
    return draw.choice(SCALARS)
