"""Torch's own arguments stand in the signatures; those that octavo has no use for are refused, with a reason."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from octavo.optim import SGD, Adam, AdamW

PAIRS = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam), (SGD, torch.optim.SGD)]


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_the_signature_has_all_of_torchs(ours: Any, torchs: Any) -> None:
    own, theirs = (inspect.signature(kind).parameters for kind in (ours, torchs))
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in own.values())
    for name, parameter in theirs.items():
        assert (own[name].default, own[name].kind) == (parameter.default, parameter.kind)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_what_is_off_is_taken_and_what_is_on_refused(ours: Any, torchs: Any) -> None:
    p = nn.Parameter(torch.ones(2))
    refused = inspect.signature(torchs).parameters.keys() & {
        *("amsgrad", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
    }
    ours([p], **dict.fromkeys(refused, False))
    for name in refused:
        with pytest.raises(ValueError, match=f"{name}=True: .*; leave the argument out"):
            ours([p], **{name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentums'"):
        ours([p], momentums="fp8")


def test_ranges() -> None:
    p = nn.Parameter(torch.ones(2))
    for options in ({"lr": -1.0}, {"weight_decay": -0.1}):
        for ours, _ in PAIRS:
            with pytest.raises(ValueError, match=r"must be at least 0"):
                ours([p], **options)
    with pytest.raises(ValueError, match="gradient_storage='fp4': use None or 'fp8'"):
        AdamW([p], gradient_storage="fp4")
