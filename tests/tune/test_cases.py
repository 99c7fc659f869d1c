"""Cases run as ops do, are held against their references, and say what they read."""

from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.gpu


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
