"""Which rows of what is made first a cast asks for, and how often. What it writes tells test_by_the_reference.py."""

import itertools
import math

import torch

from octavo.kernels.arguments import Scaling
from octavo.kernels.cpu import chunked_cast, codes
from octavo.kernels.cpu.chunked_cast import cast_in_chunks
from tests.support.combinations import each_pair
from tests.support.definitions import GRANULARITIES

TILES = [g.tile for g in GRANULARITIES]


@each_pair(
    shape=[(0, 7), (5, 0), (1, 1), (17, 130), (150, 40), (300, 9)],
    run=[1, 500, 3000, 1 << 30],
    kept=[0, 2000, 1 << 30],
    tile=TILES,
    second=[None, *TILES],
    unit=[1, 4, 128],
    delayed=[0.0, 0.25],
)
def test_rows_are_made_once_or_twice_if_they_were_not_kept(monkeypatch, case):
    monkeypatch.setattr(codes, "CHUNK", case["run"])
    monkeypatch.setattr(chunked_cast, "KEPT", case["kept"])
    y, asked, delayed = torch.randn(case["shape"]), list[slice](), torch.tensor([case["delayed"]])
    tiles = [tile for tile in (case["tile"], case["second"]) if tile is not None]
    scalings = [Scaling(torch.float8_e4m3fn, t, False, 0, delayed if t == (-1, -1) else None) for t in tiles]
    make = lambda rows: (asked.append(rows), y[rows].clone())[1]  # noqa: E731
    _, sums = cast_in_chunks(y, scalings, case["shape"], make, case["unit"], True)
    torch.testing.assert_close(sums, y.sum(0), rtol=1e-5, atol=1e-4)
    whole = math.lcm(case["unit"], *(tile[0] for tile in tiles if tile[0] != -1))
    assert all(rows.start % whole == 0 for rows in asked)
    looks = any(tile[0] == -1 and not (tile == (-1, -1) and case["delayed"]) for tile in tiles)
    sizes = {rows.start: (rows.stop - rows.start) * y.shape[1] for rows in asked}
    assert max(sizes.values()) <= max(case["run"], whole * y.shape[1])
    held = zip(sizes, itertools.accumulate(sizes.values()), strict=True)
    again = [start for start, size in held if size > case["kept"]] if looks and len(sizes) > 1 else []
    assert [rows.start for rows in asked] == [*sizes, *again]
