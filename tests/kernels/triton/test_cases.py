"""Cases run as ops do, agree with their references, and count what they read; each kernel equals its reference."""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from octavo.kernels.triton.cases import CASES, FUSED, ONLY_TUNED, PRODUCTS, STEPS
from tests.kernels.triton.test_compiled import BY_DEFAULT
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.fixture
def cases(kernels: TritonKernels) -> Iterator[ModuleType]:
    """octavo.kernels.triton.cases, by whose kernels cases run; in Triton's interpreter where there is no GPU."""
    import triton

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = kernels.gpu.type == "cpu"
        yield kernels.module("cases")


def unless_compiled(names: Iterable[str]) -> list[Any]:
    """The default set runs the others compiled, in test_compiled.py."""
    compiled = {name for _, name in BY_DEFAULT}
    return [pytest.param(name, marks=[pytest.mark.full] if name in compiled else []) for name in names]


@pytest.mark.parametrize("name", unless_compiled([*CASES, *ONLY_TUNED, *STEPS]))
def test_kernel_and_reference(cases: ModuleType, name: str) -> None:
    shape = (32, 256) if name in FUSED or name in ONLY_TUNED else (32, 128) if name in STEPS else (48, 128)
    assert cases.ALL_CASES[name].wrong(shape) == ""


@pytest.mark.parametrize("name", unless_compiled(name for name in PRODUCTS if not name.endswith("fast")))
def test_products(cases: ModuleType, name: str) -> None:
    assert cases.ALL_CASES[name].wrong((32, 48, 128)) == ""
    assert cases.ALL_CASES[name].call_of((32, 48, 128))().shape == (32, 48)


def test_a_wrong_product_is_found(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.KERNELS["Triton product"]

    def wrong(a: Any, a_scale_inv: Any, *others: Any) -> Any:
        return right(a, a_scale_inv.mean().expand_as(a_scale_inv).contiguous(), *others)

    monkeypatch.setitem(cases.KERNELS, "Triton product", wrong)
    assert cases.ALL_CASES["rows . rows, Triton"].wrong((32, 48, 128)).endswith("dB")


def test_what_a_case_reads(cases: ModuleType) -> None:
    (x,) = cases.reads("amax", (32, 48))
    assert torch.equal(x, cases.normal((32, 48))) and not torch.equal(x, cases.normal((32, 48), 1))
    assert cases.ALL_CASES["amax"].call_of((32, 48))().item() == x.abs().max().item()
    assert len(cases.reads("rmsnorm gradient + residual", (32, 48))) == 6
    dy, h, scale_inv = cases.reads("swiglu gradient of codes + cast+transpose+sum+commit", (32, 128))
    assert dy.shape == (32, 64) and h.shape == (32, 128) and h.element_size() == 1 and scale_inv.shape == (32, 4)


def test_a_wrong_kernel_is_found(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cases.ALL_CASES["amax"].wrong((32, 48)) == ""
    monkeypatch.setitem(cases.KERNELS, "amax", lambda x, tile: cases.DEFINITIONS["amax"](x, tile) + 1)
    assert cases.ALL_CASES["amax"].wrong((32, 48)) == "output 0: 1 of 1 differ"

    def leaves_the_state(*arguments: object, **named: object) -> object:
        copies = (a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
        return cases.DEFINITIONS["cast_and_commit"](*copies, **named)

    monkeypatch.setitem(cases.KERNELS, "cast_and_commit", leaves_the_state)
    assert cases.ALL_CASES["cast+transpose+sum+commit"].wrong((32, 48)) == "state differs"
