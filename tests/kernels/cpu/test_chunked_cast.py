"""Casts of what is made run by run: the same, bit for bit, as of all of it at once."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.cpu import chunked_cast, chunks
from octavo.kernels.cpu.chunked_cast import KnownScaling, cast_in_chunks, cast_values
from tests.support import definitions
from tests.support.combinations import each_pair
from tests.support.definitions import GRANULARITIES, same_bits

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL, CPU = (-1, -1), torch.device("cpu")
TILES = [g.tile for g in GRANULARITIES]
RUNS = [1, 500, 3000, 1 << 30]


class Made:
    """Gives out rows of ``y`` and remembers which."""

    def __init__(self, y: Tensor) -> None:
        self.y, self.asked = y, []

    def __call__(self, rows: slice) -> Tensor:
        self.asked.append(rows)
        return self.y[rows].clone()


def given(shape: tuple[int, int]) -> Tensor:
    rows, cols = shape
    return torch.randn(shape) * torch.logspace(-1, 2, rows)[:, None] * torch.logspace(1, -2, cols)


def check(y: Tensor, scaling: KnownScaling, found: tuple[Tensor, Tensor, Tensor]) -> None:
    codes, scale_inv, amax = found
    dtype, tile, power_of_two, margin, scale = scaling
    expected = definitions.cast(y, dtype, tile, power_of_two, margin, scale)
    assert codes.dtype == dtype and codes.is_contiguous()
    for a, b in zip((codes.view(torch.uint8), scale_inv, amax), expected, strict=True):
        assert same_bits(a, b), scaling


@each_pair(
    shape=[(0, 7), (5, 0), (1, 1), (17, 130), (150, 40), (300, 9)],
    run=RUNS,
    kept=[0, 2000, 1 << 30],
    tile=TILES,
    second=[None, *TILES],
    dtype=FORMATS,
    power_of_two=[False, True],
    margin=[0, 2],
    unit=[1, 4, 128],
    fault=[None, math.nan, -math.inf],
)
def test_by_the_definition(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    monkeypatch.setattr(chunks, "CHUNK", case["run"])
    monkeypatch.setattr(chunked_cast, "KEPT", case["kept"])
    y = given(case["shape"])
    if case["fault"] is not None and y.numel():
        y[len(y) // 2, 0] = case["fault"]
    scalings = [KnownScaling(case["dtype"], case["tile"], case["power_of_two"], case["margin"])]
    if case["second"] is not None:
        scalings.append(KnownScaling(FORMATS[case["dtype"] == E4M3], case["second"], not case["power_of_two"], 0))
    make = Made(y)
    found, sums = cast_in_chunks(make, tuple(y.shape), case["unit"], scalings, True, CPU)
    for scaling, pair in zip(scalings, found, strict=True):
        check(y, scaling, pair)
    torch.testing.assert_close(sums, y.sum(0), rtol=1e-5, atol=1e-4, equal_nan=True)
    whole = math.lcm(case["unit"], *(s.tile[0] for s in scalings if s.tile[0] != -1))
    assert all(rows.start % whole == 0 for rows in make.asked)
    spans = any(s.tile[0] == -1 for s in scalings)
    sizes = {rows.start: (rows.stop - rows.start) * y.shape[1] for rows in make.asked}
    not_kept = [
        start for start, held in zip(sizes, itertools.accumulate(sizes.values()), strict=True) if held > case["kept"]
    ]
    assert [rows.start for rows in make.asked] == [*sizes, *(not_kept if spans and len(sizes) > 1 else [])]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scale", [0.25, 2.0**20])
def test_a_delayed_scale_takes_one_pass_and_clips(monkeypatch: pytest.MonkeyPatch, scale: float, run: int) -> None:
    monkeypatch.setattr(chunks, "CHUNK", run)
    scaling = KnownScaling(E4M3, ALL, False, 0, scale)
    for y in (given((150, 40)), given((150, 40)).flip(0)):  # the largest in the last run, and in the first
        make = Made(y)
        (found,), sums = cast_in_chunks(make, (150, 40), 1, [scaling], False, CPU)
        check(y, scaling, found)
        assert len(make.asked) == len({rows.start for rows in make.asked})
        assert sums.shape == (0,)
        assert found[2].item() == y.abs().max()


def test_no_run_holds_more_than_its_rows() -> None:
    shape = 4 * chunks.CHUNK // 256 + 3, 256
    make = Made(torch.ones(shape))
    cast_in_chunks(make, shape, 1, [KnownScaling(E4M3, (1, 128), False, 0)], False, CPU)
    assert [rows.stop - rows.start for rows in make.asked] == [chunks.CHUNK // 256] * 4 + [3]


@pytest.mark.parametrize("fmt", FORMATS, ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_few_elements_and_many_are_cast_alike(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fmt: torch.dtype
) -> None:
    y = given((33, 20)).to(dtype)
    faulty = y.clone()
    faulty[3, 4], faulty[5, 6] = math.nan, -math.inf
    for x, scale in itertools.product([y, y.t(), y[:, ::3], y * 0, y * 1e-30, faulty, y[:1, :1]], [0.0, 0.25, 2.0**20]):
        for power_of_two, margin in [(False, 0), (True, 2)]:
            scaling = KnownScaling(fmt, ALL, power_of_two, margin, scale)
            monkeypatch.setattr(chunked_cast, "_FEW", 4096)
            few = cast_values(x, scaling)
            monkeypatch.setattr(chunked_cast, "_FEW", 0)
            check(x, scaling, few)
            check(x, scaling, cast_values(x, scaling))
