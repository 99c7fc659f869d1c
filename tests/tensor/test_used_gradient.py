"""What stands for a gradient that is gone: nothing can be done with it but to drop it."""

import pytest
import torch
from torch import nn

from octavo import UnsupportedOpError
from octavo.tensor.used_gradient import UsedGradient


@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (0, 2)])
def test_it_is_dropped_like_any_gradient(shape):
    param = nn.Parameter(torch.zeros(shape))
    param.grad = UsedGradient(param)
    optimizer = torch.optim.SGD([param], 0.1)
    optimizer.zero_grad(set_to_none=False)
    assert isinstance(param.grad, UsedGradient) and param.grad.shape == shape
    optimizer.zero_grad()
    assert param.grad is None


@pytest.mark.parametrize(
    "use",
    [
        lambda param: nn.utils.clip_grad_norm_([param], 1.0),
        lambda param: nn.utils.clip_grad_norm_([param], 1.0, foreach=False),
        lambda param: nn.utils.clip_grad_value_([param], 1.0),
        lambda param: param.grad.norm().item(),
        lambda param: param.grad.div_(2),
        lambda param: param.grad.clone(),
    ],
)
def test_whatever_reads_it_raises(use):
    param = nn.Parameter(torch.zeros(4, 5))
    param.grad = UsedGradient(param)
    with pytest.raises(UnsupportedOpError, match="update_in_backward"):
        use(param)


def test_what_is_added_to_it_comes_too_late():
    param = nn.Parameter(torch.zeros(4, 5))
    param.grad = UsedGradient(param)
    with pytest.raises(UnsupportedOpError, match="updated already"):
        param.sum().backward()
