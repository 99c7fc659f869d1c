"""Where a step goes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.kernels import devices as module
from octavo.kernels.devices import optimizer_step
from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_step import BitNumbers, SgdGroup, WeightUpdate

GROUPS = [SgdGroup(0.5, 0.0, 0.0, 0.0, False, False)]
FLAG, SCALE = torch.tensor(0.0), torch.tensor(2.0)


def on_a_cpu() -> WeightUpdate:
    master = MasterWeight(torch.ones(2, 3), "weight")
    return WeightUpdate(master, (), torch.ones(2, 3), torch.zeros(()), BitNumbers(0), 0)


def on_a_gpu() -> Any:
    return SimpleNamespace(gradient=SimpleNamespace(is_cuda=True, get_device=lambda: 0))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the reference was called with."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "reference_step", lambda *args: found.append(args))
    return found


def test_a_cpu_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernels_of", lambda index: pytest.fail("Triton is for GPUs"))
    update = on_a_cpu()
    optimizer_step([update], GROUPS, FLAG, SCALE, {})
    assert torch.equal(update.master.weight, torch.full((2, 3), 0.75))
    optimizer_step([update], GROUPS, torch.ones(()))
    assert torch.equal(update.master.weight, torch.full((2, 3), 0.75))
    assert float(update.step) == 1.0


def test_a_gpu_with_fp8_runs_the_launch(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]) -> None:
    triton = pytest.importorskip("octavo.kernels.triton")
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "kernels_of", lambda index: triton.KERNELS)
    monkeypatch.setattr(triton, "optimizer_step", lambda *args: launched.append(args))
    updates, plans = [on_a_gpu()], {}
    sums = torch.zeros(2, dtype=torch.float64)
    optimizer_step(updates, GROUPS, FLAG, SCALE, plans, sums)
    ((*given, kept, resolution),) = launched
    assert given == [updates, GROUPS, FLAG, SCALE] and kept is plans and resolution is sums
    assert not calls


def test_nothing_to_update(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr(module, "kernels_of", lambda index: pytest.fail("no weight, no device"))
    optimizer_step([], GROUPS)
    assert not calls
