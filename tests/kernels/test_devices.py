import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.kernels import devices
from octavo.kernels.cpu import KERNELS
from octavo.kernels.devices import ON_CUDA, kernels_of, triton_kernels
from octavo.kernels.reference.optimizer_state import MasterWeight
from octavo.kernels.reference.optimizer_step import BitNumbers, SgdGroup, WeightUpdate


@pytest.fixture(autouse=True)
def _forget_devices() -> Iterator[None]:
    for cached in (kernels_of, triton_kernels):
        cached.cache_clear()
    yield
    for cached in (kernels_of, triton_kernels):
        cached.cache_clear()


def test_a_gpu_with_native_fp8_runs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = kernels_of(0)
    assert chosen.keys() == KERNELS.keys()
    others = {name for name, kernel in chosen.items() if not kernel.__module__.startswith("octavo.kernels.triton.")}
    assert others == {"scales_of_pass"}, "it has no kernel of ours"


def test_any_other_runs_what_a_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels_of(0) is KERNELS


def test_without_triton_it_runs_what_a_cpu_runs_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "octavo.kernels.triton", None)
    monkeypatch.delattr("octavo.kernels.triton", raising=False)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        assert kernels_of(0) is kernels_of(0) is kernels_of(1) is KERNELS
    (record,) = caplog.records
    assert "Triton can't be imported" in record.getMessage()


def test_a_call_goes_to_the_kernels_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(index: int) -> dict[str, Any]:
        return {"amax": lambda x, tile: (index, tile), "multi_tensor_cast": lambda xs, role: (index, role)}

    monkeypatch.setattr(devices, "kernels_of", kernels)
    x = torch.empty(2, 2)  # of device index -1
    assert ON_CUDA["amax"](x, (1, -1)) == (-1, (1, -1))
    assert ON_CUDA["multi_tensor_cast"]([x], 1) == (-1, 1)


def test_which_devices_read_swizzled_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, package = torch.device("cuda", 1), SimpleNamespace(KERNELS={}, reads_swizzled=lambda device: device.index == 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(devices, "triton_kernels", lambda: package)
    assert devices.reads_swizzled(gpu) and not devices.reads_swizzled(torch.device("cuda"))
    assert not devices.reads_swizzled(torch.device("cpu"))
    kernels_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not devices.reads_swizzled(gpu)


GROUPS = [SgdGroup(0.5, 0.0, 0.0, 0.0, False, False)]
FLAG, SCALE = torch.tensor(0.0), torch.tensor(2.0)


def test_on_a_cpu_the_reference_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "kernels_of", lambda index: pytest.fail("Triton is for GPUs"))
    master = MasterWeight(torch.ones(2, 3), "weight")
    update = WeightUpdate(master, (), torch.ones(2, 3), torch.zeros(()), BitNumbers(0), 0)
    devices.optimizer_step([update], GROUPS, FLAG, SCALE, {})
    devices.optimizer_step([update], GROUPS, torch.ones(()))
    assert torch.equal(master.weight, torch.full((2, 3), 0.75)) and float(update.step) == 1.0
    devices.optimizer_step([], GROUPS)


@pytest.mark.parametrize("native", [False, True])
def test_on_a_gpu_with_fp8_the_launch_does(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton refuses E4M3 below sm_89, so that there moments in FP8 could not step."""
    triton = pytest.importorskip("octavo.kernels.triton")
    launched: list[Any] = []
    stepped: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 if native else 8, 0))
    monkeypatch.setattr(triton, "optimizer_step", lambda *args: launched.extend(args))
    monkeypatch.setattr(devices, "reference_step", lambda *args: stepped.append(args[0]))
    updates: Any = [SimpleNamespace(gradient=SimpleNamespace(is_cuda=True, get_device=lambda: 0))]
    arguments = updates, GROUPS, FLAG, SCALE, {}, torch.zeros(2, dtype=torch.float64)
    devices.optimizer_step(*arguments)
    assert all(actual is each for actual, each in zip(launched, arguments if native else (), strict=True))
    assert stepped == ([] if native else [updates])
