"""Adam's and SGD's arithmetic beside torch's, the resolution's sums, and what programs of a step share."""

import math

import pytest
import torch
from torch import Tensor

from octavo import PerBlock, PerTensor
from octavo.formats import E4M3, E4M4, E5M2, Format
from octavo.kernels.reference.master_weights import Fp8Weight
from octavo.kernels.reference.optimizer_step import WeightUpdate
from octavo.kernels.reference.optimizer_step import optimizer_step as reference
from octavo.kernels.step_numbers import adam_max_update, bound_after, power
from octavo.numerics import scale_from_amax
from octavo.tensor.stored_weight import StoredWeight
from tests.support.correct_roots import correct_roots
from tests.support.optimizer_both import ADAM, MASTERS, OTHER, SCHEMES, SGD, Both, mixed, update_of
from tests.support.triton_cases import row_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

BLOCK = 1024


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M4], ids=str)
def test_scales_of_whole_tensors(fmt: Format, decoupled: bool, kernels: TritonKernels) -> None:
    state = kernels.module("optimizer_state")
    held = state.MasterClass("fp8_fp16", state.tl.uint8, None, True)
    for amax, decay in ((0.0, 0.1), (1e-30, 0.1), (0.37, 300.0), (5.1e4, 0.1)):  # one that turns weights' signs
        moment, master, inv = (torch.tensor(x, device=kernels.device) for x in (amax, amax / 3, 0.25))
        row = row_of(kernels, FIRST_plus_2=moment, REST_plus_1=inv, REST_plus_2=master)
        group = [0.01, 0.9, 0.99, 1e-8, decay, 0, 0.9 * 0.9 / 0.99, 0]
        options = torch.tensor(group, dtype=torch.float64, device=kernels.device)
        gathered = (moment * 2).view(torch.int32)
        for scale, of in (("block", None), ("previous", moment), ("found", moment * 2)):
            out = torch.zeros(3, device=kernels.device)
            tensor = state.TensorClass(None, held, state.MomentClass(None, fmt, scale=scale))
            kernels.launch("scales_kernel", 1, row, options, gathered, out, tensor, decoupled)
            first = 1.0 if of is None else float(scale_from_amax(of.cpu(), fmt.max, False, 0))
            most = adam_max_update(3, 0.9, 0.99)
            bound = bound_after(master.cpu(), 0.01, most, decay if decoupled else 0.0)
            assert out.tolist() == [first, float(scale_from_amax(bound, E4M3.max, True, 0)), 0.25]


def test_a_scale_is_left_for_each_that_has_one(kernels: TritonKernels) -> None:
    scales = torch.rand(2, 3, device=kernels.device) + 1
    state = kernels.module("optimizer_state")
    for has in ((True, False, True), (False, True, False), (True, True, True)):
        first, second = (state.MomentClass(None, scale="previous" if one else "block") for one in has[:2])
        master = state.MasterClass("fp8_fp16" if has[2] else "weight", state.tl.uint8 if has[2] else None, None, False)
        of = state.TensorClass(None, master, first, second)
        work = torch.zeros(13, dtype=torch.int32, device=kernels.device)
        kernels.launch("leave_kernel", 2, work, scales, of, 2)
        left = work[1:].view(3, 2, 2)  # of each that may have one: the amax found, the scale; of each tensor
        assert not left[:, 0].any()
        for k in range(3):
            expected = scales[:, k] if has[k] else torch.zeros_like(scales[:, k])
            assert torch.equal(left[k, 1].view(torch.float32), expected)


def of_all(kernels: TritonKernels, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(steps, scales_inv, amaxes, table) of ``count`` tensors; the second moments keep no amax."""
    steps = torch.arange(float(count), device=kernels.device)
    inv, amax = torch.full((2, count, 3), -1.0, device=kernels.device).unbind()
    rows = []
    for i in range(count):
        columns: dict[str, int | Tensor] = {"STEP_COUNT": steps[i]}
        for k, name in enumerate(("FIRST", "SECOND", "REST")):
            columns |= {f"{name}_plus_1": inv[i, k]} | ({f"{name}_plus_2": amax[i, k]} if k != 1 else {})
        rows.append(row_of(kernels, **columns))
    return steps, inv, amax, torch.stack(rows)


@pytest.mark.parametrize("any_one", [False, True])
@pytest.mark.parametrize("count", [1, 3, 127, 128, 129, 300])
def test_the_last_program_ends_the_step(count: int, any_one: bool, kernels: TritonKernels) -> None:
    flags = torch.arange(count) % 8 if any_one else torch.zeros(count, dtype=torch.int64)
    steps, inv, amax, table = of_all(kernels, count)
    left = torch.rand(3, 2, count) + 0.5  # (found, scale) of the first moments, the second ones, the masters
    has = (flags >> torch.arange(3)[:, None] & 1).bool()
    work = torch.zeros(1 + 6 * count, dtype=torch.int32)
    work[1:] = torch.where(has[:, None], left, 0.0).flatten().view(torch.int32)
    work = work.to(kernels.device)
    kernels.launch("finish_kernel", 1, table, work, count, any_one)
    assert torch.equal(steps.cpu(), torch.arange(float(count)) + 1)
    assert not work.any()
    assert torch.equal(inv.cpu().T, torch.where(has, left[:, 1].reciprocal(), -1.0))
    has[1] = False
    assert torch.equal(amax.cpu().T, torch.where(has, left[:, 0], -1.0))


@pytest.mark.parametrize("weight", [0.0, 0.001, 0.1, 0.4999, 0.5, 0.9, 1.0])
def test_lerp_is_torchs(weight: float, kernels: TritonKernels) -> None:
    a, b = torch.randn(BLOCK), torch.randn(BLOCK) * torch.randn(BLOCK).exp()
    out = torch.empty(BLOCK, device=kernels.device)
    given = [x.to(kernels.device) for x in (a, b, torch.tensor(weight))]
    for is_small in {False, weight < 0.5}:
        kernels.launch("lerp_kernel", 1, *given, out, is_small, BLOCK)
        assert torch.equal(out.cpu(), a.lerp(b, weight))


def updated(w: Tensor, m: Tensor, v: Tensor, step: int, decoupled: bool, clip: bool) -> Tensor:
    """Of lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1."""
    lr, correction1, correction2 = 0.01, 1 - power(0.9, step), math.sqrt(1 - power(0.99, step))
    w = w * (1 - lr * 0.1) if decoupled else w.clone()
    if not clip:
        return w.addcdiv_(m, v.sqrt().div(correction2).add(1e-6), value=-lr / correction1)
    limit = adam_max_update(step, 0.9, 0.99) * correction1
    u = torch.div(m, v.sqrt().mul(1 / correction2).add(1e-6)).clamp(-limit, limit)
    assert step == 1 or 0.05 < (u.abs() == torch.tensor(limit)).float().mean() < 0.95  # both are seen
    return w.add_(u, alpha=-lr / correction1)


@pytest.mark.parametrize("step", [1, 2, 50])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_s_update(decoupled: bool, clip: bool, step: int, kernels: TritonKernels) -> None:
    w, m, v = torch.randn(BLOCK), torch.randn(BLOCK), torch.randn(BLOCK).square()
    if clip and step > 1:
        m *= 1 - power(0.9, step)
    v[3], m[7] = 0.0, math.nan
    with correct_roots():
        expected = updated(w, m, v, step, decoupled, clip)
    group = torch.tensor([0.01, 0.9, 0.99, 1e-6, 0.1, 0, 0.9 * 0.9 / 0.99, 0], dtype=torch.float64)
    found, *given = (x.to(kernels.device, copy=True) for x in (w, m, v, group, torch.tensor(step)))
    kernels.launch("adam_weight_kernel", 1, found, *given, decoupled, clip, BLOCK)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("step", [1, 5])
def test_sgd_s_update(step: int, nesterov: bool, momentum: float, kernels: TritonKernels) -> None:
    w, average, g = torch.randn(3, BLOCK).unbind()
    options = [0.1, momentum, 0.25, 0.01, nesterov, 0, 0, 0]
    group = torch.tensor(options, dtype=torch.float64, device=kernels.device)
    ours = [x.to(kernels.device, copy=True) for x in (w, average, g)]
    number = torch.tensor(step, device=kernels.device)
    kernels.launch("sgd_kernel", 1, *ours, group, number, momentum > 0, BLOCK)
    new = g if step == 1 else average.mul(momentum).add(g, alpha=0.75)
    update = g.add(new, alpha=momentum) if nesterov else new
    assert torch.equal(ours[1].cpu(), new)
    assert torch.equal(ours[0].cpu(), w.add(update if momentum else g, alpha=-0.1))


def compare(both: Both, steps: int = 2) -> None:
    """The resolution's sums in the launch against the reference's: the order of additions is another."""
    device = both.kernels.device
    ours, theirs = (torch.zeros(2, dtype=torch.float64, device=device) for _ in range(2))
    for _ in range(steps):
        both.new_gradients()
        with correct_roots():
            reference(both.theirs, both.groups, None, None, theirs)
        both.module.optimizer_step(both.ours, both.groups, None, None, both.plans, ours)
    assert (theirs > 0).all()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    both.module.optimizer_step(
        both.ours, both.groups, torch.ones((), device=device), None, both.plans, ours
    )  # a skipped step adds nothing
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)


def half_measured(updates: list[WeightUpdate]) -> list[WeightUpdate]:
    return [update._replace(measured=index % 2 == 0) for index, update in enumerate(updates)]


@pytest.mark.parametrize("scheme", ["fp8", "fp32", "two stages", "previous"])
def test_the_resolution_of_adam(scheme: str, kernels: TritonKernels, small: None) -> None:
    compare(Both(kernels, half_measured(mixed(SCHEMES[scheme], MASTERS, 1, 1)), [ADAM, OTHER]))


def test_the_resolution_of_sgd(kernels: TritonKernels, small: None) -> None:
    updates = mixed(SCHEMES["fp8"][:1], MASTERS[:4], 1, 1)
    compare(Both(kernels, half_measured(updates), [SGD, SGD._replace(nesterov=True)]))


@pytest.mark.parametrize("small", [128], indirect=True)
@pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(128, 128)], ids=str)
def test_the_resolution_of_weights_in_fp8(
    granularity: PerTensor | PerBlock, kernels: TritonKernels, small: None
) -> None:
    updates = []
    for number, shape in enumerate([(130, 300), (7, 16)]):
        values = torch.randn(shape) * torch.logspace(-6, 0, shape[1])
        stored = StoredWeight.cast(values, granularity)
        amax = values.abs().amax().reshape(1, 1).expand_as(stored.scale_inv).clone()
        master = Fp8Weight(stored.qdata.view(torch.uint8), "fp8_stochastic", stored.scale_inv, None, amax)
        plain = update_of(shape, SCHEMES["fp8"], number=number)
        updates.append(plain._replace(master=master, measured=True))
    compare(Both(kernels, updates, [ADAM, OTHER]))
