"""Casts of norms: against the reference, and their statistics against float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.layouts import transposed, with_padding
from octavo.kernels.reference.norm import normalise
from tests.support.casts import of_norm, second
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.passes import before_of
from tests.support.triton_cases import (
    ALL,
    DTYPES,
    E4M3,
    E5M2,
    FORMATS,
    INPUT,
    ROUNDINGS,
    Run,
    Values,
    assert_amax_close,
    assert_codes_close,
    assert_scales_close,
    count_launches,
    input_of,
    run_both,
    use_small_tiles,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

Norm = dict[str, Any]  # as of_norm makes it
KINDS = ["layer_norm", "rms_norm"]
SHAPES = [(0, 17), (17, 0), (1, 270), (17, 127), (150, 17)]
VALUES = ["varied", "faults", "only faults", "zeros"]
ROW, COLUMN = (1, -1), (-1, 1)

# (tile, the delayed scale, whether it is known to exist)
CASTS: list[tuple[tuple[int, int], float | None, bool]] = [(ALL, None, False), (ALL, 0.0, False), (ALL, 0.37, False)]
CASTS += [(ALL, 0.37, True), (ALL, 2.0**60, True), (ROW, None, False), (COLUMN, None, False), ((1, 128), None, False)]
CASTS += [((32, 1), None, False), ((128, 128), None, False), ((64, 300), None, False)]
TWO = [((1, 32), (32, 1)), ((1, 128), (128, 1)), ((8, 2), (1, 64)), (ROW, COLUMN), (COLUMN, ROW), (ALL, (1, 32))]
TWO += [((1, 128), ROW), ((1, 16), (64, 300))]

NORM: dict[str, Any] = {
    "kind": KINDS,
    **INPUT | {"shape": SHAPES, "values": VALUES},
    "of_gamma": DTYPES,
    "beta": [False, True],
    "zero_centered": [False, True],
    "eps": [1e-5, 1e-3],
    "pad": [1, 16],
    "keep": [False, True],
}


def norm_of(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> tuple[Tensor, Norm]:
    x = input_of(kernels, monkeypatch, case)
    gamma, beta = (torch.randn(case["shape"][1]).to(case["of_gamma"]).to(x.device) for _ in range(2))
    beta = beta if case["beta"] else None
    return x, of_norm(gamma, beta, case["kind"], case["eps"], case["zero_centered"])


def state_of(kernels: TritonKernels, scale: float, known: bool = True, role: int = 1) -> Tensor:
    state = torch.full((3,), 7.0)
    state[role] = scale
    state = state.to(kernels.device)
    if known:
        others = torch.zeros(3, 4, device=kernels.device), before_of(state)
        kernels.module("delayed_update").committed(state, *others, (True, True, True))
        if kernels.device.type == "cuda":
            torch.cuda.synchronize()
    return state


@each_pair(**NORM, cast=CASTS, fmt=FORMATS, power_of_two=[False, True], margin=[0, 3], transpose=[False, True])
def test_norm_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    x, norm = norm_of(kernels, monkeypatch, case)
    tile, scale, known = case["cast"]
    state = None if scale is None else state_of(kernels, scale, known)
    cast = state, 1, case["fmt"], tile, case["power_of_two"], case["margin"]
    check_norm(kernels, x, *cast, case["transpose"], case["pad"], **norm, keep=case["keep"])


@each_pair(
    **NORM,
    tiles=TWO,
    formats=[(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)],
    powers_of_two=[(False, False), (True, False), (False, True)],
    transpose_second=[False, True],
)
def test_norm_cast_two_scalings(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    x, norm = norm_of(kernels, monkeypatch, case)
    first, other = ((case["formats"][i], case["tiles"][i], case["powers_of_two"][i], i) for i in range(2))
    cast = None, 0, *first, case["transpose_second"], case["pad"]
    check_norm(kernels, x, *cast, **second(*other), **norm, keep=case["keep"])


def check_norm(kernels: TritonKernels, *args: Any, **named: Any) -> dict[str, Tensor]:
    """Cast a norm and compare each result with the reference's, float32 ones but for what roundings make of them."""
    run = run_both(kernels, "cast", *args, **named)
    given, actual, expected = run.given, run.actual, run.expected
    for name, before in given.items():
        assert not isinstance(before, Tensor) or same_bits(before, run.left[name])
    assert all(a.shape == expected[name].shape and a.dtype == expected[name].dtype for name, a in actual.items())
    values = assert_statistics(run, actual)
    tile, cast = given["tile"], (given["dtype"], given["power_of_two"], given["margin"])
    assert_codes(actual["q"], expected["q"], actual["scale_inv"], values, tile)
    if given["second_dtype"] is None:
        laid_q = with_padding(transposed(actual["q"][:, : given["x"].shape[1]]), given["pad"])
        assert same_bits(actual["t"], laid_q if given["transpose"] else expected["t"])
        state = given["delayed_scale"]
        if state is not None and state[given["role"]] != 0:
            assert same_bits(actual["scale_inv"], expected["scale_inv"])
            assert_amax_close(actual["amax"], values, tile)
        else:
            assert_scales_close(actual["scale_inv"], actual["amax"], values, tile, *cast)
    else:
        assert_scales_close(actual["scale_inv"], None, values, tile, *cast)
        tile, cast = given["second_tile"], (given["second_dtype"], given["second_power_of_two"], given["second_margin"])
        if given["transpose"]:
            values, tile = Values(values.y.t(), values.size.t()), tile[::-1]
        assert_codes(actual["second"], expected["second"], actual["second_scale_inv"], values, tile)
        assert_scales_close(actual["second_scale_inv"], None, values, tile, *cast)
    return actual


def assert_codes(codes: Tensor, expected: Tensor, *found: Any) -> None:
    """Those of values within their roundings, and hardly any of them another than the reference's."""
    assert_codes_close(codes, expected, *found)
    assert (codes.view(torch.uint8) != expected.view(torch.uint8)).sum() <= max(1, codes.numel() // 1000)


def assert_statistics(run: Run, actual: dict[str, Tensor]) -> Values:
    """Compare mean, rstd and y with float64."""
    x, gamma, beta = run.given["x"], run.given["gamma"], run.given["beta"]
    kind, eps, zero_centered = run.given["kind"], run.given["eps"], run.given["zero_centered"]
    y, *_ = normalise(x, gamma, beta, kind, eps, zero_centered)
    wide = x.double()
    mean = wide.mean(1) if kind == "layer_norm" else torch.zeros(len(x)).double()
    centred, size = wide - mean[:, None], wide.abs().mean(1)
    rstd = (centred.square().mean(1) + eps).rsqrt()
    finite, growth = rstd.isfinite() & (rstd > 0), 1 + (size * rstd) ** 2  # of roundings, where the mean is far from 0
    if kind == "layer_norm":
        assert ((actual["mean"] - mean).abs() <= ROUNDINGS * size)[finite].all()
    assert ((actual["rstd"] - rstd).abs() <= ROUNDINGS * rstd * growth)[finite].all()
    size = (wide.abs() + size[:, None]) * (rstd * growth)[:, None] * (gamma.double().abs() + zero_centered)
    size = size.nan_to_num(0.0) + (0.0 if beta is None else beta.double().abs())
    found = actual["y"]
    if found.numel() > 0:
        fault = ~y.isfinite()
        info = torch.finfo(x.dtype)
        allowed = info.eps / 2 * (y.double().abs() + info.smallest_normal) + ROUNDINGS * size
        assert ((found.double() - y).abs() <= allowed)[~fault].all()
        assert torch.equal(found[fault].isnan(), y[fault].isnan())
    return Values(y, size)


LINES = ["line_amax_kernel", "cast_lines_kernel"]
LAUNCHES: list[tuple[Any, Any, list[str]]] = [  # a tile; another's, or a delayed scale and whether it is known to exist
    (ALL, None, ["norm_tensor_kernel", "cast_tensor_kernel"]),
    (ALL, (2.0, True), ["norm_tensor_kernel"]),
    (ALL, (2.0, False), ["norm_tensor_kernel", "cast_tensor_kernel"]),
    (ALL, (0.0, True), ["norm_tensor_kernel", "cast_tensor_kernel"]),
    (ROW, None, ["norm_rows_kernel"]),
    (COLUMN, None, ["norm_tensor_kernel", *LINES]),
    ((1, 128), None, ["norm_blocks_kernel"]),
    ((32, 32), None, ["norm_blocks_kernel"]),
    ((128, 128), None, ["norm_tensor_kernel", "cast_blocks_kernel"]),
    ((1, 32), (32, 1), ["norm_blocks_kernel"]),
    ((1, 128), (128, 1), ["norm_tensor_kernel", "cast_blocks_kernel"]),
    (ROW, COLUMN, ["norm_tensor_kernel", *LINES]),
]


def test_launches(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    x, norm = torch.randn(40, 48).to(kernels.device), of_norm(torch.randn(48).to(kernels.device), None, "rms_norm")
    launched = count_launches(kernels, monkeypatch)
    for tile, other, expected in LAUNCHES:
        state = state_of(kernels, *other) if other and isinstance(other[0], float) else None
        two = second(E4M3, other, False, 0) if other and state is None else {}
        launched.clear()
        kernels.cast(x, state, 1, E4M3, tile, False, 0, True, 16, **two, **norm, keep=True)
        assert launched == expected, (tile, other)


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows(kernels: TritonKernels, kind: str) -> None:
    x, gamma = torch.randn(300, 17).to(kernels.device), torch.randn(17).to(kernels.device)
    norm = of_norm(gamma, None, kind)
    check_norm(kernels, x, state_of(kernels, 50.0), 1, E4M3, ALL, False, 0, True, 16, **norm, keep=True)
    check_norm(kernels, x, None, 0, E4M3, ROW, False, 0, True, 16, **norm, **second(E4M3, COLUMN, False, 0))


@pytest.mark.parametrize(
    "cast", [CASTS[3], CASTS[5], *(pytest.param(CASTS[at], marks=pytest.mark.full) for at in (0, 6, 7))], ids=str
)
def test_infinities_made_on_the_way(kernels, cast, monkeypatch):
    use_small_tiles(kernels, monkeypatch)
    # gamma has them, or overflows: amax is that of what is finite, and all else is cast as if they were not there
    tile, scale, known = cast
    x, gamma = torch.randn(17, 150), torch.randn(150)
    gamma[[7, 100, 149]] = torch.tensor([math.inf, -math.inf, math.nan])
    state = None if scale is None else state_of(kernels, scale, known)
    for fmt in FORMATS:
        norm = of_norm(gamma.to(kernels.device), None, "layer_norm")
        cast = state, 1, fmt, tile, False, 0, True, 16
        found = check_norm(kernels, x.to(kernels.device), *cast, **norm, keep=True)
        assert found["amax"].isfinite().all() and (found["amax"] > 0).any()
        values = found["q"][:, :150].float()
        assert not values[:, 7].isfinite().any() and values[:, [6, 8]].isfinite().all()


def test_parameters_that_are_not_contiguous(kernels: TritonKernels) -> None:
    x = torch.randn(20, 40).to(kernels.device)
    gamma, beta = (torch.randn(40, 3).to(kernels.device)[:, 1] for _ in range(2))
    for tile in (ALL, ROW, (1, 32)):
        check_norm(kernels, x, None, 0, E4M3, tile, False, 0, True, **of_norm(gamma, beta, "layer_norm"))
