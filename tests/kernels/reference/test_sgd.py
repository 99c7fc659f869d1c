import pytest
import torch

from octavo.formats import E4M3
from octavo.kernels.layouts import blocks_of
from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_state import MomentTensors
from octavo.kernels.reference.optimizer_step import WeightUpdate, optimizer_step
from octavo.kernels.reference.sgd import SgdGroup


def codes(rows, cols):
    scales = torch.ones(rows, blocks_of(cols))
    return MomentTensors(torch.zeros(rows, cols, dtype=torch.uint8), E4M3, scales, stochastic=True)


def sgd_update(master, grad, buffer, step, first_row=0, weight_decay=0.01):
    update = WeightUpdate(master, (buffer,), grad, torch.tensor(float(step - 1)), 7, 0, first_row)
    optimizer_step([update], [SgdGroup(0.1, 0.9, 0.0, weight_decay, False, False)])


@pytest.mark.parametrize("cols", [1, 127, 300])
def test_rows_of_ranks_are_those_of_the_whole(cols):
    weight = torch.randn(7, cols).bfloat16()
    whole, parts = weight.clone(), [weight[:3].clone(), weight[3:].clone()]
    stored, split = codes(7, cols), [codes(3, cols), codes(4, cols)]
    for step in (1, 2, 3):
        grad = torch.randn(7, cols)
        sgd_update(MasterWeight(whole, "stochastic"), grad, stored, step)
        for part, buffer, rows, first in zip(parts, split, (grad[:3], grad[3:]), (0, 3), strict=True):
            sgd_update(MasterWeight(part, "stochastic"), rows, buffer, step, first)
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(stored.data, torch.cat([buffer.data for buffer in split]))


def test_one_scale_for_all_is_that_of_the_new_momentum():
    weight, grad = torch.randn(4, 300), torch.randn(4, 300)
    stored = MomentTensors(torch.zeros(4, 300, dtype=torch.uint8), E4M3, torch.ones(1, 1))
    sgd_update(MasterWeight(weight, "weight"), grad, stored, 1, weight_decay=0.0)
    assert stored.scale_inv.item() == pytest.approx(grad.abs().max().item() / 448, rel=1e-6)


def test_previous_amax():
    stored = MomentTensors(torch.zeros(1, 8, dtype=torch.uint8), E4M3, torch.ones(1, 1), amax=torch.full((1, 1), 2.0))
    sgd_update(MasterWeight(torch.zeros(1, 8), "weight"), torch.full((1, 8), 3.0), stored, 1)
    assert stored.scale_inv.item() == pytest.approx(2 / 448)
    assert stored.amax.item() == 3.0


def test_nothing_to_update():
    sgd_update(MasterWeight(torch.zeros(0, 8), "weight"), torch.zeros(0, 8), codes(0, 8), 1)
