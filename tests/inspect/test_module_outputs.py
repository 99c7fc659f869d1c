"""A record tells a change of the forward from one of the data, as modules compute the first batch in each record."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.inspect.departures import departures
from octavo.inspect.module_outputs import ModuleOutputs

np = pytest.importorskip("numpy")

AT, STEPS = 5, 9


class Branch(nn.Module):
    """A residual branch; in the steps of a fault it multiplies what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.times = nn.Linear(32, 64), nn.Linear(64, 32), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.times * self.down(self.up(x).relu())


def fade(branch: Branch) -> None:
    branch.times = 0.1


def write(branch: Branch) -> None:
    branch.down.weight.data.mul_(0.1)


def leave(branch: Branch) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "of_data", "kind", "layer"),
    [(fade, 1.0, "forward", "1"), (write, 1.0, "overwritten", "1.down"), (leave, 10.0, "batch", "")],
)
def test_a_change_of_the_forward_is_told_from_one_of_weights_or_data(
    change: Callable[[Branch], None], of_data: float, kind: str, layer: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Branch() for _ in range(3)))
    octavo.convert(model, octavo.recipes.dynamic(), select=lambda module, name: True)
    optimizer, target = torch.optim.Adam(model.parameters(), 1e-3), torch.randn(32, 32)
    with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizer) as recorder:
        for step in range(STEPS):
            if step == AT:
                change(model[1])
            x = torch.randn(256, 32)
            loss = (model(x) - x @ target * (of_data if step >= AT else 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
    record = octavo.inspect.load(tmp_path)
    findings = octavo.inspect.diagnose(record)
    assert (findings[0].kind, findings[0].layer, findings[0].begins) == (kind, layer, AT)
    is_forward = [each.kind == "forward" for finding in findings for each in (finding, *finding.consequences)]
    assert any(is_forward) == (kind == "forward")
    if kind == "batch":
        assert "compute what they did" in findings[0].sentence
    first = departures(record)[0]
    assert first.step == AT and (first.name == "the output of 1 for the same batch") == (kind == "forward")


def test_outputs_are_compared_with_those_of_the_run_before() -> None:
    """A module that gets another size has no comparison, nor has one that did not run in both."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
    outputs, x, moved = ModuleOutputs(model), torch.randn(4, 8), []
    for rows, last in ((4, "b"), (4, "b"), (3, "c")):
        with outputs.sampled():
            y = model["a"](x)
            z = model[last](y[:rows])
        moved.append(outputs.moved(x.device))
        with torch.no_grad():
            model["a"].bias += 1
    assert outputs.names == ["", "a", "b", "c"] and not moved[0].any()
    of_b = float((model["b"].weight.detach().sum(1) ** 2).sum() * 4)
    changes = torch.tensor([[0, 32], [32, of_b], [0, 0]]).double()
    torch.testing.assert_close(moved[1][1:, (0, 2)], changes, rtol=1e-5, atol=0)
    sizes = [x.double().square().sum(), (y - 1).double().square().sum()]
    torch.testing.assert_close(moved[1][1, (1, 3)], torch.stack(sizes), rtol=1e-5, atol=0)
    assert moved[2][1, 2] > 0 and not moved[2][2:].any() and z.shape == (3, 8)
    assert not any(module._forward_hooks for module in model.modules())


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x


def test_a_first_batch_that_is_gone_ends_the_comparison_and_not_the_twin(tmp_path: Path) -> None:
    """As of an argument that is none of torch's containers, and that the training empties."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = octavo.nn.Linear(32, 32)

        def forward(self, batch: Batch) -> Tensor:
            assert batch.x is not None
            return self.layer(batch.x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizer) as recorder:
        for _ in range(3):
            batch = Batch(torch.randn(16, 32))
            (loss := model(batch).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            batch.x = None
            recorder.step(loss=loss)
    record = octavo.inspect.load(tmp_path)
    assert record.events == [] and np.isfinite(record.weights["twin_cosine"]).all()
    assert record.modules == ["", "layer"] and np.isnan(record.of_modules["output"]).all()
