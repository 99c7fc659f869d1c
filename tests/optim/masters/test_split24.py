import pytest
import torch
from torch import nn

from octavo.optim.masters import NAMED, master_of


def test_it_begins_as_the_weight():
    p = nn.Parameter(torch.randn(3, 4, 5).bfloat16())
    master = master_of(p, "split24")
    state = master.new_state(p)
    assert list(state) == ["master_rest"]
    assert state["master_rest"].dtype == torch.int8 and state["master_rest"].shape == p.shape
    assert (state["master_rest"] == 0).all()
    stored = master.stored(p.detach().view(3, 20), state)
    assert stored.kind == "split24" and stored.rest.shape == (3, 20) and stored.is_random is True
    assert stored.rest.data_ptr() == state["master_rest"].data_ptr()


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"master='split24' is for weights of torch.bfloat16, not torch.float16"):
        master_of(nn.Parameter(torch.ones(2, dtype=torch.float16)), "split24")
    with pytest.raises(
        ValueError, match="master='split8': use 'auto', 'split16', 'fp32', 'split32', 'split24', 'fp16_scaled', None"
    ):
        master_of(nn.Parameter(torch.ones(2)), "split8")
    assert NAMED["split24"].dtypes == (torch.bfloat16,)
    assert master_of(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), "split16") is NAMED["split24"]
    assert master_of(nn.Parameter(torch.ones(2)), "split16") is NAMED["fp32"]
