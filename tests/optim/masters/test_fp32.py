import pytest
import torch
from torch import nn

from octavo.optim.masters import NAMED, master_of


def test_a_float32_weight_needs_nothing_besides():
    p = nn.Parameter(torch.randn(3, 4))
    for name in ("auto", *NAMED):
        assert master_of(p, name) is NAMED["fp32"]
    assert NAMED["fp32"].new_state(p) == {}
    stored = NAMED["fp32"].stored(p, {})
    assert stored.kind == "weight" and stored.weight is p and not stored.is_random


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"master='fp32' is for weights of torch.float32, not {dtype}; use 'auto'"):
        master_of(nn.Parameter(torch.ones(2, dtype=dtype)), "fp32")


def test_of_bf16_weights_it_is_split32():
    assert master_of(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), "fp32") is NAMED["split32"]
