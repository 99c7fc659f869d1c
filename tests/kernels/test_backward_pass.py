import pytest
import torch

from octavo import kernels
from octavo.kernels.backward_pass import backward_pass, is_running

CPU = torch.device("cpu")


class Asks(torch.autograd.Function):
    """Appends what a backward finds to a list."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.found.append((is_running(), int(backward_pass(CPU))))
        return grad, None


def test_a_pass_has_one_number_and_each_another():
    found, x = [], torch.ones(2, requires_grad=True)
    for _ in range(2):
        Asks.apply(Asks.apply(x, found), found).sum().backward()
    assert not is_running() and all(running for running, _ in found)
    first, again, second, last = (number for _, number in found)
    assert first == again != second == last


def test_outside_of_a_backward_each_call_is_a_pass():
    assert len({int(backward_pass(CPU)) for _ in range(3)}) == 3


@pytest.mark.parametrize("rolled", [True, False])
def test_the_scales_of_a_pass(rolled):
    """Of the pass that rolled last those of before it, else those that there are."""
    scale, before = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(2, 3, dtype=torch.int32)
    before[1] = torch.tensor([4.0, 5.0, 6.0]).view(torch.int32)
    found = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if rolled:
                before[0] = backward_pass(CPU)
            found.extend(kernels.scales_of_pass(scale, before).tolist())
            return grad

    Reads.apply(torch.ones(1, requires_grad=True)).backward()
    assert found == ([4.0, 5.0, 6.0] if rolled else [1.0, 2.0, 3.0])
