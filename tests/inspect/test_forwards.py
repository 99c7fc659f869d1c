"""A forward that runs again computes the same: of the same arguments, modes, random numbers and autocast."""

from dataclasses import dataclass
from pathlib import Path

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
    assert not forward.is_float16 and forward.autocast.dtype == torch.bfloat16
    also[0].zero_()
    model.eval()
    for _ in range(2):
        assert all(map(torch.equal, forward.again(model), expected))
    assert model.training


class TwoOutputs(nn.Module):
    """A gradient of each output reads the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x) * self.scale, self.second(x) * self.scale


def test_a_backward_after_a_recorded_update_goes_on(tmp_path: Path) -> None:
    """Of the same forward, by another optimizer: its buffers have the version that they had."""
    model = octavo.convert(TwoOutputs(), octavo.recipes.dynamic(), lambda *_: True)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (model.first, model.second)]  # type: ignore[union-attr]
    with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizers[0]) as recorder:
        for optimizer, y in zip(optimizers, model(torch.randn(16, 64)), strict=True):
            y.square().mean().backward()
            optimizer.step()
        recorder.step()
    assert octavo.inspect.load(tmp_path).events == []


class Recurrent(nn.Module):
    """Reads what its last forward left, which in one of two ways is written in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.read, self.out, self.in_place, self.state = (
            nn.Linear(64, 64),
            nn.Linear(64, 64),
            in_place,
            torch.zeros(16, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.read(3 * self.state + x).tanh()
        self.state = self.state.copy_(hidden.detach()) if self.in_place else hidden.detach()
        return self.out(hidden)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_forward_begins_with_the_state_that_the_steps_had(in_place: bool, tmp_path: Path) -> None:
    """Else neither gradients nor the slope are those of the step."""
    torch.manual_seed(0)
    model = octavo.convert(Recurrent(in_place), octavo.recipes.dynamic(), lambda *_: True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizer) as recorder:
        for _ in range(4):
            model(torch.randn(16, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    record = octavo.inspect.load(tmp_path)
    assert record.events == [] and record.weights["twin_cosine"].min() > 0.99
    np.testing.assert_allclose(record.scalar("twin_slope"), 1, atol=0.01)
