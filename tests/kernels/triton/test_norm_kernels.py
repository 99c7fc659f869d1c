"""Casts of norms: rows whose statistics are hard in float32, overflows, and launches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.casts import ALL, E4M3, Call, check, of_norm, second
from tests.support.definitions import same_bits
from tests.support.passes import before_of
from tests.support.triton_cases import count_launches, use_small_tiles
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu
ROW, LINE = (1, -1), (-1, 1)


def statistics(kernels: TritonKernels, x: Tensor, kind: str = "layer_norm", eps: float = 0.0) -> tuple[Tensor, Tensor]:
    norm = of_norm(torch.ones(x.shape[1]), None, kind, eps)
    *_, mean, rstd, _ = kernels.cast(x, None, 0, E4M3, ALL, False, 0, True, **norm)
    return mean, rstd


def rows() -> dict[str, Tensor]:
    """Rows of 500 elements: the first tile of the small ones holds 32."""
    normal = torch.randn(500)
    first_differs, outlier, only_in_the_last = normal.clone(), normal.clone(), torch.zeros(500)
    first_differs[:32] += 1e4
    outlier[3] = 1e6
    only_in_the_last[480:] = torch.randn(20)
    return {
        "normal": normal,
        "far from 0": 1e4 + normal,
        "very far from 0": 3e5 + normal,
        "the first tile is elsewhere": first_differs,
        "an outlier in the first tile": outlier,
        "nothing but in the last tile": only_in_the_last,
        "tiny": normal * 1e-15,
        "large": normal * 1e15,
        "rising": torch.arange(500.0) + 1e3,
    }


@pytest.mark.usefixtures("tiles_of_any_size")
def test_mean_and_rstd(kernels: TritonKernels) -> None:
    x = torch.stack([*rows().values()])
    mean, rstd = statistics(kernels, x)
    exact = x.double()
    assert ((mean - exact.mean(1)).abs() <= 2.0**-21 * exact.abs().mean(1)).all()
    relative = (rstd * exact.var(1, correction=0).sqrt() - 1).abs()
    assert (relative <= 2.0**-18).all(), dict(zip(rows(), relative.tolist(), strict=True))
    mean, rstd = statistics(kernels, x, "rms_norm")
    assert mean.numel() == 0
    assert ((rstd * exact.square().mean(1).sqrt() - 1).abs() <= 2.0**-22).all()


@pytest.mark.usefixtures("tiles_of_any_size")
def test_rows_that_do_not_vary(kernels: TritonKernels) -> None:
    values = torch.tensor([0.0, 1.0, -3.0, 1 / 3, 1e4 + 1 / 3, 1e30])
    mean, rstd = statistics(kernels, values[:, None].expand(-1, 300).contiguous(), eps=1e-2)
    assert ((mean - values).abs() <= 2.0**-22 * values.abs()).all()
    assert ((rstd[:4] - 10).abs() < 1e-5).all() and (rstd >= 0).all() and (rstd <= 10.0001).all()


def state_of(kernels: TritonKernels, scale: float, known: bool = True) -> Tensor:
    state = torch.full((3,), 7.0)
    state[1] = scale
    if known:
        kernels.module("delayed_update").committed(state, torch.zeros(3, 4), before_of(state), (True, True, True))
    return state


LINES = ["line_amax_kernel", "cast_lines_kernel"]
LAUNCHES: list[tuple[Any, Any, list[str]]] = [  # a tile; another's, or a delayed scale and whether it is known to exist
    (ALL, None, ["norm_tensor_kernel", "cast_tensor_kernel"]),
    (ALL, (2.0, True), ["norm_tensor_kernel"]),
    (ALL, (2.0, False), ["norm_tensor_kernel", "cast_tensor_kernel"]),
    (ALL, (0.0, True), ["norm_tensor_kernel", "cast_tensor_kernel"]),
    (ROW, None, ["norm_rows_kernel"]),
    (LINE, None, ["norm_tensor_kernel", *LINES]),
    ((1, 128), None, ["norm_blocks_kernel"]),
    ((32, 32), None, ["norm_blocks_kernel"]),
    ((128, 128), None, ["norm_tensor_kernel", "cast_blocks_kernel"]),
    ((1, 32), (32, 1), ["norm_blocks_kernel"]),
    ((1, 128), (128, 1), ["norm_tensor_kernel", "cast_blocks_kernel"]),
    (ROW, LINE, ["norm_tensor_kernel", *LINES]),
]


def test_launches(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    x, norm = torch.randn(4, 48), of_norm(torch.randn(48), None, "rms_norm")
    launched = count_launches(kernels, monkeypatch)
    for tile, other, expected in LAUNCHES:
        state = state_of(kernels, *other) if other and isinstance(other[0], float) else None
        two = second(E4M3, other, False, 0) if other and state is None else {}
        launched.clear()
        kernels.cast(x, state, 1, E4M3, tile, False, 0, True, 16, **two, **norm, keep=True)
        assert launched == expected, (tile, other)


@pytest.mark.parametrize("tile", [ALL, ROW], ids=str)
def test_infinities_made_on_the_way(kernels: TritonKernels, tile: tuple[int, int], monkeypatch) -> None:
    """Amax is that of finite values where gamma is infinite or overflows; all other values are cast as without them."""
    use_small_tiles(kernels, monkeypatch)
    x, gamma = torch.randn(17, 150), torch.randn(150)
    gamma[[7, 100, 149]] = torch.tensor([math.inf, -math.inf, math.nan])
    state = state_of(kernels, 0.37) if tile == ALL else None
    norm = of_norm(gamma, None, "layer_norm")
    for fmt in (torch.float8_e4m3fn, torch.float8_e5m2):
        call = Call("cast", (x, state, 1, fmt, tile, False, 0, True, 16), norm | {"keep": True})
        outputs = check(kernels.cast, call, False)
        assert outputs["amax"].isfinite().all() and (outputs["amax"] > 0).any()
        values = outputs["q"][:, :150].float()
        assert not values[:, 7].isfinite().any() and values[:, [6, 8]].isfinite().all()


@pytest.mark.usefixtures("tiles_of_any_size")
def test_gradients_are_two_launches_whose_bits_are_the_same_each_time(kernels, monkeypatch):
    args = *torch.randn(2, 9, 130), torch.randn(130), *torch.rand(2, 9), "layer_norm", False, True
    launched = count_launches(kernels, monkeypatch)
    first, again = kernels.norm_backward(*args), kernels.norm_backward(*args)
    assert launched == ["norm_backward_kernel", "norm_backward_sum_kernel"] * 2
    assert all(map(same_bits, first, again))
