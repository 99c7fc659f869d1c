"""Casts of activations, of their gradients and of norms: each is its reference's, as far as arithmetic permits."""

from types import ModuleType

import pytest

from octavo.tune.fused_cases import CASES, ONLY_TUNED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*CASES, *ONLY_TUNED])
def test_kernel_and_reference(tuner: ModuleType, name: str) -> None:
    assert tuner.cases.wrong(name, tuner.cases.inputs(32, 256, 1)[0]) == ""


def test_an_activations_input_may_be_codes(tuner: ModuleType) -> None:
    (x,) = tuner.cases.inputs(32, 128, 1)
    dy, h, scale_inv = tuner.cases.reads("swiglu gradient of codes + cast+transpose+sum+commit", x)
    assert dy.shape == (32, 64) and h.shape == x.shape and h.element_size() == 1 and scale_inv.shape == (32, 4)
