"""Masters of plain weights; those of weights in FP8 are tested in test_fp8_masters.py."""

import pytest
import torch
from torch import nn

from octavo.optim import AdamW
from octavo.optim.masters import NAMED, master_of


def test_a_float32_weight_needs_nothing_besides():
    p = nn.Parameter(torch.randn(3, 4))
    for name in ("auto", *NAMED):
        assert master_of(p, name) is NAMED["fp32"]
    assert NAMED["fp32"].new_state(p) == {}
    stored = NAMED["fp32"].for_kernel(p, {})
    assert stored.kind == "weight" and stored.weight is p and not stored.is_random


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_fp32_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"master='fp32' is for weights of torch.float32, not {dtype}; use 'auto'"):
        master_of(nn.Parameter(torch.ones(2, dtype=dtype)), "fp32")


def test_of_bf16_weights_it_is_split32():
    assert master_of(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), "fp32") is NAMED["split32"]


def test_split32_it_begins_as_the_weight():
    p = nn.Parameter(torch.randn(3, 4, 5).bfloat16())
    master = master_of(p, "split32")
    state = master.new_state(p)
    assert list(state) == ["master_rest"]
    assert state["master_rest"].dtype == torch.uint8 and state["master_rest"].shape == (*p.shape, 2)
    assert (state["master_rest"] == 0).all()
    stored = master.for_kernel(p.detach().view(3, 20), state)
    assert stored.kind == "split32" and stored.rest.shape == (3, 20) and stored.is_random is False
    assert stored.rest.data_ptr() == state["master_rest"].data_ptr()


def test_it_is_what_bf16_weights_have_by_default():
    p = nn.Parameter(torch.ones(2).bfloat16())
    assert master_of(p, "auto") is NAMED["split32"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_split32_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"master='split32' is for weights of torch.bfloat16, not {dtype}"):
        master_of(nn.Parameter(torch.ones(2, dtype=dtype)), "split32")


def test_split24_it_begins_as_the_weight():
    p = nn.Parameter(torch.randn(3, 4, 5).bfloat16())
    master = master_of(p, "split24")
    state = master.new_state(p)
    assert list(state) == ["master_rest"]
    assert state["master_rest"].dtype == torch.int8 and state["master_rest"].shape == p.shape
    assert (state["master_rest"] == 0).all()
    stored = master.for_kernel(p.detach().view(3, 20), state)
    assert stored.kind == "split24" and stored.rest.shape == (3, 20) and stored.is_random is True
    assert stored.rest.data_ptr() == state["master_rest"].data_ptr()


def test_split24_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"master='split24' is for weights of torch.bfloat16, not torch.float16"):
        master_of(nn.Parameter(torch.ones(2, dtype=torch.float16)), "split24")
    with pytest.raises(
        ValueError, match="master='split8': use 'auto', 'split16', 'fp16_scaled', 'fp32', 'split32', 'split24', None"
    ):
        master_of(nn.Parameter(torch.ones(2)), "split8")
    assert NAMED["split24"].dtypes == (torch.bfloat16,)
    assert master_of(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), "split16") is NAMED["split24"]
    assert master_of(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), "fp16_scaled") is NAMED["split32"]
    assert all(master_of(nn.Parameter(torch.ones(2)), name) is NAMED["fp32"] for name in ("split16", "fp16_scaled"))
    with pytest.raises(ValueError, match=r"master='fp16_scaled' is for weights of .* not torch.float16; use 'auto'"):
        master_of(nn.Parameter(torch.ones(2, dtype=torch.float16)), "fp16_scaled")


@pytest.mark.parametrize("write", ["copy_", "data.copy_", "data ="])
def test_a_weight_that_was_written_goes_on_from_there(write):
    p = nn.Parameter(torch.randn(2, 200).bfloat16())
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, moments="fp32", master="split32")
    for values in (None, 7e4, 1e-3):  # far above what it was; far below
        if values is not None:
            new = torch.full((2, 200), values).bfloat16()
            if write == "data =":
                p.data = new.clone()
            else:
                (p.detach() if write == "copy_" else p.data).copy_(new)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert values is None or torch.allclose(p.detach(), new - 1e-4, rtol=2.0**-7)


def test_the_weight_is_all_there_is():
    p = nn.Parameter(torch.randn(3, 4).bfloat16())
    master = master_of(p, None)
    assert master.new_state(p) == {}
    stored = master.for_kernel(p, {})
    assert stored.kind == "stochastic" and stored.is_random and stored.rest is None
    with pytest.raises(ValueError, match=r"master=None is for weights of torch.bfloat16, not torch.float16"):
        master_of(nn.Parameter(torch.ones(2, dtype=torch.float16)), None)


def test_small_updates_count_on_average():
    p = nn.Parameter(torch.ones(4, 1000, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=2.0**-12, weight_decay=0.0, moments="fp32", master=None)
    p.grad = torch.ones_like(p)
    for _ in range(64):  # of a 16th, or a 32nd, of the weight's step each
        optimizer.step()
    assert float(p.detach().float().mean()) == pytest.approx(1 - 2.0**-6, abs=5e-4)
