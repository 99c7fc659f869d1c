"""Steps of AdamW: what they write is what the definition writes, into states of their own."""

from types import ModuleType

import pytest
import torch

from octavo.tune.step_cases import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_kernel_and_reference(tuner: ModuleType, name: str) -> None:
    assert tuner.cases.wrong(name, tuner.cases.inputs(32, 128, 1)[0]) == ""


def test_what_a_step_reads_is_a_new_state(tuner: ModuleType) -> None:
    (x,) = tuner.cases.inputs(32, 128, 1)
    gradient, *state = tuner.cases.reads("AdamW fp8, split32", x)
    assert torch.equal(gradient, x) and all(not tensor.view(torch.uint8).any() for tensor in state)
    before = [tensor.clone() for tensor in state]
    one, plans = CASES["AdamW fp8, split32"].arguments(gradient, *state)
    tuner.cases.KERNELS["step"](one, plans)
    assert any(not torch.equal(a, b) for a, b in zip(before, state, strict=True)) and plans
