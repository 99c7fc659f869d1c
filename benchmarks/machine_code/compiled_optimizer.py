"""The cases of compiled.py that are steps of optimizers: masters, moments, layouts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.machine_code.compiled_case import BF16, FP32, LARGE, Case, tensor
from octavo.formats import E4M3, E5M2
from octavo.granularity import PerBlock, PerTensor
from octavo.kernels.reference.optimizer_step import AdamGroup, SgdGroup, WeightUpdate
from octavo.kernels.triton import optimizer_step
from octavo.optim.masters import OF_FP8_WEIGHTS
from octavo.optim.moment import NAMED, Moment
from octavo.tune.cases import ADAM, stored_update, update

SGD = SgdGroup(1e-3, 0.9, 0.0, 0.01, False, False)
ODD = (1000, 1000)  # rows end within a block

_PREVIOUS = (
    Moment(E4M3, granularity=PerTensor(), scale="previous"),
    Moment(E5M2, root=True, granularity=PerTensor(), scale="previous"),
)
_TWO_STAGES = (Moment(E4M3, granularity=PerTensor()), Moment(E5M2, root=True, granularity=PerTensor()))


def coded(update: WeightUpdate) -> WeightUpdate:
    """With its gradient in E4M3 codes."""
    rows, cols = update.gradient.shape
    codes = tensor((rows, cols), torch.uint8)
    return update._replace(gradient=codes, gradient_scale_inv=torch.empty(rows, -(-cols // 128)))


def optimizer() -> Iterator[Case]:
    fp8 = NAMED["fp8"]
    for master, dtype in (("fp32", FP32), ("split32", BF16), ("split24", BF16), (None, BF16)):
        yield _case(f"Adam fp8, {master}", [update(LARGE, fp8, master, dtype, BF16)])
    for name in ("fp32", "bf16"):
        yield _case(f"Adam {name}, split32", [update(LARGE, NAMED[name], "split32", BF16, FP32)])
    for name, moments in (("previous amax", _PREVIOUS), ("two stages", _TWO_STAGES)):
        yield _case(f"Adam {name}, split24", [update(LARGE, moments, "split24", BF16, BF16)])
    yield _case("Adam fp8, odd rows", [update(ODD, fp8, "split32", BF16, BF16)])._replace(bits=8)
    mixed = [update(LARGE, fp8, "split32", BF16, BF16), update((1, 4096), fp8, "fp32", FP32, FP32)]
    yield _case("Adam fp8, two kinds of weights", mixed)
    yield _case("Adam coupled fp8, split32", mixed[:1], ADAM._replace(decoupled=False, clip=False))
    for master, granularity in itertools.product(OF_FP8_WEIGHTS, (PerTensor(), PerBlock(128, 128))):
        yield _case(f"Adam fp8, E4M3 weight {granularity}, {master}", [stored_update(LARGE, master, granularity)])
    yield _case("SGD fp8, split24", [update(LARGE, fp8[:1], "split24", BF16, BF16)], SGD)
    for number, master in enumerate(("fp32", "split24")):
        one = coded(update(LARGE, fp8, master, (FP32, BF16)[number], BF16))
        yield _case(f"Adam fp8, {master}, gradients in E4M3", [one])
    yield _case("Adam fp32, gradients in E4M3", [coded(update(LARGE, NAMED["fp32"], "fp32", FP32, FP32))])
    stored = coded(stored_update(LARGE, "split16", PerBlock(128, 128)))
    yield _case("Adam fp8, E4M3 weight in blocks, split16, gradients in E4M3", [stored])
    odd = coded(update(ODD, fp8, "split32", BF16, BF16))
    yield _case("Adam fp8, odd rows, gradients in E4M3", [odd])._replace(bits=8)
    yield _case("SGD fp8, split24, gradients in E4M3", [coded(update(LARGE, fp8[:1], "split24", BF16, BF16))], SGD)
    measured = {"resolution": torch.empty(2, dtype=torch.float64)}
    for master, granularity in itertools.product(("split16", None), (PerTensor(), PerBlock(128, 128))):
        one = stored_update(LARGE, master, granularity)._replace(measured=True)
        yield _case(f"Adam fp8, E4M3 weight {granularity}, {master}, measured", [one], **measured)
    one = update(LARGE, fp8, "split32", BF16, BF16)._replace(measured=True)
    yield _case("Adam fp8, split32, measured", [one], **measured)


def _case(what: str, updates: list[WeightUpdate], group: AdamGroup | SgdGroup = ADAM, **options: Tensor) -> Case:
    step = functools.partial(optimizer_step, updates, [group], **options)
    return Case("optimizer_step", what, step, bits=64)  # 8 codes a thread
