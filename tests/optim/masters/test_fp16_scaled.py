import math

import pytest
import torch
from torch import nn

from octavo.optim import AdamW
from octavo.optim.masters import master_of


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_begins_as_the_weight(dtype, size):
    p = nn.Parameter((torch.randn(3, 4, 5).clamp(-2, 2) * size).clamp(-6e4, 6e4).to(dtype))
    if dtype == torch.float16 and size < 1e-4:
        p.data.zero_()
    state = master_of(p, "fp16_scaled").new_state(p)
    rest, scale_inv, amax = (state[f"master_{name}"] for name in ("rest", "scale_inv", "amax"))
    assert rest.dtype == torch.float16 and rest.shape == p.shape and rest.isfinite().all()
    assert torch.allclose(rest.float() * scale_inv, p.float(), rtol=0, atol=float(amax) * 2.0**-24)
    assert float(amax) == float(p.detach().abs().max()) and amax.shape == scale_inv.shape == (1, 1)
    assert math.log2(float(scale_inv)) % 1 == 0
    stored = master_of(p, "fp16_scaled").stored(p.detach().view(3, 20), state)
    assert stored.kind == "fp16_scaled" and stored.rest.shape == (3, 20) and stored.is_random


def test_a_state_of_strided_and_of_empty_weights():
    p = nn.Parameter(torch.randn(4, 3).bfloat16().t())
    assert master_of(p, "fp16_scaled").new_state(p)["master_rest"].is_contiguous()
    empty = nn.Parameter(torch.empty(0, 3).bfloat16())
    assert float(master_of(empty, "fp16_scaled").new_state(empty)["master_amax"]) == 0.0


def test_weights_that_grow_a_millionfold_stay_finite():
    p = nn.Parameter(torch.full((2, 200), 1e-3, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=100.0, weight_decay=0.0, moments="fp32", master="fp16_scaled")
    for _ in range(20):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    assert p.isfinite().all() and float(p.detach().max()) == pytest.approx(2000, rel=0.01)


@pytest.mark.parametrize("write", ["copy_", "data.copy_", "data ="])
def test_a_weight_that_was_written_goes_on_from_there(write):
    p = nn.Parameter(torch.randn(2, 200).bfloat16())
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, moments="fp32", master="fp16_scaled")
    for values in (None, 7e4, 1e-3):  # beyond what the scale of before can hold; far below
        if values is not None:
            new = torch.full((2, 200), values).bfloat16()
            if write == "data =":
                p.data = new.clone()
            else:
                (p.detach() if write == "copy_" else p.data).copy_(new)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert values is None or torch.allclose(p.detach(), new - 1e-4, rtol=2.0**-7)
