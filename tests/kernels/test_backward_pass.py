import torch

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
