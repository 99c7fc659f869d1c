import math

import pytest
import torch
from torch import Tensor

from octavo import PerBlock, PerTensor
from octavo.formats import E4M3
from octavo.kernels.reference.adam import AdamGroup
from octavo.kernels.reference.master_weights import Fp8Weight, MasterWeight
from octavo.kernels.reference.optimizer_state import pieces
from octavo.kernels.reference.optimizer_step import WeightUpdate, optimizer_step
from octavo.kernels.reference.resolution import add_resolution
from octavo.kernels.reference.sgd import SgdGroup
from octavo.optim.moment import NAMED
from octavo.tensor.stored_weight import StoredWeight

ADAM = AdamGroup(0.01, 0.9, 0.99, 1e-8, 0.1, False, True, True)


def sums_of(before: Tensor, after: Tensor, master) -> list[float]:
    sums = torch.zeros(2, dtype=torch.float64)
    for piece in pieces(*before.shape):
        add_resolution(sums, piece, piece.of(before), piece.of(after), master)
    return sums.tolist()


def step_at(w: float) -> float:
    """The distance of E4M3's neighbours, with exponents without end."""
    return 2.0 ** (math.floor(math.log2(abs(w))) - 3) if w else 0.0


def test_the_grid_is_that_of_e4m3_at_any_magnitude():
    values = [0.0, 1.0, -1.0, 1.9375, 0.06, -3e5, 2.0**-20]
    w = torch.tensor([values])
    assert sums_of(w, w, MasterWeight(w, "weight"))[1] == sum(step_at(value) ** 2 for value in values)
    codes = torch.arange(0x08, 0x7E, dtype=torch.uint8)  # normal ones and their neighbours above
    found, above = (part.view(torch.float8_e4m3fn).float() for part in (codes, codes + 1))
    assert [step_at(value) for value in found.tolist()] == (above - found).tolist()


@pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(128, 128)], ids=str)
def test_weights_in_fp8_have_a_smallest_step_by_their_scale(granularity):
    stored = StoredWeight.cast(torch.randn(130, 300) * torch.logspace(-8, 0, 300), granularity)
    master = Fp8Weight(stored.qdata.view(torch.uint8), "fp8_stochastic", stored.scale_inv)
    w = stored.dequantize().detach()
    smallest = stored.scale_inv.repeat_interleave(130 if len(stored.scale_inv) == 1 else 128, 0)[:130]
    smallest = smallest.repeat_interleave(300 if smallest.shape[1] == 1 else 128, 1)[:, :300] * 2.0**-9
    steps = torch.tensor([[step_at(value) for value in row] for row in w.tolist()])
    assert (steps < smallest).any() and (steps > smallest).any()
    expected = torch.maximum(steps, smallest).double().square().sum()
    assert sums_of(w, w, master)[1] == pytest.approx(float(expected), rel=1e-6)
    assert float(stored.scale_inv.max()) * 2.0**-9 == pytest.approx(E4M3.max and float(smallest.max()))


def test_what_is_not_finite_counts_for_nothing():
    w = torch.tensor([[1.0, math.nan, math.inf, 2.0, 3.0]])
    after = torch.tensor([[1.5, 1.0, 1.0, math.nan, -math.inf]])
    assert sums_of(w, after, MasterWeight(w, "weight")) == [0.25, 0.125**2]


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_a_step_adds_the_measured_weights_sums(rule):
    group = ADAM if rule == "adam" else SgdGroup(0.1, 0.9, 0.0, 0.01, False, False)
    names = ("a", "b")[: 2 if rule == "adam" else 1]
    moments = [
        moment.for_kernel(name, moment.new_state(name, torch.Size((5, 300)), torch.device("cpu")))
        for name, moment in zip(names, NAMED["fp32"], strict=False)
    ]
    sums = torch.zeros(2, dtype=torch.float64)
    for measured in (True, False, True):
        w = torch.randn(5, 300)
        before = w.clone()
        update = WeightUpdate(
            MasterWeight(w, "weight"),
            tuple(moments),
            torch.randn(5, 300),
            torch.tensor(0.0),
            0,
            0,
            0,
            None,
            measured,
        )
        was = sums.clone()
        optimizer_step([update], [group], None, None, sums)
        if measured:
            moved = (w - before).double().square().sum()
            assert float(sums[0] - was[0]) == pytest.approx(float(moved), rel=1e-5)
        else:
            assert torch.equal(sums, was)
    optimizer_step([update], [group], torch.tensor(1.0), None, sums.fill_(7.0))
    assert sums.tolist() == [7.0, 7.0]
