import copy

import torch
from torch import nn

from octavo.weights.writes import WeightWrites


def test_all_but_steps_of_its_optimizer_and_loads_are_writes():
    weight, other, writes = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4)), WeightWrites()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert not writes.since_last(weight) and not writes.since_last(weight)
    weight.detach().mul_(2)
    assert writes.since_last(weight) and not writes.since_last(weight)
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert not writes.since_last(weight)
    weight.data = weight.data.clone()
    assert writes.since_last(weight)
    assert writes.since_last(other) and not writes.since_last(other) and writes.since_last(weight)
    weight.detach().mul_(2)
    writes.were_loaded(weight)
    assert not writes.since_last(weight)
    writes.replaced = True  # by another parameter at the same address
    assert writes.since_last(weight) and not writes.since_last(weight)
    weight.detach().mul_(2)
    assert not copy.deepcopy(writes).since_last(weight) and writes.since_last(weight)
