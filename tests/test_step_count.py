import gc

import torch

import octavo
from octavo.step_count import OPTIMIZER_STEPS


def test_steps_of_any_optimizer_are_counted_once():
    OPTIMIZER_STEPS.watch()
    OPTIMIZER_STEPS.watch()
    p = torch.nn.Parameter(torch.ones(2))
    before = OPTIMIZER_STEPS.count
    for optimizer in (torch.optim.SGD([p], lr=0.1), torch.optim.AdamW([p], lr=0.1, foreach=True)):
        p.grad = torch.ones(2)
        optimizer.step()
    assert OPTIMIZER_STEPS.count == before + 2


def test_writes_to_a_parameter_are_counted_while_a_holder_of_the_count_lives():
    p = torch.nn.Parameter(torch.ones(2))
    writes, optimizer = OPTIMIZER_STEPS.writes_to(p), torch.optim.SGD([p], lr=0.1)
    assert OPTIMIZER_STEPS.writes_to(p) is writes
    p.grad = torch.ones(2)
    optimizer.step()
    writes.count_others(p)
    assert (writes.last_step, writes.by_hand) == (OPTIMIZER_STEPS.count, 0)
    p.detach().add_(1)
    writes.count_others(p)
    assert writes.by_hand == 1
    with OPTIMIZER_STEPS.writing([p]):
        p.detach().add_(1)
    writes.count_others(p)
    assert writes.by_hand == 1
    del writes
    assert OPTIMIZER_STEPS.writes_to(p).by_hand == 0


def test_layers_that_are_gone_leave_no_counts():
    """Parameters of later layers may take their ids; ids of parameters that live may be swapped by torch meanwhile."""

    def train():
        layer = octavo.nn.Linear(16, 16, recipe=octavo.recipes.delayed())
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(layer.weight.detach().clone()))
        assert layer.fp8.weight_writes.since_last(layer.weight)

    gc.collect()
    before = len(OPTIMIZER_STEPS._seen)
    for _ in range(30):
        train()
    gc.collect()
    assert len(OPTIMIZER_STEPS._seen) == before
