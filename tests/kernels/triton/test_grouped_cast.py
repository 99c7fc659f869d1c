"""Rows in groups are cast as the reference casts them, bit for bit."""

from typing import Any

import pytest
import torch

from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.groups import SIZES, offsets_of, random_sizes
from tests.support.passes import before_of
from tests.support.triton_cases import (
    DTYPES,
    E4M3,
    FORMATS,
    LAYOUTS,
    count_launches,
    laid,
    run_both,
    to,
    use_small_tiles,
    values_of,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

TILES = [(-1, -1), (1, -1), (-1, 1), (1, 128), (1, 32), (128, 128), (128, 1), (32, 1), (2, 8)]
WRITTEN = [(True, False), (False, True), (True, True), (False, False)]
DELAYED = [None, 0.0, 3.0]


def check(
    kernels: TritonKernels,
    x: torch.Tensor,
    sizes: list[int],
    *cast: Any,
    written: tuple[bool, bool] = (True, True),
    pad: int = 16,
    activation: tuple[Any, ...] = (),
) -> None:
    """A cast of rows in groups; ``written``: codes as they lie, and transposed."""
    as_is, transpose = written
    flat = to(kernels.device, (x, *cast, transpose, pad, False, *activation))
    run = run_both(kernels, "cast", x, *flat[1:], offsets=offsets_of(sizes).to(kernels.device), as_is=as_is)
    for name, ours in run.actual.items():
        assert same_bits(ours, run.expected[name]), name


def cast_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments from delayed_scale to margin."""
    tile = case["tile"]
    delayed = None if tile != (-1, -1) or case["delayed"] is None else torch.tensor([1.0, case["delayed"], 1.0])
    return delayed, 1, case["fmt"], tile, case["power_of_two"], case["margin"]


def written_of(case: dict[str, Any]) -> dict[str, Any]:
    return {"written": case["written"], "pad": case["pad"]}


OPTIONS: dict[str, list[Any]] = {
    "sizes": SIZES,
    "tile": TILES,
    "fmt": FORMATS,
    "delayed": DELAYED,
    "power_of_two": [False, True],
    "margin": [0, 3],
    "written": WRITTEN,
    "pad": [1, 16],
    "small": [False, True],
}


@each_pair(x_dtype=DTYPES, layout=LAYOUTS, values=["varied", "faults", "edge"], cols=[17, 48, 140], **OPTIONS)
def test_each_group_is_cast_alone(kernels, monkeypatch, case):
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    sizes, rest = case["sizes"]
    x = values_of(case["values"], (sum(sizes) + rest, case["cols"]), case["x_dtype"])
    check(kernels, laid(x, case["layout"], kernels.device), sizes, *cast_of(case), **written_of(case))


@each_pair(activation=["reglu", "squared_relu"], kind=["value", "gradient", "of codes"], width=[9, 64], **OPTIONS)
def test_activations_by_group(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    (sizes, rest), width, kind = case["sizes"], case["width"], case["kind"]
    h = torch.randn(sum(sizes) + rest, 2 * width if case["activation"] == "reglu" else width).bfloat16()
    x: torch.Tensor = h
    extras: tuple[Any, ...] = (case["activation"],)
    if kind != "value":
        x, extras = torch.randn(len(h), width), (*extras, h)
    if kind == "of codes":
        for h_tile in ((-1, -1), (1, 32), (32, 8)):
            cast = None, 0, E4M3, h_tile, False, 0
            codes, _, scale_inv, _ = torch.ops.octavo.cast(h, *cast, offsets=offsets_of(sizes))
            for given in ((x, codes), (codes, None))[: 1 if case["small"] else 2]:
                extras = case["activation"], given[1], scale_inv, h_tile
                how = written_of(case) | {"activation": extras}
                check(kernels, given[0].to(kernels.device), sizes, *cast_of(case), **how)
        return
    check(kernels, x.to(kernels.device), sizes, *cast_of(case), **written_of(case), activation=extras)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
@pytest.mark.parametrize("tile", [(-1, -1), (-1, 1), (1, -1), (1, 32), (128, 128)], ids=str)
def test_any_sequence_of_sizes(tile: tuple[int, int], seed: int, kernels: TritonKernels) -> None:
    sizes, rest = random_sizes(seed)
    x = torch.randn(sum(sizes) + rest, 19).to(kernels.device)
    check(kernels, x, sizes, None, 0, E4M3, tile, False, 0)


def test_blocks_of_other_sizes(kernels: TritonKernels) -> None:
    check(kernels, torch.randn(61, 20).to(kernels.device), [0, 1, 17, 40], None, 0, E4M3, (3, 5), False, 0, pad=1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", [(-1, -1), (-1, 1), (1, -1), (128, 128)], ids=str)
@pytest.mark.parametrize("ends", [[3, 2, 40], [-1, 40, 40], [3, 41, 41], [0, 1 << 30, 40]], ids=str)
def test_wrong_offsets_are_groups_without_rows(ends: list[int], tile: tuple[int, int], kernels: TritonKernels) -> None:
    x, offsets = torch.randn(40, 20).to(kernels.device), torch.tensor(ends, dtype=torch.int32, device=kernels.device)
    q, t, scale_inv, amax = kernels.cast(x, None, 0, E4M3, tile, False, 0, True, 16, offsets=offsets)
    assert not q.view(torch.uint8).any() and not t.view(torch.uint8).any()
    assert bool((scale_inv == 1).all()) and not amax.any()


@pytest.mark.parametrize(
    ("tile", "delayed", "launches"),
    [
        ((-1, -1), False, ["group_amax_kernel", "cast_group_kernel"]),
        ((-1, -1), True, ["cast_group_kernel"]),
        ((-1, 1), False, ["group_amax_kernel", "cast_group_kernel"]),
        ((1, -1), False, ["cast_group_rows_kernel"]),
        ((1, 128), False, ["cast_group_blocks_kernel"]),
        ((128, 128), False, ["cast_group_blocks_kernel"]),
    ],
    ids=str,
)
def test_launches(tile, delayed, launches, kernels, monkeypatch):
    x, offsets, scale = to(kernels.device, (torch.randn(61, 40), offsets_of([0, 1, 17, 40]), torch.ones(3)))
    others = torch.ones(3, 1, device=scale.device), before_of(scale)
    kernels.module("delayed_update").committed(scale, *others, (True, True, True))
    if kernels.device.type == "cuda":
        torch.cuda.synchronize()  # the host has seen the scales
    cast = scale if delayed else None, 0, E4M3, tile, False, 0
    kernels.cast(x, *cast, offsets=offsets)
    found = count_launches(kernels, monkeypatch)
    kernels.cast(x, *cast, True, 16, offsets=offsets)
    assert found == launches
