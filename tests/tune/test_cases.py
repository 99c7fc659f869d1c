"""Cases run as ops do, are held against their references, and say what they read; each kernel is its reference's."""

from types import ModuleType
from typing import Any

import pytest
import torch

from octavo.tune.cases import CASES, FUSED, ONLY_TUNED, PRODUCTS, STEPS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*CASES, *ONLY_TUNED, *STEPS])
def test_kernel_and_reference(tuner: ModuleType, name: str) -> None:
    shape = (32, 256) if name in FUSED or name in ONLY_TUNED else (32, 128) if name in STEPS else (48, 128)
    assert tuner.cases.wrong(name, shape) == ""


@pytest.mark.parametrize("name", [name for name in PRODUCTS if not name.endswith("fast")])
def test_products(tuner: ModuleType, name: str) -> None:
    assert tuner.cases.wrong(name, (32, 48, 128)) == ""
    assert tuner.cases.call_of(name, (32, 48, 128))().shape == (32, 48)


def test_a_wrong_product_is_found(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tuner.cases.KERNELS["Triton product"]

    def wrong(a: Any, a_scale_inv: Any, *others: Any) -> Any:
        return right(a, a_scale_inv.mean().expand_as(a_scale_inv).contiguous(), *others)

    monkeypatch.setitem(tuner.cases.KERNELS, "Triton product", wrong)
    assert tuner.cases.wrong("rows . rows, Triton", (32, 48, 128)).endswith("dB")


def test_a_case_and_what_it_reads(tuner: ModuleType) -> None:
    cases = tuner.cases
    (x,) = cases.reads("amax", (32, 48))
    assert torch.equal(x, cases.normal((32, 48))) and not torch.equal(x, cases.normal((32, 48), 1))
    assert cases.call_of("amax", (32, 48))().item() == x.abs().max().item()
    assert len(cases.reads("rmsnorm gradient + residual", (32, 48))) == 6


def test_a_wrong_kernel_is_found(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuner.cases
    assert cases.wrong("amax", (32, 48)) == ""
    monkeypatch.setitem(cases.KERNELS, "amax", lambda x, tile: cases.DEFINITIONS["amax"](x, tile) + 1)
    assert cases.wrong("amax", (32, 48)) == "output 0: 1 of 1 differ"

    def leaves_the_state(*arguments: object) -> object:
        return cases.DEFINITIONS["cast_and_commit"](
            *(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
        )

    monkeypatch.setitem(cases.KERNELS, "cast_and_commit", leaves_the_state)
    assert cases.wrong("cast+transpose+sum+commit", (32, 48)) == "state differs"


def test_weights_of_uneven_heights_are_all_rows(tuner: ModuleType) -> None:
    _, xs, q, t, *_ = tuner.cases.CASES["five weights at once"].arguments(tuner.cases.normal((48, 16)))
    assert [len(piece) for piece in xs] == [3, 6, 9, 12, 18] and [w.shape for w in q] == [w.t().shape for w in t]


def test_an_activations_input_may_be_codes(tuner: ModuleType) -> None:
    dy, h, scale_inv = tuner.cases.reads("swiglu gradient of codes + cast+transpose+sum+commit", (32, 128))
    assert dy.shape == (32, 64) and h.shape == (32, 128) and h.element_size() == 1 and scale_inv.shape == (32, 4)


def test_what_a_step_reads_is_a_new_state(tuner: ModuleType) -> None:
    case = STEPS["AdamW fp8, split32"]
    one, gradient, *state = case.inputs((32, 128))
    assert torch.equal(gradient, tuner.cases.normal((32, 128)))
    assert all(not tensor.view(torch.uint8).any() for tensor in state)
    before = [tensor.clone() for tensor in state]
    _, plans = case.arguments(one, gradient, *state)
    tuner.cases.KERNELS["step"](one, plans)
    assert any(not torch.equal(a, b) for a, b in zip(before, state, strict=True)) and plans
