"""Cross entropy and its gradient against float64, by the reference, a CPU and Triton."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.granularity import PADDING
from octavo.kernels import cpu
from octavo.kernels.cpu import codes
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.kernels.conftest import Ops
from tests.support.casts import DTYPES, LAYOUTS, laid, poisoned_memory
from tests.support.combinations import dealt
from tests.support.helpers import Written

CASES: dict[str, Any] = {
    "shape": [(0, 7), (1, 1), (5, 2), (7, 300), (3, 1000), (2, 9000)],  # the last: two passes of a program
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "smoothing": [0.0, 0.1, 1.0],
    "softcap": [0.0, 30.0],
    "scale": [0.1, 5.0, 80.0],
    "ignored": [False, True],
    "expanded": [False, True],
    "chunk": [1, 500, 1 << 18],
}


def truth_of(x: Tensor, target: Tensor, smoothing: float, softcap: float) -> Tensor:
    z = softcap * (x / softcap).tanh() if softcap else x
    return F.cross_entropy(z, target, ignore_index=-100, reduction="none", label_smoothing=smoothing)


def check(ops: Ops, case: dict[str, Any]) -> None:
    (rows, cols), dtype = case["shape"], case["dtype"]
    logits = torch.randn(rows, cols) * case["scale"]
    logits[::2, -1:] += 5 * case["scale"]  # a program reads the largest last
    logits = logits.to(dtype)
    target = torch.randint(0, cols, (rows,))
    if case["ignored"]:
        target[::2] = -100
    grad = torch.randn(1).expand(rows) if case["expanded"] else torch.randn(rows)
    how = -100, case["smoothing"], case["softcap"]
    laid_logits = laid(logits, case["layout"])
    with poisoned_memory():
        losses, lse = ops.of("cross_entropy")(laid_logits, target, *how)
        gradient = ops.of("cross_entropy_backward")(laid_logits, target, *how, lse, grad)
    x = logits.double().requires_grad_()
    truth = truth_of(x, target, *how[1:])
    (exact,) = torch.autograd.grad((truth * grad.double()).sum(), x)
    sizes = logits.double().abs().amax(1).clamp(min=1.0)
    assert losses.dtype == lse.dtype == torch.float32 and gradient.dtype == dtype and gradient.is_contiguous()
    assert ((losses.double() - truth.detach()).abs() <= 2.0**-20 * sizes * 4).all()
    assert losses[target == -100].eq(0).all() and gradient[target == -100].eq(0).all()
    error = (gradient.double() - exact).abs()
    natural = 2.0**-19 * sizes[:, None] * (exact.abs() + 2.0**-5 * grad.double().abs()[:, None] / max(cols, 1))
    natural += 2.0**-21 * grad.double().abs()[:, None]
    assert (error <= torch.finfo(dtype).eps * exact.abs() + natural + torch.finfo(dtype).smallest_normal).all()


@pytest.mark.parametrize("batch", range(2))
def test_against_float64(ops: Ops, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in dealt(batch, 8 if ops.kernels else 30, **CASES):
        with monkeypatch.context() as patch:
            patch.setattr(codes, "CHUNK", case["chunk"])
            check(ops, case)


OF_CODES: dict[str, Any] = CASES | {
    "shape": [(0, 7), (1, 1), (5, 2), (7, 300), (130, 70), (128, 64)],  # the last: a whole tile
    "dtype_of_codes": [torch.float8_e5m2, torch.float8_e4m3fn],
    "pad": [1, PADDING],
    "first": [0, PADDING],
    "written": [(True, True), (True, False), (False, True)],
}


def check_codes(ops: Ops, case: dict[str, Any]) -> None:
    (rows, cols), pad, first, out = case["shape"], case["pad"], case["first"], case["dtype_of_codes"]
    logits = (torch.randn(rows, cols) * case["scale"]).to(case["dtype"])
    target = torch.randint(0, cols, (rows,))
    if case["ignored"]:
        target[::2] = -100
    how = -100, case["smoothing"], case["softcap"]
    _, lse = REFERENCE["cross_entropy"](logits, target, *how)  # by Triton a program a row
    as_is, laid_ = case["written"]
    high = -(-rows // pad) * pad
    codes = torch.full((rows, -(-cols // pad) * pad) if as_is else (0, 0), 7.0).to(out)
    of_all_rows = torch.full((cols, first + high + PADDING) if laid_ else (0, 0), 7.0).to(out)
    transposed = of_all_rows[:, : first + high]
    ops.of("cross_entropy_codes")(laid(logits, case["layout"]), target, *how, lse, codes, transposed, first)
    x = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(truth_of(x, target, *how[1:]).sum(), x)
    unit, step, smallest = (32768.0, 2.0**-3, 2.0**-17) if out is torch.float8_e5m2 else (256.0, 2.0**-4, 2.0**-10)
    bound = exact.abs() * step + smallest / unit + 2.0**-19 * case["scale"] * 5 / max(cols, 1) + 2.0**-21
    if as_is:
        values = codes.double() / unit
        assert ((values[:, :cols] - exact).abs() <= bound).all() and not values[:, cols:].any()
        assert not values[target == -100].any()
    if laid_:
        values = transposed.double().t() / unit
        assert ((values[first : first + rows] - exact).abs() <= bound).all() and not values[first + rows :].any()
        other_rows = *of_all_rows.t()[:first], *of_all_rows.t()[first + high :]
        assert all((codes_of_row.float() == 7.0).all() for codes_of_row in other_rows)
        assert not as_is or torch.equal(transposed.t()[first : first + rows].float(), codes[:, :cols].float())


@pytest.mark.parametrize("batch", range(2))
def test_codes_of_the_gradient(ops: Ops, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in dealt(batch, 3 if ops.kernels else 30, **OF_CODES):
        with monkeypatch.context() as patch:
            patch.setattr(codes, "CHUNK", case["chunk"])
            check_codes(ops, case)


def test_faults_stay_in_their_rows(ops: Ops) -> None:
    logits, target = torch.randn(5, 40), torch.randint(1, 40, (5,))
    logits[1, 7], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    logits[4, 0] = -math.inf  # a column that is masked out
    losses, lse = ops.of("cross_entropy")(logits, target, -100, 0.0, 0.0)
    gradient = ops.of("cross_entropy_backward")(logits, target, -100, 0.0, 0.0, lse, torch.ones(5))
    expected = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(losses[[0, 4]], expected[[0, 4]])
    assert losses[[1, 2, 3]].isnan().all() and expected[[1, 2, 3]].isnan().all()
    assert gradient[[1, 2, 3]].isnan().all() and gradient[[0, 4]].isfinite().all() and gradient[4, 0] == 0


def test_a_target_that_is_no_column(ops: Ops) -> None:
    logits = torch.randn(2, 5)
    for wrong in (5, -1):
        target = torch.tensor([1, wrong])
        if ops.kernels:
            losses, lse = ops.of("cross_entropy")(logits, target, -100, 0.0, 0.0)
            gradient = ops.of("cross_entropy_backward")(logits, target, -100, 0.0, 0.0, lse, torch.ones(2))
            assert losses.isnan().tolist() == [False, True] and gradient.isnan().any(1).tolist() == [False, True]
            continue
        with pytest.raises(IndexError, match=f"target {wrong} is none of the 5 columns"):
            ops.of("cross_entropy")(logits, target, -100, 0.0, 0.0)


@pytest.mark.parametrize(("target", "said"), [(torch.zeros(3).long(), "needs .T."), (torch.zeros(2).int(), "int64")])
def test_what_does_not_fit_is_refused(ops: Ops, target: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=f"target of .*{said}"):
        ops.of("cross_entropy")(torch.ones(2, 5), target, -100, 0.0, 0.0)


def test_no_columns(ops: Ops) -> None:
    with poisoned_memory():
        losses, lse = ops.of("cross_entropy")(torch.empty(3, 0), torch.full((3,), -100), -100, 0.0, 0.0)
    assert losses.tolist() == [0.0] * 3 and lse.tolist() == [-math.inf] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_writes_few_numbers_as_large_as_logits(dtype: torch.dtype) -> None:
    """The difference to lse, its exponential and the product with grad; a copy from and to another dtype."""
    logits, target, how = torch.randn(64, 1000).to(dtype), torch.arange(64), (-100, 0.0, 0.0)
    target[::8] = -100
    _, lse = cpu.KERNELS["cross_entropy"](logits, target, *how)
    with Written() as written:
        cpu.KERNELS["cross_entropy_backward"](logits, target, *how, lse, torch.rand(64))
    large = {name: count for name, count in written.elements.items() if count >= logits.numel()}
    # in place, where they write one number or row
    assert large.items() >= {"scatter_add_": logits.numel(), "index_fill_": logits.numel()}.items()
    assert sum(large.values()) <= 7 * logits.numel()
