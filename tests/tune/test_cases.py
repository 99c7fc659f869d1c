"""Cases run as ops do, are held against their references, and say what they read; each kernel is its reference's."""

from types import ModuleType

import pytest
import torch

from octavo.tune.cases import CASES, FUSED, ONLY_TUNED, STEPS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*CASES, *ONLY_TUNED, *STEPS])
def test_kernel_and_reference(tuner: ModuleType, name: str) -> None:
    shape = (32, 256) if name in FUSED or name in ONLY_TUNED else (32, 128) if name in STEPS else (48, 128)
    assert tuner.cases.wrong(name, tuner.cases.inputs(*shape, 1)[0]) == ""


def test_a_case_and_what_it_reads(tuner: ModuleType) -> None:
    cases = tuner.cases
    xs = cases.inputs(32, 48, 2)
    assert not torch.equal(*xs) and torch.equal(xs[0], cases.inputs(32, 48, 1)[0])
    assert [call().item() for call in cases.calls("amax", xs)] == [x.abs().max().item() for x in xs]
    assert cases.reads("amax", xs[0])[0] is xs[0] and len(cases.reads("rmsnorm gradient + residual", xs[0])) == 6


def test_a_wrong_kernel_is_found(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuner.cases
    (x,) = cases.inputs(32, 48, 1)
    assert cases.wrong("amax", x) == ""
    monkeypatch.setitem(cases.KERNELS, "amax", lambda x, tile: cases.DEFINITIONS["amax"](x, tile) + 1)
    assert cases.wrong("amax", x) == "output 0: 1 of 1 differ"

    def leaves_the_state(*arguments: object) -> object:
        return cases.DEFINITIONS["cast_and_commit"](
            *(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
        )

    monkeypatch.setitem(cases.KERNELS, "cast_and_commit", leaves_the_state)
    assert cases.wrong("cast+transpose+sum+commit", x) == "state differs"


def test_weights_of_uneven_heights_are_all_rows(tuner: ModuleType) -> None:
    (x,) = tuner.cases.inputs(48, 16, 1)
    _, xs, q, t, *_ = tuner.cases.CASES["five weights at once"].arguments(x)
    assert [len(piece) for piece in xs] == [3, 6, 9, 12, 18] and [w.shape for w in q] == [w.t().shape for w in t]


def test_an_activations_input_may_be_codes(tuner: ModuleType) -> None:
    (x,) = tuner.cases.inputs(32, 128, 1)
    dy, h, scale_inv = tuner.cases.reads("swiglu gradient of codes + cast+transpose+sum+commit", x)
    assert dy.shape == (32, 64) and h.shape == x.shape and h.element_size() == 1 and scale_inv.shape == (32, 4)


def test_what_a_step_reads_is_a_new_state(tuner: ModuleType) -> None:
    (x,) = tuner.cases.inputs(32, 128, 1)
    gradient, *state = tuner.cases.reads("AdamW fp8, split32", x)
    assert torch.equal(gradient, x) and all(not tensor.view(torch.uint8).any() for tensor in state)
    before = [tensor.clone() for tensor in state]
    one, plans = STEPS["AdamW fp8, split32"].arguments(gradient, *state)
    tuner.cases.KERNELS["step"](one, plans)
    assert any(not torch.equal(a, b) for a, b in zip(before, state, strict=True)) and plans
