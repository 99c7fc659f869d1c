import math

import pytest
import torch
from torch import Tensor

import octavo
from octavo import E4M3
from octavo.scaling.bounded import (
    Bounded,
    PreviousAmax,
    TwoStage,
    WeightRule,
    adam_max_update,
    bound_after,
    sgd_max_update,
)

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.9, 0.9), (0.95, 0.9), (0.0, 0.999), (0.0, 0.0), (0.5, 0.25), (0.99, 0.9)]


def largest_update(gradients: Tensor, beta1: float, beta2: float) -> Tensor:
    """|m_hat| / sqrt(v_hat) of Adam in float64 after the last of the gradients [steps, ...]."""
    m = v = torch.zeros_like(gradients[0])
    for g in gradients:
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    steps = len(gradients)
    return (m / (1 - beta1**steps)).abs() / (v / (1 - beta2**steps)).sqrt()


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 50])
def test_the_adversarial_gradients_attain_the_bound(steps, betas):
    beta1, beta2 = betas
    growth = 0.0 if beta1 == 0 else beta1 / beta2  # of older gradients
    gradients = torch.tensor([growth ** (steps - i) for i in range(1, steps + 1)], dtype=torch.float64)
    assert float(largest_update(gradients, beta1, beta2)) == pytest.approx(adam_max_update(steps, *betas), rel=1e-12)


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 50])
def test_no_other_gradients_exceed_it(steps, betas):
    gradients = torch.randn(steps, 2000, dtype=torch.float64) * torch.randn(steps, 2000).double().mul(3).exp()
    sparse = torch.where(torch.rand(steps, 2000) < 0.3, gradients, 1e-12)
    for tried in (gradients, gradients.abs(), sparse):
        assert largest_update(tried, *betas).max() <= adam_max_update(steps, *betas) * (1 + 1e-12)


def test_known_values():
    assert adam_max_update(10**6, 0.9, 0.999) == pytest.approx(7.27, abs=0.005)
    assert adam_max_update(10**6, 0.9, 0.95) == pytest.approx(1.165, abs=0.0005)
    for steps in (1, 2, 10, 1000):
        assert adam_max_update(steps, 0.9, 0.9) == pytest.approx(1.0, rel=1e-12)
        assert adam_max_update(steps, 0.0, 0.0) == 1.0
    for betas in BETAS:
        assert adam_max_update(1, *betas) == pytest.approx(1.0, rel=1e-12)
    assert adam_max_update(10**6, 0.0, 0.99) == pytest.approx(10.0)
    assert adam_max_update(4, 0.5, 0.25) == pytest.approx(0.5 / (1 - 0.5**4) * math.sqrt((1 - 0.25**4) / 0.75 * 4))


def test_where_there_is_no_bound():
    assert adam_max_update(1, 0.9, 0.0) == 1.0
    assert adam_max_update(2, 0.9, 0.0) == math.inf
    assert adam_max_update(10**7, 0.99, 0.5) == math.inf
    assert adam_max_update(10, 0.99, 0.5) < adam_max_update(20, 0.99, 0.5) < math.inf


def test_a_weight_stays_within_its_bound():
    assert bound_after(2.0, 0.1, 7.0) == pytest.approx(2.7)
    assert bound_after(2.0, 0.1, 7.0, weight_decay=0.5) == pytest.approx(2.6)
    assert bound_after(2.0, 1.0, 0.0, weight_decay=3.0) == pytest.approx(4.0)  # decay that overshoots


def saturated(rule: WeightRule, weights: list[Tensor], bounds: list[Tensor]) -> int:
    """In how many steps a rule's scale brings an element past the format's max."""
    count = 0
    for before, after, bound in zip(weights[:-1], weights[1:], bounds, strict=True):
        scale = rule.scale(E4M3, before.abs().amax(), bound, lambda after=after: after)
        count += bool((after * scale).abs().max() > E4M3.max * (1 + 2.0**-22))  # but for the product's rounding
    return count


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("kind", ["adam", "sgd", "nesterov", "sign"])
def test_only_the_previous_amax_overflows(kind, power_of_two):
    """Weights that grow with every step, as far as the optimizer can move them."""
    lr, weight = 0.05, torch.nn.Parameter(torch.full((64,), 0.01))
    optimizer = {
        "adam": lambda: octavo.optim.AdamW([weight], lr=lr, betas=(0.9, 0.95), weight_decay=0.1, moments="fp32"),
        "sgd": lambda: octavo.optim.SGD([weight], lr=lr, momentum=0.9, moments="fp32"),
        "nesterov": lambda: octavo.optim.SGD([weight], lr=lr, momentum=0.9, nesterov=True, moments="fp32"),
        "sign": lambda: None,
    }[kind]()
    weights, bounds = [weight.detach().clone()], []
    for number in range(1, 40):
        weight.grad = -torch.rand(64) - 0.5
        most = 1.0 if optimizer is None else optimizer.max_update(number)
        bounds.append(bound_after(weight.detach().abs().amax(), lr, most, 0.1 if kind == "adam" else 0.0))
        if optimizer is None:
            weight.data.sub_(lr * weight.grad.sign())
        else:
            optimizer.step()
        weights.append(weight.detach().clone())
        assert weights[-1].abs().max() <= bounds[-1]
    assert saturated(Bounded(power_of_two), weights, bounds) == 0
    assert saturated(TwoStage(power_of_two), weights, bounds) == 0
    assert saturated(PreviousAmax(power_of_two), weights, bounds) > (0 if power_of_two else 30)
    assert (Bounded.passes, TwoStage.passes, PreviousAmax.passes) == (1, 2, 1)


def test_sgds_bound():
    assert sgd_max_update(2.0, 1.0, 0.0) == 1.0
    assert sgd_max_update(2.0, 1.0, 0.9) == pytest.approx(2.8)
    assert sgd_max_update(2.0, 1.0, 0.9, nesterov=True) == pytest.approx(3.52)
    assert sgd_max_update(2.0, 1.0, 0.9, dampening=0.5) == pytest.approx(2.8)  # the first step's momentum is all of it
    weight = torch.nn.Parameter(torch.tensor([-8.0, 1.0]))
    optimizer = octavo.optim.SGD([weight, torch.nn.Parameter(torch.ones(3))], weight_decay=0.5)
    assert optimizer.max_update(1) == 0.0
    weight.grad = torch.tensor([1.0, -2.0])
    assert optimizer.max_update(1) == 6.0
