"""Norms and their gradients against float64, by the reference, a CPU and Triton; test_cast.py casts them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.kernels.arguments import NormSource
from octavo.kernels.cpu import codes
from octavo.kernels.reference.norm import normalise
from tests.kernels.conftest import Ops
from tests.support.casts import DTYPES, LAYOUTS, laid, poisoned_memory, to, values_of
from tests.support.combinations import dealt, each_pair
from tests.support.definitions import same_bits
from tests.support.triton_cases import assert_counters_are_zero, use_small_tiles

KINDS = ["layer_norm", "rms_norm"]
HALF_ULP = 2.0**-24
# with small tiles rows of more than 256 elements don't fit one
SHAPES = [(0, 17), (17, 0), (1, 1), (17, 1), (1, 1000), (17, 127), (127, 128), (70, 17), (9, 256), (7, 300)]


def double(norm: NormSource) -> NormSource:
    return NormSource(*(a.double() if isinstance(a, Tensor) else a for a in norm))


def norm_source(
    shape: tuple[int, int],
    kind: str,
    dtype: torch.dtype = torch.float32,
    gamma_dtype: torch.dtype = torch.float32,
    beta: bool = True,
    zero_centered: bool = False,
    eps: float = 1e-5,
    offset: float = 0.0,
    **_: Any,
) -> NormSource:
    rows, cols = shape
    x = (torch.randn(shape) + offset) * torch.logspace(-1, 1, rows)[:, None]
    gamma, added = torch.randn(2, cols).to(gamma_dtype)
    return NormSource(x.to(dtype), gamma, added if beta else None, kind, eps, zero_centered)


def exact(norm: NormSource) -> Tensor:
    x, gamma, beta, kind, eps, zero_centered = norm
    factor = gamma + 1 if zero_centered else gamma
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[1:], factor, beta, eps)
    y = F.rms_norm(x, x.shape[1:], factor, eps)
    return y if beta is None else y + beta


def statistics(norm: NormSource) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return in float64 mean and rstd [R, 1], n [R, C], and [R, 1] by how much a rounding of x grows in n."""
    x = norm.x.double()
    mean = x.mean(1, keepdim=True) if norm.kind == "layer_norm" else torch.zeros(len(x), 1, dtype=torch.float64)
    rstd = ((x - mean).square().mean(1, keepdim=True) + norm.eps).rsqrt()
    growth = 1 + x.abs().mean(1, keepdim=True) * rstd * (norm.kind == "layer_norm")
    return mean, rstd, (x - mean) * rstd, growth


def factor_of(norm: NormSource) -> Tensor:
    return norm.gamma.double() + norm.zero_centered


def rounding(dtype: torch.dtype, truth: Tensor) -> Tensor:
    """The error of rounding to ``dtype``."""
    info = torch.finfo(dtype)
    return info.eps / 2 * truth.abs() + info.smallest_normal * info.eps


def check_norm(ops: Ops, case: dict[str, Any]) -> None:
    """A norm alone, or of a sum with a residual, against float64."""
    norm = norm_source(**case)
    x, dtype = norm.x, norm.x.dtype
    residual = torch.randn(x.shape).to(dtype) if case["residual"] else None
    total = x if residual is None else (x.double() + residual.double()).float().to(dtype)
    args = laid(x, case["layout"]), *norm[1:], None if residual is None else laid(residual, case["residual_layout"])
    with poisoned_memory():
        y, mean, rstd, written = ops.of("norm")(*args)
    assert y.dtype == written.dtype == dtype and y.is_contiguous() and y.shape == x.shape
    assert same_bits(written, total) if residual is not None else written.shape == (0, 0)
    if not x.shape[1]:  # whose statistics are 0 / 0
        return
    truth = exact(double(norm._replace(x=total)))
    exact_mean, exact_rstd, n, growth = statistics(norm._replace(x=total))
    assert mean.dtype == rstd.dtype == torch.float32 and rstd.shape == x.shape[:1]
    error, growth_of_rstd = (2.0**-19, growth[:, 0]) if ops.name == "Triton" else (4 * HALF_ULP, 1.0)
    natural = (n.abs() + growth) * factor_of(norm).abs() + (0.0 if norm.beta is None else norm.beta.double().abs())
    assert bool(((y.double() - truth).abs() <= error * natural + rounding(dtype, truth)).all())
    assert bool(((rstd.double() - exact_rstd[:, 0]).abs() <= error * growth_of_rstd * exact_rstd[:, 0]).all())
    if norm.kind == "layer_norm":
        assert bool(((mean.double() - exact_mean[:, 0]).abs() <= error * total.double().abs().mean(1)).all())
    else:
        assert mean.shape == (0,)


@each_pair(
    kind=KINDS,
    shape=SHAPES,
    dtype=DTYPES,
    gamma_dtype=DTYPES,
    beta=[False, True],
    zero_centered=[False, True],
    eps=[1e-6, 1e-5, 1e-2],
    offset=[0.0, 3.0, 1000.0],
    residual=[False, True],
    layout=LAYOUTS,
    residual_layout=LAYOUTS,
    small=[False, True],
)
def test_a_norm_alone_or_of_a_sum(case: dict[str, Any], ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    if ops.kernels and case["small"]:
        use_small_tiles(ops.kernels, monkeypatch)
    check_norm(ops, case)


BACKWARD: dict[str, Any] = {
    "kind": KINDS,
    "shape": SHAPES,
    **{f"{which}dtype": DTYPES for which in ("", "dy_", "gamma_")},
    "residual_dtype": [None, *DTYPES],
    "beta": [False, True],
    "zero_centered": [False, True],
    "offset": [0.0, 30.0],
    **{f"{which}layout": LAYOUTS for which in ("", "dy_", "residual_")},
    "small": [False, True],
    "chunk": [1, 500, 1 << 18],
}


def check_gradients(ops: Ops, case: dict[str, Any]) -> None:
    norm = norm_source(**case)
    if ops.name == "Triton":
        norm = norm._replace(x=values_of("varied", case["shape"], case["dtype"]))
    dy = torch.randn(norm.x.shape).to(case["dy_dtype"])
    residual = None if case["residual_dtype"] is None else torch.randn(norm.x.shape).to(case["residual_dtype"])
    mean, exact_rstd, n, growth = statistics(norm)
    of_rows = (mean.float()[:, 0] if norm.kind == "layer_norm" else torch.zeros(0)), exact_rstd.float()[:, 0]
    vectors = [norm.gamma, *of_rows]
    if ops.kernels:  # which take them of any stride
        vectors = [torch.stack((t, t + 1), 1)[:, 0] for t in vectors]
    args = [laid(dy, case["dy_layout"]), laid(norm.x, case["layout"]), *vectors, *norm[3::2]]
    args += [case["beta"], None if residual is None else laid(residual, case["residual_layout"])]
    before = to("cpu", args)
    with poisoned_memory():
        dx, dgamma, dbeta = ops.of("norm_backward")(*args)
    assert all(not isinstance(a, Tensor) or same_bits(a, b) for a, b in zip(before, args, strict=True))

    leaves = [a.double().requires_grad_() for a in norm[:3] if a is not None]
    y = exact(NormSource(*leaves, *[None] * (3 - len(leaves)), *norm[3:]))
    truth, truth_gamma, *truth_beta = torch.autograd.grad((y * dy.double()).sum(), leaves)
    truth = truth + (0.0 if residual is None else residual.double())
    w, n = (dy * factor_of(norm)).abs(), n.abs()
    natural = exact_rstd * growth * (w + n * (w * n).mean(1, keepdim=True) + w.mean(1, keepdim=True)) + truth.abs()
    error = 2.0**-19 if ops.name == "Triton" else 4 * HALF_ULP
    assert (dx.dtype, dgamma.dtype, dbeta.dtype) == (norm.x.dtype, *[norm.gamma.dtype] * 2) and dx.is_contiguous()
    assert bool(((dx.double() - truth).abs() <= error * natural + rounding(dx.dtype, truth)).all())
    allowed = error * (dy.abs() * (n + growth)).sum(0) + rounding(dgamma.dtype, truth_gamma)
    assert bool(((dgamma.double() - truth_gamma).abs() <= allowed).all())
    assert dbeta.shape == (norm.gamma.shape if case["beta"] else (0,))
    if case["beta"]:
        allowed = error * dy.double().abs().sum(0) + rounding(dgamma.dtype, truth_beta[0])
        assert bool(((dbeta.double() - truth_beta[0]).abs() <= allowed).all())


@pytest.mark.parametrize("batch", range(2))
def test_backward_against_float64(ops: Ops, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in dealt(batch, 10 if ops.kernels else 30, **BACKWARD):
        with monkeypatch.context() as patch:
            patch.setattr(codes, "CHUNK", case["chunk"])
            if ops.kernels and case["small"]:
                use_small_tiles(ops.kernels, patch)
            check_gradients(ops, case)
        if ops.kernels:
            assert_counters_are_zero(ops.kernels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_fault_stays_in_its_row(fault: float, kind: str, ops: Ops) -> None:
    norm, dy = norm_source((9, 20), kind), torch.randn(9, 20)
    clean = normalise(*norm)[0]
    norm.x[4, 7], dy[8, 19] = fault, math.inf
    y, mean, rstd = normalise(*norm)
    others = torch.tensor([row not in (4, 8) for row in range(9)])
    assert same_bits(y[others], clean[others]) and bool(y[4].isnan().any())
    dx, dgamma, dbeta = ops.of("norm_backward")(dy, *norm[:2], mean, rstd, kind, False, True)
    assert dx[others].isfinite().all() and dx[4].isnan().any() and not dx[8].isfinite().any()
    assert dgamma[7].isnan() and dbeta[:19].isfinite().all() and dbeta[19] == math.inf


@pytest.mark.parametrize(("place", "said"), [(0, r"dy of shape \[2, 5\]"), (8, r"residual of shape \[2, 5\]")])
def test_gradients_of_another_shape_are_refused(place: int, said: str) -> None:
    x, rows = torch.ones(3, 5), torch.ones(3)
    args: list[Any] = [x, x, x[0], rows, rows, "layer_norm", False, True, x]
    args[place] = torch.ones(2, 5)
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=said):
            kernels.norm_backward(*to(device, args))
