"""Many weights' step is each one's own, one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference.adam import AdamGroup
from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_step import WeightUpdate, optimizer_step
from octavo.kernels.reference.sgd import SgdGroup
from octavo.optim.moment import NAMED
from tests.support.optimizer_both import coded

SHAPES = [(1, 1), (3, 300), (0, 5), (2, 128)]
ADAM = [
    AdamGroup(0.01, 0.9, 0.99, 1e-8, 0.1, False, True, True),
    AdamGroup(torch.tensor(0.5), 0.5, 0.9, 1e-6, 0.0, True, False, False),
]
SGD = [SgdGroup(0.1, 0.9, 0.0, 0.01, True, False), SgdGroup(torch.tensor(0.5), 0.5, 0.1, 0.0, False, True)]


def weights(groups: list[Any]) -> list[WeightUpdate]:
    """Equal ones at each call."""
    torch.manual_seed(1)
    found, moments = [], NAMED["fp8"][: 2 if groups is ADAM else 1]
    for number, shape in enumerate(SHAPES):
        device = torch.device("cpu")
        stored = tuple(
            m.for_kernel(str(i), m.new_state(str(i), torch.Size(shape), device)) for i, m in enumerate(moments)
        )
        master = MasterWeight(torch.randn(shape).bfloat16(), "stochastic")
        step = torch.tensor(float(number))
        found.append(WeightUpdate(master, stored, torch.randn(shape), step, 5 + number, number % 2, 7 * number))
    return found


def tensors(updates: list[WeightUpdate]) -> list[Tensor]:
    return [t for u in updates for t in (u.step, u.master.weight, *(m.data for m in u.moments))]


def equal(a: list[WeightUpdate], b: list[WeightUpdate]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@pytest.mark.parametrize("divisor", [None, 4.0])
@pytest.mark.parametrize("groups", [ADAM, SGD], ids=["Adam", "SGD"])
def test_each_is_updated_by_its_group(groups: list[Any], divisor: float | None) -> None:
    ours, theirs = weights(groups), weights(groups)
    scale = None if divisor is None else torch.tensor([divisor])
    for _ in range(3):
        optimizer_step(ours, groups, None, scale)
        for update in theirs:
            divided = update._replace(group=0, gradient=update.gradient / (divisor or 1.0))
            optimizer_step([divided], [groups[update.group]])
    assert equal(ours, theirs) and not equal(ours, weights(groups))
    assert [float(update.step) for update in ours] == [3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("groups", [ADAM, SGD], ids=["Adam", "SGD"])
def test_a_flag_that_is_not_0_skips_all(groups: list[Any]) -> None:
    ours, theirs = weights(groups), weights(groups)
    for flag in (torch.tensor(True), torch.tensor([1.0]), torch.tensor(2)):
        optimizer_step(ours, groups, flag)
        assert equal(ours, theirs)
    optimizer_step(ours, groups, torch.tensor(0.0))
    optimizer_step(theirs, groups)
    assert equal(ours, theirs) and not equal(ours, weights(groups))


def test_without_momentum_nothing_is_kept() -> None:
    update = weights(SGD)[1]._replace(moments=(), master=MasterWeight(torch.ones(3, 300), "weight"))
    optimizer_step([update], [SGD[0], SgdGroup(0.5, 0.0, 0.0, 0.0, False, False)])
    assert torch.equal(update.master.weight, 1 - 0.5 * update.gradient)


@pytest.mark.parametrize("groups", [ADAM, SGD], ids=["Adam", "SGD"])
def test_a_gradient_in_codes_is_what_the_codes_say(groups: list[Any]) -> None:
    ours, theirs = [coded(update) for update in weights(groups)], weights(groups)
    for _ in range(2):
        for number, update in enumerate(ours):
            scales = update.gradient_scale_inv.repeat_interleave(128, 1)[:, : update.gradient.shape[1]]
            wide = update.gradient.view(torch.float8_e4m3fn).float() * scales
            theirs[number] = theirs[number]._replace(gradient=wide)
        optimizer_step(ours, groups, None, torch.tensor(2.0))
        optimizer_step(theirs, groups, None, torch.tensor(2.0))
    assert equal(ours, theirs)
