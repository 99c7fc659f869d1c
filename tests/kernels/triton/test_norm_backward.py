"""The gradients of norms against float64, and that they never differ from run to run."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.triton_cases import (
    DTYPES,
    LAYOUTS,
    assert_counters_are_zero,
    count_launches,
    laid,
    poisoned_memory,
    to,
    use_small_tiles,
    values_of,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

KINDS = ["layer_norm", "rms_norm"]
# with small tiles rows of more than 256 elements don't fit one
SHAPES = [(0, 17), (17, 0), (1, 1), (1, 700), (17, 127), (37, 128), (70, 17), (9, 256), (7, 300)]
EPS = 1e-4
ROUNDINGS = 2.0**-19


class Exact(NamedTuple):
    """The results in float64, and what roundings are relative to."""

    results: tuple[Tensor, Tensor, Tensor]
    sizes: tuple[Tensor, Tensor, Tensor]


def normalised(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """(n [R, C], mean [R, 1] or 0, rstd [R, 1])."""
    mean = x.mean(1, keepdim=True) if kind == "layer_norm" else x.new_zeros(len(x), 1)
    rstd = ((x - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
    return (x - mean) * rstd, mean, rstd


def exact(dy: Tensor, x: Tensor, gamma: Tensor, kind: str, zero_centered: bool, residual: Tensor | None) -> Exact:
    """By autograd."""
    wide, g, b = (t.double().requires_grad_() for t in (x, gamma, torch.zeros_like(gamma)))
    (normalised(wide, kind)[0] * (g + float(zero_centered)) + b).backward(dy.double())
    dx, dgamma, dbeta = wide.grad, g.grad, b.grad
    n, mean, rstd = normalised(x.double(), kind)
    grown = n.abs() + x.double().abs() * rstd + mean.abs() * rstd  # what a rounding of x or of the mean becomes
    w = (dy.double() * (gamma.double() + float(zero_centered))).abs()
    size = rstd * (w + grown * (w * grown).mean(1, keepdim=True) + w.mean(1, keepdim=True))
    added = torch.zeros(()) if residual is None else residual.double()
    results = dx + added, dgamma, dbeta
    return Exact(results, (size + added.abs(), (dy.double().abs() * grown).sum(0), dy.double().abs().sum(0)))


def assert_close(actual: Tensor, right: Tensor, size: Tensor) -> None:
    info = torch.finfo(actual.dtype)
    allowed = info.eps / 2 * (right.abs() + info.smallest_normal) + ROUNDINGS * size
    assert ((actual.double() - right).abs() <= allowed).all()


def statistics(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    _, mean, rstd = normalised(x.double(), kind)
    return (mean.float().flatten() if kind == "layer_norm" else torch.zeros(0)), rstd.float().flatten()


@each_pair(
    kind=KINDS,
    shape=SHAPES,
    of_dy=DTYPES,
    dtype=DTYPES,
    of_gamma=DTYPES,
    of_residual=[None, *DTYPES],
    zero_centered=[False, True],
    with_beta=[False, True],
    layout=LAYOUTS,
    dy_layout=LAYOUTS,
    residual_layout=LAYOUTS,
    small=[False, True],
)
def test_gradients(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    shape, kind, zero_centered = case["shape"], case["kind"], case["zero_centered"]
    x, dy = values_of("varied", shape, case["dtype"]), torch.randn(shape).to(case["of_dy"])
    gamma = torch.randn(shape[1]).to(case["of_gamma"])
    residual = None if case["of_residual"] is None else torch.randn(shape).to(case["of_residual"])
    right, sizes = exact(dy, x, gamma, kind, zero_centered, residual)
    tensors = [laid(dy, case["dy_layout"], kernels.device), laid(x, case["layout"], kernels.device)]
    args = [*tensors, *to(kernels.device, (gamma, *statistics(x, kind))), kind, zero_centered, case["with_beta"]]
    args.append(None if residual is None else laid(residual, case["residual_layout"], kernels.device))
    given = to("cpu", args)
    with poisoned_memory():
        found = kernels.norm_backward(*args)
    assert_counters_are_zero(kernels)
    assert all(not isinstance(a, Tensor) or same_bits(a, b) for a, b in zip(given, to("cpu", args), strict=True))
    dx, dgamma, dbeta = to("cpu", found)
    assert dx.shape == x.shape and dx.dtype == x.dtype and dx.is_contiguous()
    assert dgamma.shape == gamma.shape and dgamma.dtype == dbeta.dtype == gamma.dtype
    assert dbeta.shape == (gamma.shape if case["with_beta"] else (0,))
    assert_close(dx, right[0], sizes[0])
    assert_close(dgamma, right[1], sizes[1])
    if case["with_beta"]:
        assert_close(dbeta, right[2], sizes[2])


@pytest.mark.usefixtures("tiles_of_any_size")
def test_two_launches_whose_bits_are_the_same_each_time(kernels, monkeypatch):
    x, dy, gamma = torch.randn(9, 130), torch.randn(9, 130), torch.randn(130)
    args = *to(kernels.device, (dy, x, gamma, *statistics(x, "layer_norm"))), "layer_norm", False, True
    launched = count_launches(kernels, monkeypatch)
    first, second = kernels.norm_backward(*args), kernels.norm_backward(*args)
    assert launched == ["norm_backward_kernel", "norm_backward_sum_kernel"] * 2
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("tiles_of_any_size")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_stays_in_its_row(kernels: TritonKernels, kind: str) -> None:
    x, dy, gamma = torch.randn(23, 270), torch.randn(23, 270), torch.randn(270)
    x[5, 200], dy[22, 269] = math.nan, math.inf
    args = *to(kernels.device, (dy, x, gamma, *statistics(x, kind))), kind, False, True
    dx, dgamma, dbeta = to("cpu", kernels.norm_backward(*args))
    faulty = torch.zeros(23, dtype=torch.bool)
    faulty[[5, 22]] = True
    assert dx[~faulty].isfinite().all() and not dx[5].isfinite().any() and not dx[22].isfinite().any()
    assert not dgamma.isfinite().any()  # row 5 is in each
    assert dbeta[:269].isfinite().all() and dbeta[269] == math.inf


def test_statistics_and_gamma_in_any_memory(kernels: TritonKernels) -> None:
    x, dy, gamma = torch.randn(20, 40), torch.randn(20, 40), torch.randn(40)
    mean, rstd = statistics(x, "layer_norm")
    expected = kernels.norm_backward(*to(kernels.device, (dy, x, gamma, mean, rstd)), "layer_norm", False, True)
    strided = [torch.stack((t, t + 1), 1).to(kernels.device)[:, 0] for t in (gamma, mean, rstd)]
    found = kernels.norm_backward(*to(kernels.device, (dy, x)), *strided, "layer_norm", False, True)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
