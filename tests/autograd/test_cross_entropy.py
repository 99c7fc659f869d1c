"""Each row's cross entropy through autograd; tests/nn/test_loss.py has the function that users call."""

import torch
from torch.nn import functional as F

from octavo.autograd.cross_entropy import cross_entropy_of_rows


def test_each_row_has_a_gradient_of_its_own() -> None:
    logits, target = torch.randn(6, 20, requires_grad=True), torch.tensor([0, 19, -1, 4, 4, -1])
    losses, grads = cross_entropy_of_rows(logits, target, -1, 0.1, 0.0), torch.randn(6)
    expected = F.cross_entropy(logits, target, ignore_index=-1, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(losses, expected)
    ours, torchs = (torch.autograd.grad(one, logits, grads)[0] for one in (losses, expected))
    torch.testing.assert_close(ours, torchs)
    assert not ours[[2, 5]].any()
