"""The slope along the gradients is 1 where backward computes those of the forward, and something else where not."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo

pytest.importorskip("numpy")

from octavo.distributed.ranks import Ranks
from octavo.inspect.slope import aimed_change, changes_along, dot


class Times(nn.Module):
    """Multiplies the gradient of its input by a number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + self.number * (x - x.detach())


def slope_of(model: nn.Module, dtype: torch.dtype, is_loss: bool) -> float:
    """Return the slope of a cross entropy that the model returns, or of its logits times their gradient."""
    tokens = torch.Generator().manual_seed(0)
    x, target = torch.randn(256, 32, generator=tokens).to(dtype), torch.randint(48, (256,), generator=tokens)

    def outputs() -> Tensor:
        logits = model(x)
        return F.cross_entropy(logits.float(), target) if is_loss else logits

    y = outputs()
    of_logits = y.detach().float().requires_grad_()
    of_loss = F.cross_entropy(of_logits, target) if not is_loss else of_logits
    (grad,) = torch.autograd.grad(of_loss, of_logits)
    y.backward(grad.to(y.dtype))
    y, grad = y.detach(), grad.to(y.dtype)
    total = dot(y, grad)
    change, says = changes_along(
        model, Ranks(), aimed_change(y, grad, dtype == torch.float32), lambda: dot(outputs(), grad) - total
    )
    return float(change / says)


@pytest.mark.parametrize("is_loss", [True, False])
@pytest.mark.parametrize(("dtype", "room"), [(torch.float32, 0.02), (torch.bfloat16, 0.05)])
def test_right_gradients_have_a_slope_of_1(dtype: torch.dtype, room: float, is_loss: bool) -> None:
    """Weights have the same bits then, and neither they nor a counter of writes has changed."""
    for number, expected in ((1.0, 1.0), (0.0, 1.0), (4.0, 0.4), (-1.0, 0.5)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), Times(number), nn.ReLU(), nn.Linear(64, 48)).to(dtype)
        weights = [(p.detach().clone(), p._version) for p in model.parameters()]
        measured = slope_of(model, dtype, is_loss)
        is_right = number in (1.0, 0.0)  # without a gradient weights stay, and prove nothing
        assert abs(measured - 1) < room if is_right else measured < expected + 0.35, (number, measured)
        assert all(
            torch.equal(p, w) and p._version == version
            for p, (w, version) in zip(model.parameters(), weights, strict=True)
        )


def test_moves_below_a_weights_distances_count() -> None:
    """A move that rounding to nearest would lose moves some of the weights by chance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.Linear(2048, 48)).to(torch.bfloat16)
    with torch.no_grad():
        model[0].weight += 8 * model[0].weight.sign()
    assert abs(slope_of(model, torch.bfloat16, True) - 1) < 0.1


def test_weights_in_fp8_stay() -> None:
    """Where all are stored so, nothing can be moved."""
    model = octavo.convert(
        nn.Sequential(nn.Linear(32, 48, bias=False)),
        octavo.recipes.dynamic(),
        weight_storage="fp8",
        select=lambda *_: True,
    )
    assert math.isnan(slope_of(model, torch.float32, True))
