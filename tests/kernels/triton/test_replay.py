"""From its third call on an op is replayed, and does with other values all that it did."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from octavo.kernels.triton import cases
from tests.kernels.triton import test_compiled
from tests.support import triton_kernels
from tests.support.casts import ALL, E4M3, call_of, check, drawn, negated, poisoned_memory
from tests.support.definitions import same_bits
from tests.support.emulated import emulating
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.fixture
def recorded(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return each recording's steps and the replay, or None if none was made of them."""
    replay, recordings = kernels.module("replay"), []
    monkeypatch.setattr(replay, "REPLAYS", {})
    real_replay = replay.CallRecorder.replay

    def noted(self: Any, *args: Any) -> Any:
        recordings.append((self.steps, real_replay(self, *args)))
        return recordings[-1][1]

    monkeypatch.setattr(replay.CallRecorder, "replay", noted)
    return recordings


def only_launches(steps: list[Any]) -> bool:
    """Whether torch computed nothing."""
    computing = [step for step in steps if step.kind in ("op", "launch")]
    return any(step.kind == "launch" or step.function.__name__ == "launch" for step in computing) and all(
        callable(step.function) and not hasattr(step.function, "_schema") for step in computing
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


OF_AN_OP_ABOVE = "grouped products of MX", "delayed update, long history"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name in OF_AN_OP_ABOVE))
        for name in test_compiled.CALLS
        if "optimizer" not in name
    ],
)
def test_any_other_op(kernels: TritonKernels, recorded: list[tuple[Any, Any]], name: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        test_compiled.CALLS[name](kernels)
    assert all(replay is not None or not only_launches(steps) for steps, replay in recorded)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs all tests so")
@pytest.mark.parametrize(
    "name",
    [
        "cast+transpose+sum+commit",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("cast rows + columns", "1x32 . 1x32, Triton")),
    ],
)
def test_compiled_kernels(name: str) -> None:
    replay = triton_kernels.load(False).module("replay")
    with emulating(90), mock.patch.object(replay, "REPLAYS", {}):
        for seed in range(3):
            torch.manual_seed(seed)
            assert cases.ALL_CASES[name].wrong((33, 64) if "." not in name else (48, 48, 64)) == ""
        assert any(callable(replayed) for replayed in replay.REPLAYS.values())


def test_one_tensor_twice(kernels: TritonKernels, recorded: list[tuple[Any, Any]]) -> None:
    """A replay takes for one tensor what was one when it was recorded, and nothing else."""
    gamma, rows = torch.ones(48), torch.ones(33)

    def gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dx: torch.Tensor = kernels.norm_backward(dy, x, gamma, rows[:0], rows, "rms_norm", False, False, dy)[0]
        return dx

    one, two = torch.randn(2, 33, 48)
    expected = [gradient(one, one), gradient(two, one)]
    for _ in range(3):
        for actual, expected_dx in zip([gradient(one, one), gradient(two, one)], expected, strict=True):
            assert torch.equal(actual, expected_dx)
    assert len(recorded) == 2


def test_a_scale_that_comes_to_be_known_meanwhile(
    kernels: TritonKernels, recorded: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No replay is made of a call in which the scale came to be known: it would leave out the amax launch."""
    x, scale = torch.randn(33, 48), torch.zeros(3)
    answers = iter([False, False, False, True])  # before each call, and in it
    known = SimpleNamespace(exists_now=lambda role: next(answers))
    monkeypatch.setattr(kernels.module("delayed_update"), "_current", lambda scale: known)
    for _ in range(2):
        kernels.cast(x, scale, 0, E4M3, ALL, False, 0)
    assert [recording for _, recording in recorded] == [None]


def part_of_complex(values: torch.Tensor) -> torch.Tensor:
    """Return the same values with the strides of ``negated``'s, without its negation."""
    return torch.complex(torch.full_like(values, 9.0), values).imag


def _statistics(kernels: TritonKernels, x: torch.Tensor, codes: torch.Tensor) -> list[torch.Tensor]:
    written = [torch.zeros(71, dtype=torch.float64), torch.zeros(3)]
    kernels.cast_statistics(x, codes, torch.ones(1, 1), ALL, *written)
    return written


OF_FLOATS: dict[str, Any] = {  # a call of tensors in float32, all of which kernels read: [16, 24], [16, 24] and [24]
    "amax": lambda kernels, x, y, v: kernels.amax(x, ALL),
    "cast": lambda kernels, x, y, v: kernels.cast(x, None, 0, E4M3, ALL, False, 0, column_sum=True),
    "cast of a gradient": lambda kernels, x, y, v: kernels.cast(
        x, None, 0, E4M3, (1, -1), False, 0, True, activation="relu", preactivation=y
    ),
    "cast of a norm": lambda kernels, x, y, v: kernels.cast(
        x, None, 0, E4M3, ALL, False, 0, gamma=v, beta=v, kind="layer_norm", eps=1e-5, keep=True
    ),
    "norm_backward": lambda kernels, x, y, v: kernels.norm_backward(
        x, y, v, y[:, 0] * 0, y[:, 0].square(), "layer_norm", False, True, x
    ),
    "matmul": lambda kernels, x, y, v: kernels.matmul(
        *(x.to(E4M3), torch.ones(1, 1), ALL, y.repeat(2, 1)[:24].to(E4M3), torch.ones(1, 1), ALL, v),
        *(torch.float32, False),
    ),
    "cast_statistics": lambda kernels, x, y, v: _statistics(kernels, x, y.to(E4M3)),
}


@pytest.mark.parametrize("op", OF_FLOATS)
def test_what_torch_has_not_negated_yet_is_read_with_its_sign(
    kernels: TritonKernels, recorded: list[tuple[Any, Any]], op: str
) -> None:
    """A first, a recorded and a replayed call read signs, also where the replay was recorded of tensors not negated."""
    tensors = torch.randn(16, 24), torch.randn(16, 24), torch.randn(24)
    arguments: list[torch.Tensor] = []

    def leaves(how: Any) -> list[torch.Tensor]:
        arguments[:] = map(how, tensors)
        return tree_leaves((OF_FLOATS[op](kernels, *arguments), arguments))

    expected = leaves(torch.clone)
    for how in (negated, part_of_complex, part_of_complex, part_of_complex, negated, negated):
        assert all(map(same_bits, leaves(how), expected)), how
    assert all(replay is not None for _, replay in recorded) and len(recorded) == 2


def test_what_a_capture_can_not_ask_is_not_recorded(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture takes Triton's product while nobody has asked whether torch's is right; later calls take torch's."""
    library, codes, one = kernels.module("library_matmul"), torch.randn(16, 128).to(E4M3), torch.ones(1, 1)
    call = codes, one, ALL, codes, one, ALL, None, torch.bfloat16, False
    monkeypatch.setattr(library, "_known", {})
    monkeypatch.setattr(library, "_agrees", lambda *kind: True)
    monkeypatch.setattr(library, "is_capturing", lambda: True)
    products: list[str] = []

    def product(operands: Any, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
        products.append("torch's")
        return torch.zeros(16, 16, dtype=out_dtype)

    monkeypatch.setattr(kernels.module("matmul"), "library_matmul", product)
    for _ in range(3):
        kernels.matmul(*call)
    assert products == []
    monkeypatch.setattr(library, "is_capturing", lambda: False)
    for _ in range(2):
        kernels.matmul(*call)
    assert products == ["torch's"] * 2


def _unwritten(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_replay_allocates_as_tests_see_it(kernels: TritonKernels) -> None:
    replayed = kernels.module("replay").replayed(_unwritten)
    with poisoned_memory():
        for _ in range(3):
            assert replayed(torch.ones(4, 4)).isnan().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulator runs where there is no GPU")
def test_the_emulator_sees_what_a_replay_reads_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    package = triton_kernels.load(False)
    amax = package.module("cast").amax

    def of_unwritten(x: torch.Tensor) -> torch.Tensor:
        amaxes: torch.Tensor = amax(torch.empty_like(x), ALL)
        return amaxes

    replayed, x = package.module("replay").replayed(of_unwritten), torch.ones(16, 16)
    with emulating(90, finds_unwritten=False):
        for _ in range(2):
            replayed(x)
    with emulating(90), pytest.raises(Exception, match="nobody wrote"):
        replayed(x)
