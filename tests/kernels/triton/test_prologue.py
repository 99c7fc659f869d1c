"""Casts of activations and of their gradients: against the reference, and against float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.scaling.delayed import State
from tests.support.casts import second
from tests.support.combinations import each_pair
from tests.support.definitions import all_codes
from tests.support.exact_activation import GATED
from tests.support.triton_cases import (
    ALL,
    DTYPES,
    E4M3,
    E5M2,
    FORMATS,
    LAYOUTS,
    check,
    check_close,
    laid,
    to,
    update_args,
    use_small_tiles,
    values_of,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

EXACT = {"relu", "squared_relu", "reglu"}  # no rounding but a product's: the same bits
SOME = ["silu", "squared_relu", "swiglu", "geglu", "reglu"]
# the size of (gate | up) is twice as many columns
SHAPES = [(0, 17), (17, 0), (3, 270), (270, 3), (33, 57), (32, 128)]
# what h is: numbers, or codes and the tile of their scale_inv
H = [*DTYPES, (E4M3, ALL), (E5M2, (1, -1)), (E4M3, (1, 128)), (E4M3, (128, 128)), (E5M2, (3, 5))]
# of h and of its output's gradient
VALUES = [("varied", "varied"), ("faults", "varied"), ("only faults", "faults"), ("edge", "edge")]
VALUES += [("varied", "only faults"), ("zeros", "varied"), ("varied", "zeros")]


INPUTS: dict[str, Any] = {
    "backward": [False, True],
    "h": H,
    "values": VALUES,
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "h_layout": LAYOUTS,
    "scale_layout": ["rows", "columns", "strided"],
    "small": [False, True],
    "pad": [1, 16],
    "column_sum": [False, True],
}


def given(
    device: torch.device,
    shape: tuple[int, int],
    activation: str,
    backward: bool,
    h: Any,
    values: tuple[str, str] = ("varied", "varied"),
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "rows",
    h_layout: str = "rows",
    scale_layout: str = "rows",
    **_: Any,
) -> tuple[Tensor, tuple[Any, ...]]:
    """X and its activation; ``shape`` is that of the activation's output."""
    rows, cols = shape
    wide = rows, 2 * cols if activation in GATED else cols
    scaling: tuple[Any, ...] = ()
    if isinstance(h, tuple):
        fmt, tile = h
        numbers = values_of(values[0], wide, torch.float32)
        codes, _, scale_inv, *_ = REFERENCE["cast"](numbers, None, 0, fmt, tile, False, 0)
        of_h = laid(codes.view(torch.uint8), h_layout, device).view(fmt)
        scaling = laid(scale_inv, scale_layout, device), tile
    else:
        of_h = laid(values_of(values[0], wide, h), h_layout, device)
    if not backward:
        return of_h, (activation, None, *scaling)
    return laid(values_of(values[1], shape, dtype), layout, device), (activation, of_h, *scaling)


def run(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], op: str, *args: Any, **named: Any
) -> None:
    """Run an op with these arguments between x and its activation, and compare it with the reference."""
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    x, activation = given(kernels.device, **case)
    compare = check if case["activation"] in EXACT else check_close
    sums = "edge" not in case["values"]
    compare(kernels, op, x, *args, case["pad"], case["column_sum"], *activation, **named, compare_sums=sums)


# a tile, or of the whole tensor the delayed scale
SCALINGS = [None, 0.0, 0.37, 2.0**60, (1, -1), (-1, 1), (1, 128), (128, 128), (32, 1), (24, 40)]


@each_pair(
    transpose=[False, True],
    scaling=SCALINGS,
    role=[0, 1, 2],
    activation=SOME,
    shape=SHAPES,
    fmt=FORMATS,
    power_of_two=[False, True],
    margin=[0, 3],
    **INPUTS,
)
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    state, tile = None, case["scaling"]
    if isinstance(tile, float):
        state = torch.full((3,), 7.0)
        state[case["role"]] = tile
        state = state.to(kernels.device)
    cast = case["fmt"], tile if isinstance(tile, tuple) else ALL, case["power_of_two"], case["margin"]
    run(kernels, monkeypatch, case, "cast", state, case["role"], *cast, case["transpose"])


# both from one launch; and not both
TILES = [((1, 128), (128, 1)), ((1, 32), (32, 1)), ((8, 2), (128, 128)), ((1, -1), (-1, 1)), (ALL, (-1, 1))]
TILES += [((32, 1), (20, 48))]


@each_pair(
    tiles=TILES,
    activation=SOME,
    shape=SHAPES,
    formats=[(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)],
    powers_of_two=[(False, False), (True, True), (False, True)],
    transpose_second=[False, True],
    **INPUTS,
)
def test_cast_two_scalings(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    (tile, second_tile), (fmt, second_fmt) = case["tiles"], case["formats"]
    power_of_two, second_power_of_two = case["powers_of_two"]
    cast, other = (fmt, tile, power_of_two, 1), second(second_fmt, second_tile, second_power_of_two, 2)
    run(kernels, monkeypatch, case, "cast", None, 0, *cast, case["transpose_second"], **other)


@each_pair(
    scale=[0.0, 0.37, 2.0**60],
    activation=SOME,
    shape=SHAPES,
    fmt=FORMATS,
    length=[1, 4, 5],
    reduce=["max", "most_recent"],
    amaxes=[(None, None), (3.0, None), (1e-3, 20.0)],
    powers_of_two=[(False, True, False), (True, False, True)],
    transpose=[False, True],
    **INPUTS,
)
def test_cast_and_commit(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    state = torch.tensor([5.0, 0.0, case["scale"]], device=kernels.device)
    history = torch.rand(3, case["length"]).to(kernels.device)
    before = State.empty(1, kernels.device).before
    amaxes = [None if a is None else torch.full((1, 1), a, device=kernels.device) for a in case["amaxes"]]
    update = update_args(case["reduce"], case["powers_of_two"])
    cast = (case["fmt"], case["powers_of_two"][2], 2)
    given = state, history, before, *amaxes, *cast, *update
    run(kernels, monkeypatch, case, "cast_and_commit", *given, case["transpose"])


@pytest.mark.covering(1)
@pytest.mark.usefixtures("tiles_of_any_size")
@pytest.mark.parametrize("cols", [9, 20, 57])
def test_padding_of_the_second_half(kernels: TritonKernels, cols: int) -> None:
    # after 20 it lies in the tiles that hold the half, after the others it ends beyond them
    dy, (*_, h) = given(kernels.device, (21, cols), "reglu", True, torch.bfloat16)
    for tile in (ALL, (1, -1), (-1, 1), (16, 1)):
        check(kernels, "cast", dy, None, 0, E4M3, tile, False, 0, True, 16, True, "reglu", h)
        check(kernels, "cast", dy, None, 0, E4M3, tile, False, 0, False, 16, True, "reglu", h)


@pytest.mark.covering(1)
@pytest.mark.parametrize("fault", [0.0, math.inf], ids=["", "inf"])
@pytest.mark.parametrize("zeros", [slice(0, 100), slice(100, 200)], ids=["gate", "up"])
def test_either_half_may_hold_the_amax(kernels: TritonKernels, zeros: slice, fault: float) -> None:
    dy, (*_, h) = given(kernels.device, (40, 100), "swiglu", True, torch.bfloat16)
    h[:, zeros] = 0
    dy[7, 50] = fault
    for tile, state in ((ALL, None), (ALL, torch.full((3,), 0.5, device=kernels.device)), ((1, -1), None)):
        check_close(kernels, "cast", dy, state, 0, E4M3, tile, False, 0, False, 1, False, "swiglu", h)


# as they don't cancel where (1 + tanh) / 2 and (1 + erf) / 2 do
TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda h: h * torch.sigmoid(h),
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "gelu": lambda h: h * torch.erfc(h * -math.sqrt(0.5)) / 2,
    "gelu_tanh": lambda h: h * torch.sigmoid(math.sqrt(8 / math.pi) * (h + 0.044715 * h**3)),
}


def each_value(kernels: TritonKernels, x: Tensor, *activation: Any) -> Tensor:
    """What is cast, float32: as the amax of blocks of one element and their sign."""
    arguments = to(kernels.device, (x, None, 0, E4M3, (1, 1), True, 0, False, 1, False, *activation))
    codes, _, _, amax, _ = kernels.cast(*arguments)
    negative = codes.view(torch.uint8) >= 0x80
    return torch.where(negative, -amax, amax).cpu()


@pytest.mark.parametrize("function", TAILS)
def test_tails_keep_their_digits(kernels: TritonKernels, function: str) -> None:
    h = -torch.linspace(0.1, 45, 4096).view(64, 64)
    truth = TAILS[function](h.double())
    assert bool(((each_value(kernels, h, function) - truth).abs() <= 2.0**-16 * truth.abs() + 2.0**-119).all())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
def test_every_code(kernels: TritonKernels, backward: bool, activation: str, fmt: torch.dtype) -> None:
    codes = all_codes(fmt).view(16, 16)
    if activation in GATED:
        codes = torch.cat([codes.view(torch.uint8), codes.view(torch.uint8).flip(0, 1)], 1).view(fmt)
    codes, scale_inv = codes.to(kernels.device), torch.full((1, 1), 0.37, device=kernels.device)
    x, preactivation = (torch.randn(16, 16).to(kernels.device), codes) if backward else (codes, None)
    compare = check if activation in EXACT else check_close
    how = None, 0, E5M2, (1, 1), False, 0, False, 1, True
    compare(kernels, "cast", x, *how, activation, preactivation, scale_inv, ALL)
