"""A forward that runs again computes the same: of the same arguments, modes, random numbers and autocast."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import octavo

np = pytest.importorskip("numpy")

from octavo.inspect.forwards import Forward  # noqa: E402


@dataclass
class Tokens:
    x: Tensor
    scale: float


class Noisy(nn.Module):
    """Dropout, NumPy's random numbers, and arguments that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = octavo.nn.Linear(32, 32, recipe=octavo.recipes.delayed()), nn.Dropout(0.5)

    def forward(self, tokens: Tokens, *, more: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
        tokens.x.mul_(tokens.scale)
        y = self.dropout(self.layer(tokens.x + more["also"][0])) + np.random.rand()
        return y, y.sum()


def test_a_forward_runs_again_bit_for_bit() -> None:
    """As often as it is asked to, though the model is in another mode then, and autocast is off."""
    torch.manual_seed(0)
    model, also = Noisy(), [torch.randn(16, 32)]
    tokens = Tokens(torch.randn(16, 32), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        forward = Forward.of(model, (tokens,), {"more": {"also": also}})
        expected = model(tokens, more={"also": also})
    assert not forward.is_float16 and forward.autocast is not None and forward.autocast.dtype == torch.bfloat16
    also[0].zero_()
    model.eval()
    for _ in range(2):
        assert all(map(torch.equal, forward.again(model), expected))
    assert model.training
