import pytest
import torch
from torch import nn

from octavo.optim.masters import NAMED, master_of


def test_it_begins_as_the_weight():
    p = nn.Parameter(torch.randn(3, 4, 5).bfloat16())
    master = master_of(p, "split32")
    state = master.new_state(p)
    assert list(state) == ["master_rest"]
    assert state["master_rest"].dtype == torch.uint8 and state["master_rest"].shape == (*p.shape, 2)
    assert (state["master_rest"] == 0).all()
    stored = master.stored(p.detach().view(3, 20), state)
    assert stored.kind == "split32" and stored.rest.shape == (3, 20) and stored.is_random is False
    assert stored.rest.data_ptr() == state["master_rest"].data_ptr()


def test_it_is_what_bf16_weights_have_by_default():
    p = nn.Parameter(torch.ones(2).bfloat16())
    assert master_of(p, "auto") is NAMED["split32"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"master='split32' is for weights of torch.bfloat16, not {dtype}"):
        master_of(nn.Parameter(torch.ones(2, dtype=dtype)), "split32")
