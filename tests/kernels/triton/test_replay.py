"""From its third call on an op is replayed, and does with other values all that it did."""

from typing import Any

import pytest
import torch

from octavo.tune import cases
from tests.kernels.triton import test_compiled
from tests.support import triton_kernels
from tests.support.casts import ALL, E4M3, call_of, check, drawn
from tests.support.emulated import emulating
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.fixture
def recorded(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Each recording's steps and the replay, if one was made of them."""
    replay, found = kernels.module("replay"), []
    monkeypatch.setattr(replay, "REPLAYS", {})
    made = replay.CallRecorder.replay

    def noted(self: Any, *args: Any) -> Any:
        found.append((self.steps, made(self, *args)))
        return found[-1][1]

    monkeypatch.setattr(replay.CallRecorder, "replay", noted)
    return found


def only_launches(steps: list[Any]) -> bool:
    """Whether torch computed nothing."""
    own = [step for step in steps if step.kind in ("op", "launch")]
    return any(step.kind == "launch" or step.does.__name__ == "launch" for step in own) and all(
        callable(step.does) and not hasattr(step.does, "_schema") for step in own
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 20))])
def test_any_cast(kernels: TritonKernels, recorded: list[tuple[Any, Any]], seed: int) -> None:
    torch.manual_seed(seed)
    for case, first in drawn(8, 100 + seed):
        op = getattr(kernels, first.op)
        for call in (first, call_of(case)):
            op(*call.args, **call.named)
        call = call_of(case)
        check(op, call, call.is_exact, "edge" not in (case["values"], case["h_values"]))
    assert all(replay is not None or not only_launches(steps) for steps, replay in recorded)
    assert sum(replay is not None for _, replay in recorded) >= 4


@pytest.mark.parametrize("name", [name for name in test_compiled.CALLS if "optimizer" not in name])
def test_any_other_op(kernels: TritonKernels, recorded: list[tuple[Any, Any]], name: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        test_compiled.CALLS[name](kernels)
    assert all(replay is not None or not only_launches(steps) for steps, replay in recorded)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs all tests so")
@pytest.mark.parametrize("name", ["cast+transpose+sum+commit", "cast rows + columns", "1x32 . 1x32, Triton"])
def test_compiled_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating(90):
        replay = triton_kernels.load(False).module("replay")
        monkeypatch.setattr(replay, "REPLAYS", {})
        for seed in range(3):
            torch.manual_seed(seed)
            assert cases.wrong(name, (33, 64) if "." not in name else (48, 48, 64)) == ""
        assert any(callable(made) for made in replay.REPLAYS.values())


def test_one_tensor_twice(kernels: TritonKernels, recorded: list[tuple[Any, Any]]) -> None:
    """A replay takes for one what was one when it was recorded, and nothing else."""
    gamma, rows = torch.ones(48), torch.ones(33)

    def gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = kernels.norm_backward(dy, x, gamma, rows[:0], rows, "rms_norm", False, False, dy)[0]
        return found

    one, two = torch.randn(2, 33, 48)
    expected = [gradient(one, one), gradient(two, one)]
    for _ in range(3):
        for found, due in zip([gradient(one, one), gradient(two, one)], expected, strict=True):
            assert torch.equal(found, due)
    assert len(recorded) == 2


def test_a_scale_that_comes_to_be_known_meanwhile(
    kernels: TritonKernels, recorded: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded with it is not replayed without: the amax launch would be missing."""
    x, scale = torch.randn(33, 48), torch.zeros(3)
    answers = iter([False, False, False, True])  # before each call, and in it
    update = kernels.module("delayed_update")
    monkeypatch.setattr(update, "_current", lambda scale: scale)
    monkeypatch.setattr(update, "_exists", lambda entry, role: next(answers))
    for _ in range(2):
        kernels.cast(x, scale, 0, E4M3, ALL, False, 0)
    assert [made for _, made in recorded] == [None]
