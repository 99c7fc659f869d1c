import torch

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
