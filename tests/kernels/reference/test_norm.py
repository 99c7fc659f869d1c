"""Norms and their gradients against float64, and casts of them against casts of what they compute."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.kernels.reference.norm import normalise
from tests.support import definitions
from tests.support.casts import check_codes, of_norm, second
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = ["layer_norm", "rms_norm"]
SHAPES = [(0, 5), (1, 1), (17, 1), (1, 1000), (17, 127), (127, 128)]
ALL = (-1, -1)
HALF_ULP = 2.0**-24

each_kind = pytest.mark.parametrize("kind", KINDS)


class Norm(NamedTuple):
    """The arguments that every norm begins with."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    kind: str
    eps: float
    zero_centered: bool

    def double(self) -> "Norm":
        return Norm(*(a.double() if isinstance(a, Tensor) else a for a in self))


def given(
    shape: tuple[int, int],
    kind: str,
    dtype: torch.dtype = torch.float32,
    of_gamma: torch.dtype = torch.float32,
    beta: bool = True,
    zero_centered: bool = False,
    eps: float = 1e-5,
    offset: float = 0.0,
    layout: str = "rows",
    **_: Any,
) -> Norm:
    rows, cols = shape
    x = (torch.randn(shape) + offset) * torch.logspace(-1, 1, rows)[:, None]
    gamma, added = torch.randn(cols).to(of_gamma), torch.randn(cols).to(of_gamma)
    x, gamma, added = (laid(t, layout) for t in (x.to(dtype), gamma, added))
    return Norm(x, gamma, added if beta else None, kind, eps, zero_centered)


def laid(t: Tensor, layout: str) -> Tensor:
    """As it is, or with other strides."""
    if layout == "rows":
        return t
    return t.t().contiguous().t() if t.ndim == 2 else torch.stack((t, t), 1)[:, 0]


def exact(norm: Norm) -> Tensor:
    x, gamma, beta, kind, eps, zero_centered = norm
    factor = gamma + 1 if zero_centered else gamma
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[1:], factor, beta, eps)
    y = F.rms_norm(x, x.shape[1:], factor, eps)
    return y if beta is None else y + beta


def statistics(norm: Norm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64 mean and rstd [R, 1], n [R, C], and [R, 1] by how much a rounding of x grows in n."""
    x = norm.x.double()
    mean = x.mean(1, keepdim=True) if norm.kind == "layer_norm" else torch.zeros(len(x), 1, dtype=torch.float64)
    rstd = ((x - mean).square().mean(1, keepdim=True) + norm.eps).rsqrt()
    growth = 1 + x.abs().mean(1, keepdim=True) * rstd * (norm.kind == "layer_norm")
    return mean, rstd, (x - mean) * rstd, growth


def factor_of(norm: Norm) -> Tensor:
    return norm.gamma.double() + norm.zero_centered


def rounding(dtype: torch.dtype, truth: Tensor) -> Tensor:
    """The error of rounding to ``dtype``."""
    info = torch.finfo(dtype)
    return info.eps / 2 * truth.abs() + info.smallest_normal * info.eps


def cast(norm: Norm, *args: Any, pad: int = 1, transpose: bool = False, **named: Any) -> tuple[Tensor, ...]:
    """A norm's cast; args are delayed_scale to margin."""
    x, *norm = norm
    args = args or (None, 0, E4M3, ALL, False, 0)
    return kernels.cast(x, *args, transpose, pad, **of_norm(*norm), **named)


NORM: dict[str, Any] = {
    "kind": KINDS,
    "shape": SHAPES,
    "dtype": DTYPES,
    "of_gamma": DTYPES,
    "beta": [False, True],
    "zero_centered": [False, True],
}
LAYOUTS = ["rows", "columns"]
CAST: dict[str, Any] = {
    "kind": KINDS,
    "shape": [(0, 5), (1, 1), (17, 127), (127, 130)],
    "dtype": DTYPES,
    "beta": [False, True],
    "transpose": [False, True],
    "pad": [1, 16],
    "keep": [False, True],
}


@each_pair(**NORM, eps=[1e-6, 1e-5, 1e-2], offset=[0.0, 3.0, 1000.0])
def test_against_float64(case: dict[str, Any]) -> None:
    norm = given(**case)
    truth = exact(norm.double())
    mean, rstd, n, growth = statistics(norm)
    y, found_mean, found_rstd = normalise(*norm)
    natural = (n.abs() + growth) * factor_of(norm).abs() + (0.0 if norm.beta is None else norm.beta.double().abs())
    assert bool(((y.double() - truth).abs() <= 4 * HALF_ULP * natural).all())
    assert y.dtype == found_mean.dtype == found_rstd.dtype == torch.float32
    assert y.is_contiguous() and found_rstd.shape == (case["shape"][0],)
    assert bool(((found_rstd.double() - rstd[:, 0]).abs() <= 4 * HALF_ULP * rstd[:, 0]).all())
    if norm.kind == "layer_norm":
        allowed = 4 * HALF_ULP * norm.x.double().abs().mean(1)
        assert bool(((found_mean.double() - mean[:, 0]).abs() <= allowed).all())
    else:
        assert found_mean.shape == (0,)

    *_, op_mean, op_rstd, kept = cast(norm, keep=True)
    assert same_bits(op_mean, found_mean) and same_bits(op_rstd, found_rstd)
    assert same_bits(kept, y.to(norm.x.dtype))


@each_pair(**NORM, residual=[False, True], offset=[0.0, 30.0], layout=LAYOUTS)
def test_backward_against_float64(case: dict[str, Any]) -> None:
    norm = given(**case)
    dy, residual = (laid(t, case["layout"]) for t in torch.randn(2, *norm.x.shape).to(norm.x.dtype))
    *_, mean, rstd, _ = cast(norm)
    added = residual if case["residual"] else None
    dx, dgamma, dbeta = kernels.norm_backward(dy, *norm[:2], mean, rstd, *norm[3::2], case["beta"], added)

    leaves = [a.double().requires_grad_() for a in norm[:3] if a is not None]
    y = exact(Norm(*leaves, *[None] * (3 - len(leaves)), *norm[3:]))
    truth, truth_gamma, *truth_beta = torch.autograd.grad((y * dy).sum(), leaves)
    truth = truth + (residual.double() if case["residual"] else 0.0)
    _, exact_rstd, n, growth = statistics(norm)
    w, n = (dy * factor_of(norm)).abs(), n.abs()
    natural = exact_rstd * growth * (w + n * (w * n).mean(1, keepdim=True) + w.mean(1, keepdim=True)) + truth.abs()
    assert (dx.dtype, dgamma.dtype) == (norm.x.dtype, norm.gamma.dtype) and dx.is_contiguous()
    assert bool(((dx.double() - truth).abs() <= 4 * HALF_ULP * natural + rounding(dx.dtype, truth)).all())
    allowed = 4 * HALF_ULP * (dy.abs() * (n + growth)).sum(0) + rounding(dgamma.dtype, truth_gamma)
    assert bool(((dgamma.double() - truth_gamma).abs() <= allowed).all())
    if case["beta"]:
        allowed = 4 * HALF_ULP * dy.double().abs().sum(0) + rounding(dgamma.dtype, truth_beta[0])
        assert bool(((dbeta.double() - truth_beta[0]).abs() <= allowed).all())
    else:
        assert dbeta.shape == (0,) and dbeta.dtype == norm.gamma.dtype


@each_pair(
    **CAST,
    fmt=FORMATS,
    tile=[ALL, (1, 128), (128, 128), (1, -1), (-1, 1), (3, 5)],
    second_tile=[(-1, 1), (128, 1), (3, 5)],
    scale=[None, 0.0, 3.0],
    scaling=[(False, 0), (True, 0), (False, 2)],
    layout=LAYOUTS,
)
def test_norm_casts(case: dict[str, Any]) -> None:
    """By one scaling and by two."""
    norm, fmt, tile, pad, transpose = given(**case), *(case[name] for name in ("fmt", "tile", "pad", "transpose"))
    before = [t.clone() for t in norm[:3] if t is not None]
    y, mean, rstd = normalise(*norm)
    kept = y.to(norm.x.dtype) if case["keep"] else norm.x.new_empty(0, 0)
    scale = case["scale"] if tile == ALL else None
    state = None if scale is None else torch.tensor([7.0, scale, 7.0])
    how = {"keep": case["keep"], "pad": pad, "transpose": transpose}
    qdata, laid, scale_inv, amax, *others = cast(norm, state, 1, fmt, tile, *case["scaling"], **how)
    codes, expected, expected_amax = definitions.cast(y, fmt, tile, *case["scaling"], scale or 0.0)
    assert same_bits(scale_inv, expected) and same_bits(amax, expected_amax)
    check_codes(qdata, codes, fmt, pad)
    if transpose:
        check_codes(laid, codes.t(), fmt, pad)
    else:
        assert laid.shape == (0, 0) and laid.dtype == fmt
    assert all(map(same_bits, others, (mean, rstd, kept)))

    scalings = (None, 0, fmt, tile, *case["scaling"]), second(E5M2, case["second_tile"], True, 2)
    qdata, other, scale_inv, other_inv, *others = cast(norm, *scalings[0], **how, **scalings[1])
    codes, expected, _ = definitions.cast(y, fmt, tile, *case["scaling"])
    check_codes(qdata, codes, fmt, pad)
    assert same_bits(scale_inv, expected) and all(map(same_bits, others, (mean, rstd, kept)))
    codes, expected, _ = definitions.cast(y, E5M2, case["second_tile"], True, 2)
    check_codes(other, codes.t() if transpose else codes, E5M2, pad)
    assert same_bits(other_inv, expected.t() if transpose else expected)
    assert state is None or state.tolist() == [7.0, scale, 7.0]
    assert all(map(same_bits, [t for t in norm[:3] if t is not None], before))


@each_kind
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_fault_stays_in_its_row(fault: float, kind: str) -> None:
    norm = given((9, 20), kind)
    dy = torch.randn(9, 20)
    clean, clean_amax = normalise(*norm)[0], cast(norm)[3]
    norm.x[4, 7] = fault
    y, mean, rstd = normalise(*norm)
    others = torch.arange(9) != 4
    assert same_bits(y[others], clean[others]) and bool(y[4].isnan().any())
    qdata, _, _, amax, *_ = cast(norm)
    assert bool((qdata.view(torch.uint8)[4] == 0x7F).any())
    assert amax.item() == float(y[y.isfinite()].abs().max()) <= clean_amax.item()
    dx, dgamma, dbeta = kernels.norm_backward(dy, *norm[:2], mean, rstd, kind, False, True)
    assert bool(dx[others].isfinite().all()) and bool(dx[4].isnan().any())
    assert bool(dgamma.isnan().any()) and bool(dbeta.isfinite().all())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "batch_norm"}, "kind='batch_norm': use 'layer_norm' or 'rms_norm'"),
        ({"gamma": torch.ones(1, 5)}, r"gamma of shape \[1, 5\]: rows of x have 5 elements"),
        ({"beta": torch.ones(1)}, r"beta of shape \[1\]: rows of x have 5 elements"),
        ({"dy": torch.ones(2, 5)}, r"dy of shape \[2, 5\]"),
        ({"residual": torch.ones(3, 4)}, r"residual of shape \[3, 4\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], said: str) -> None:
    for device in ("cpu", "meta"):
        others = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in wrong.items()}
        dy, residual = others.pop("dy", None), others.pop("residual", None)
        norm = Norm(*(a.to(device) if isinstance(a, Tensor) else a for a in given((3, 5), "layer_norm")))
        norm = norm._replace(**others)
        for named in ({}, second(E4M3, ALL, False, 0)) if others else ():
            with pytest.raises(ValueError, match=said):
                cast(norm, **named)
        if "beta" not in wrong:
            rows = torch.ones(3, device=device)
            with pytest.raises(ValueError, match=said):
                dy = norm.x if dy is None else dy
                kernels.norm_backward(dy, *norm[:2], rows, rows, norm.kind, False, True, residual)
