import copy
import math

import pytest
import torch
from torch import nn

from octavo.optim import AdamW, EstimatedNorm, LastStepNorm, update_in_backward
from octavo.optim.gradient_norms import GradientNorms, squared_norms


def params_with(*norms: float) -> list[nn.Parameter]:
    """Parameters whose gradients have these norms."""
    found = []
    for norm in norms:
        param = nn.Parameter(torch.zeros(4, 4))
        param.grad = torch.full((4, 4), norm / 4)
        found.append(param)
    return found


def again(params: list[nn.Parameter], *norms: float) -> list[nn.Parameter]:
    for param, norm in zip(params, norms, strict=True):
        param.grad = torch.full((4, 4), norm / 4)
    return params


def test_by_hand() -> None:
    norms = GradientNorms()
    a, b, c = params = params_with(6.0, 2.0, 3.0)
    assert float(norms.last()) == 0.0
    norms.add([a, b])
    assert float(norms.estimate()) == pytest.approx(math.sqrt(40))  # nothing is known of the rest
    norms.add([c])
    assert float(norms.end_step()) == float(norms.last()) == 7.0
    again(params, 3.0, 4.0, 5.0)
    norms.add([a])  # 36 of 49 has become 9
    assert float(norms.estimate()) == pytest.approx(math.sqrt(9 + 13 * (9 / 36) ** (6 / 7)))
    norms.add([b])
    assert float(norms.estimate()) == pytest.approx(math.sqrt(25 + 9 * (25 / 40) ** math.sqrt(40 / 49)))
    assert float(norms.last()) == 7.0
    norms.add([c])
    assert float(norms.estimate()) == pytest.approx(math.sqrt(50))
    assert float(norms.end_step()) == pytest.approx(math.sqrt(50))


def test_gradients_that_do_not_come_and_new_ones() -> None:
    norms = GradientNorms()
    a, b, _ = params_with(3.0, 4.0, 0.0)
    norms.add([a, b])
    norms.end_step()
    (new,) = params_with(12.0)
    norms.add([new])  # says nothing of the others
    assert float(norms.estimate()) == pytest.approx(13.0)
    norms.add([a])
    assert float(norms.estimate()) == pytest.approx(13.0)
    assert float(norms.end_step()) == pytest.approx(math.sqrt(153.0))  # without b
    norms.add([b])  # whose last is 0, like a new one's
    assert float(norms.estimate()) == pytest.approx(13.0)


def test_gradients_of_zero() -> None:
    norms = GradientNorms()
    a, b = params = params_with(0.0, 5.0)
    norms.add(params)
    assert float(norms.end_step()) == 5.0
    again(params, 1e-3, 5.0)
    norms.add([a])  # from nothing to something is no growth
    assert float(norms.estimate()) == pytest.approx(5.0)
    norms.add([b])
    norms.end_step()
    again(params, 10.0, 5.0)
    norms.add([a])  # 10^4 times as large, but it was next to nothing
    assert float(norms.estimate()) == pytest.approx(math.hypot(10, 5), rel=2e-3)
    norms.add([b])
    norms.end_step()
    again(params, 0.0, 0.0)
    norms.add(params)
    assert float(norms.estimate()) == 0.0 == float(norms.end_step())
    norms.add(params)
    assert float(norms.estimate()) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    norms = GradientNorms()
    a, b = params = params_with(1.0, 1.0)
    norms.add(params)
    norms.end_step()
    again(params, value, 1.0)
    norms.add([a])
    assert not math.isfinite(float(norms.estimate()))
    norms.add([b])
    assert not math.isfinite(float(norms.end_step()))


def test_in_float32() -> None:
    gradients = [torch.full((300, 7), 1e-3, dtype=torch.bfloat16), torch.ones(3), torch.ones(0, 2)]
    expected = [float(x.double().square().sum()) for x in gradients]
    assert squared_norms(gradients).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("clip", [LastStepNorm(0.1), EstimatedNorm(0.1)], ids=str)
def test_what_a_clip_knows_is_saved(clip):
    def steps(model, optimizer, numbers):
        for number in numbers:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            (model(x) * (number + 1)).square().mean().backward()
            optimizer.step()

    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = AdamW(model.parameters(), 1e-2)
        return model, optimizer, update_in_backward(optimizer, 500, clip)

    model, optimizer, handle = begun()
    steps(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    steps(model, optimizer, range(3, 6))
    again, other, loaded = begun()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    loaded.load_state_dict(saved[2])
    assert loaded.last_norm is not None
    steps(again, other, range(3, 6))
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert handle.last_norm == loaded.last_norm
    with pytest.raises(ValueError, match="more parameters than the optimizer's 1"):
        update_in_backward(AdamW([nn.Parameter(torch.ones(2))])).load_state_dict(saved[2])
