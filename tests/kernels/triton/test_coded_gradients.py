"""Gradients in E4M3 codes with their scales beside, in the launch and its reference: bit for bit."""

import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch

from octavo.formats import E4M3
from octavo.kernels.reference.optimizer_step import WeightUpdate
from octavo.optim.moment import NAMED
from tests.support.optimizer_both import (
    ADAM,
    MASTERS,
    OTHER,
    SCHEMES,
    SGD,
    SHAPES,
    Both,
    coded,
    mixed,
    moved,
    update_of,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

FULL = [pytest.param(scheme, marks=pytest.mark.full) for scheme in ("fp32", "bf16")]


def half_coded(updates: Sequence[WeightUpdate], each: int = 2) -> list[WeightUpdate]:
    """Of every ``each`` one has its gradient in floats still."""
    return [update if n % each == each - 1 else coded(update) for n, update in enumerate(updates)]


@pytest.mark.parametrize("scheme", [*FULL, "fp8", "previous", "two stages"])
def test_gradients_in_codes(scheme: str, kernels: TritonKernels, small: None) -> None:
    updates = half_coded(mixed(SCHEMES[scheme], MASTERS, 1, len(scheme)), 3)
    both = Both(kernels, updates, [ADAM, OTHER])
    both.steps(2)
    both.new_gradients()
    both.step(None, torch.tensor(3.0, device=kernels.device))
    assert len(both.plans) == 1


@pytest.mark.parametrize("scheme", [*FULL, "fp8"])
def test_gradients_in_codes_of_all_sizes(scheme: str, kernels: TritonKernels) -> None:
    shapes = [*SHAPES, (65, 130), (300, 1)]
    updates = [coded(update_of(shape, SCHEMES[scheme], number=n, first_row=3 * n)) for n, shape in enumerate(shapes)]
    Both(kernels, updates, [ADAM._replace(decoupled=False), OTHER._replace(decoupled=False)]).steps(2)
    sgd = [update_of(shape, SCHEMES[scheme][:1], number=n) for n, shape in enumerate(SHAPES)]
    Both(kernels, half_coded(sgd, 4), [SGD, SGD._replace(nesterov=True, maximize=True)]).steps(2)


def test_codes_of_a_vector_that_is_seen_in_rows_of_one(kernels: TritonKernels, small: None) -> None:
    """As parts of sharded vectors are."""
    lengths = [1, 5, 128, 300, 2064, 0]
    masters = itertools.cycle(MASTERS[:4])
    updates = [update_of((n, 1), NAMED["fp32"], next(masters), number=i) for i, n in enumerate(lengths)]
    updates = [coded(update._replace(first_row=1000), vector=True) for update in updates]
    Both(kernels, updates, [ADAM, OTHER]).steps(2)


def test_all_codes_of_a_gradient(kernels: TritonKernels) -> None:
    """NaN too, which stays where it is."""
    update = coded(update_of((2, 256), NAMED["fp32"]))
    update.gradient.copy_(torch.arange(256).to(torch.uint8).expand(2, 256))
    both = Both(kernels, [update], [ADAM])
    both.step()
    for name in ("ours", "theirs"):
        (found,) = getattr(both, name)
        assert found.master.weight.isnan().nonzero().tolist() == [[r, c] for r in range(2) for c in (127, 255)]


def test_a_plan_keeps_no_gradient(kernels: TritonKernels) -> None:
    both = Both(kernels, [coded(update_of((3, 300), NAMED["fp8"])), update_of((3, 300), NAMED["fp8"])], [ADAM, OTHER])
    both.step()
    ends = [weakref.ref(update.gradient) for update in both.ours]
    both.ours = [update._replace(gradient=update.master.weight, gradient_scale_inv=None) for update in both.ours]
    assert len(both.plans) == 1 and all(end() is None for end in ends)


def doubled(update: WeightUpdate) -> WeightUpdate:
    """With scales at another address, and nothing else."""
    assert update.gradient_scale_inv is not None
    return update._replace(gradient_scale_inv=update.gradient_scale_inv * 2)


def test_a_plan_for_codes_and_one_for_floats(kernels: TritonKernels) -> None:
    both = Both(kernels, [update_of((3, 300), NAMED["fp8"], number=n) for n in range(2)], [ADAM, OTHER])
    both.steps(1)
    floats = both.ours, both.theirs
    codes = [coded(update) for update in both.ours]
    both.ours = [moved(u, kernels.device)._replace(master=u.master, moments=u.moments, step=u.step) for u in codes]
    both.theirs = [
        b._replace(gradient=a.gradient.clone(), gradient_scale_inv=a.gradient_scale_inv)
        for a, b in zip(both.ours, both.theirs, strict=True)
    ]
    both.step()
    (plain, other) = both.plans.values()
    assert [plan.steps[0].tensors[0].gradient_fmt for plan in (plain, other)] == [None, E4M3]
    sent = other.sent["gradients"]
    both.ours, both.theirs = ([doubled(update) for update in updates] for updates in (both.ours, both.theirs))
    both.step()
    assert other.sent["gradients"] is not sent and len(both.plans) == 2
    both.ours, both.theirs = floats
    both.step()
    assert len(both.plans) == 2
