import pytest
import torch
from torch import nn

from octavo.optim import AdamW
from octavo.optim.masters import master_of


def test_the_weight_is_all_there_is():
    p = nn.Parameter(torch.randn(3, 4).bfloat16())
    master = master_of(p, None)
    assert master.new_state(p) == {}
    stored = master.stored(p, {})
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
