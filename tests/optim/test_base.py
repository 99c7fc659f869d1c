import pytest
import torch
from torch import nn

import octavo
from octavo.optim.base import CompactOptimizer


def test_a_step_of_no_optimizer_in_particular():
    weight = nn.Parameter(torch.ones(2))
    optimizer = CompactOptimizer([weight], {"lr": 0.1}, (), "auto", 0)
    optimizer.names = ()
    weight.grad = torch.ones(2)
    with pytest.raises(NotImplementedError):
        optimizer.step()


def test_amsgrads_state_is_refused():
    weight = nn.Parameter(torch.ones(2))
    torchs = torch.optim.AdamW([weight], amsgrad=True)
    weight.grad = torch.ones(2)
    torchs.step()
    with pytest.raises(ValueError, match="amsgrad=True"):
        octavo.optim.AdamW([weight]).load_state_dict(torchs.state_dict())
