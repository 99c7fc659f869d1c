"""What programs of a step share: scales of whole tensors, and how the last program ends the step."""

import pytest
import torch
from torch import Tensor

from octavo.formats import E4M3, E4M4, E5M2, Format
from octavo.kernels.step_numbers import adam_max_update, bound_after
from octavo.numerics import scale_from_amax
from tests.support.triton_cases import row_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


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
