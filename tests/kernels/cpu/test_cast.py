"""Casts in C++ against the reference, bit for bit; which rows of what is made first a cast asks for, and how often."""

import copy
import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from octavo.kernels.arguments import CastSource, CastTarget, Output, Scaling, new_cast
from octavo.kernels.cpu import cast, codes
from octavo.kernels.cpu import library as libraries
from octavo.kernels.cpu.cast import write_chunks
from octavo.kernels.cpu.library import library
from octavo.scaling.delayed import State
from tests.support.casts import second
from tests.support.combinations import each_pair
from tests.support.definitions import GRANULARITIES, same_bits

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TILES = [g.tile for g in GRANULARITIES]
ALL = (-1, -1)
FAULTS = [math.nan, math.inf, -math.inf, -0.0, 1e-40, 3e38]


def differing(name: str, *arguments: Any, **named: Any) -> list[int]:
    """Which results of the CPU's op are not the reference's; a NaN is any NaN."""
    given = arguments, copy.deepcopy(arguments)  # of which a state is written
    found, expected = (k.KERNELS[name](*flat, **named) for k, flat in zip((cpu, reference), given, strict=True))
    pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
    return [
        place
        for place, (ours, theirs) in enumerate(pairs)
        if ours.shape != theirs.shape
        or ours.stride() != theirs.stride()
        or not same_bits(*(x if x.dtype.itemsize == 1 else x.masked_fill(x.isnan(), 9.0) for x in (ours, theirs)))
    ]


def random_matrix(draw: random.Random) -> Tensor:
    shape = draw.choice([0, 1, 2, 16, 63, 64, 65, 130]), draw.choice([0, 1, 3, 15, 16, 127, 128, 129, 300])
    x = torch.randn(shape) * 10 ** draw.uniform(-6, 6) * torch.logspace(-3, 0, shape[1])
    for _ in range(draw.choice([0, 0, 1, 5]) if x.numel() else 0):
        x[draw.randrange(shape[0]), draw.randrange(shape[1])] = draw.choice(FAULTS)
    x = x.to(draw.choice(DTYPES))
    lie = draw.choice(["rows", "part", "columns", "apart", "same"])
    if lie == "columns":
        return x.t().contiguous().t()
    if lie == "same":
        return x[:1].expand(shape)
    return x if lie == "rows" else torch.stack((x, x), 2)[..., 0] if lie == "apart" else torch.cat((x, x), 1)[:, 1:]


def differences_of(seed: int) -> list[Any]:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    x, tile = random_matrix(draw), draw.choice([*TILES, (1, 1), (3, 5), (64, 200)])
    how = draw.choice(FORMATS), tile, draw.random() < 0.5, draw.choice([0, 0, 1, -2, 200])
    outputs, sums = (draw.random() < 0.7, draw.choice([1, 16])), x.isfinite().all().item() and draw.random() < 0.3
    known, more = None, {}
    if draw.random() < 0.3:
        known, how = torch.tensor([7.0, draw.choice([0.0, 0.3, 2.0**20]), 7.0]), (how[0], ALL, *how[2:])
    elif draw.random() < 0.5:
        more = second(draw.choice(FORMATS), draw.choice(TILES), draw.random() < 0.5, 0)
    found = [differing("cast", x, known, 1, *how, *outputs, sums, **more), differing("amax", x, tile)]
    ends = sorted(draw.randrange(len(x) + 1) for _ in range(3))
    offsets = torch.tensor(ends, dtype=torch.int32)
    found.append(differing("cast", x, known, 1, *how, *outputs, offsets=offsets, as_is=draw.random() < 0.5))
    update = [448.0] * 3, [False] * 3, [0] * 3, "max", draw.random() < 0.5
    found.append(differing("cast_and_commit", x, *State.empty(2), None, None, how[0], False, 0, *update))
    q, _, scale_inv, *_ = reference.KERNELS["cast"](x, None, 0, how[0], tile, False, 0)
    raw = torch.randint(0, 256, x.shape, dtype=torch.uint8).view(how[0])
    for given in (q, raw, raw.t().contiguous().t(), torch.stack((q, q), 2)[..., 0]):
        found.append(differing("dequantize", given, scale_inv, tile, draw.choice(DTYPES)))
    return found if any(found) else []


def test_any_cast_has_the_bits_of_the_reference() -> None:
    assert library("cast") is not None
    assert {seed: found for seed in range(100) if (found := differences_of(seed))} == {}


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(libraries, "_SHARE", 50)
    torch.set_num_threads(3)
    request.addfinalizer(lambda: torch.set_num_threads(1))
    assert {seed: found for seed in range(1000, 1020) if (found := differences_of(seed))} == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_all_numbers_of_16_bits(fmt: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(256, 256)
    for scale in (0.4999, 3.3, 2.0**-20, 2.0**100):
        assert differing("cast", x, torch.tensor([scale]), 0, fmt, ALL, False, 0, True) == []
    assert differing("cast", x, None, 0, fmt, (1, -1), False, 0, **second(fmt, (-1, 1), True, 0)) == []


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
    monkeypatch.setattr(cast, "KEPT", case["kept"])
    y, asked, delayed = torch.randn(case["shape"]), list[slice](), torch.tensor([case["delayed"]])
    tiles = [tile for tile in (case["tile"], case["second"]) if tile is not None]
    scalings = [Scaling(torch.float8_e4m3fn, t, False, 0, delayed if t == (-1, -1) else None) for t in tiles]
    make = lambda rows: (asked.append(rows), y[rows].clone())[1]  # noqa: E731
    targets = [CastTarget(s, *new_cast(CastSource(y), s, None, Output())[:4]) for s in scalings]
    write_chunks(library("cast"), make, case["shape"], case["unit"], targets, sums := torch.empty(case["shape"][1]))
    torch.testing.assert_close(sums, y.sum(0), rtol=1e-5, atol=1e-4)
    whole = math.lcm(case["unit"], *(tile[0] for tile in tiles if tile[0] != -1))
    assert all(rows.start % whole == 0 for rows in asked)
    looks = any(tile[0] == -1 and not (tile == (-1, -1) and case["delayed"]) for tile in tiles)
    sizes = {rows.start: (rows.stop - rows.start) * y.shape[1] for rows in asked}
    assert max(sizes.values()) <= max(case["run"], whole * y.shape[1])
    held = zip(sizes, itertools.accumulate(sizes.values()), strict=True)
    again = [start for start, size in held if size > case["kept"]] if looks and len(sizes) > 1 else []
    assert [rows.start for rows in asked] == [*sizes, *again]
