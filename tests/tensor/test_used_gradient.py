"""What stands for a gradient that is gone: it has a norm and can be dropped; nothing else can be done with it."""

import pytest
import torch
from torch import nn

from octavo import UnsupportedOpError
from octavo.tensor.used_gradient import UsedGradient


def used(*shape):
    param = nn.Parameter(torch.zeros(shape))
    param.grad = UsedGradient(param, torch.tensor(3.0))
    return param


@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (0, 2)])
def test_it_is_dropped_like_any_gradient(shape):
    param = used(*shape)
    optimizer = torch.optim.SGD([param], 0.1)
    optimizer.zero_grad(set_to_none=False)
    assert isinstance(param.grad, UsedGradient) and param.grad.shape == shape
    optimizer.zero_grad()
    assert param.grad is None


@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_norm_is_read_and_a_clip_that_changes_nothing_passes(foreach):
    params = used(4, 5), nn.Parameter(torch.zeros(2))
    params[1].grad = torch.tensor([0.0, 4.0])
    for largest in (float("inf"), 5.1):
        assert nn.utils.clip_grad_norm_(params, largest, foreach=foreach) == 5.0
    assert params[1].grad.tolist() == [0.0, 4.0]
    with pytest.raises(UnsupportedOpError, match="Switch the caller's clipping off"):
        nn.utils.clip_grad_norm_(params, 4.9, foreach=foreach)


@pytest.mark.parametrize(
    "use",
    [
        lambda param: nn.utils.clip_grad_norm_([param], 9.0, norm_type=1.0),
        lambda param: nn.utils.clip_grad_value_([param], 1.0),
        lambda param: param.grad.div_(2),
        lambda param: param.grad.mul_(torch.ones(()) * 0.5),
        lambda param: param.grad.clone(),
        lambda param: param.grad.view(-1),
        lambda param: torch.linalg.vector_norm(param.grad, dim=0),
    ],
)
def test_whatever_else_is_done_with_it_raises(use):
    with pytest.raises(UnsupportedOpError, match="a gradient that is gone"):
        use(used(4, 5))


def test_what_is_added_to_it_comes_too_late():
    with pytest.raises(UnsupportedOpError, match="updated already"):
        used(4, 5).sum().backward()
