import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.kernels.backward_pass import backward_pass, is_running
from tests.support.passes import end_step

CPU = torch.device("cpu")


class Asks(torch.autograd.Function):
    """Appends what a backward finds to a list."""

    @staticmethod
    def forward(ctx, x, answers):
        ctx.answers = answers
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.answers.append((is_running(), int(backward_pass(CPU)[0])))
        return grad, None


def test_a_pass_has_one_number_and_each_another():
    answers, x = [], torch.ones(2, requires_grad=True)
    for _ in range(2):
        Asks.apply(Asks.apply(x, answers), answers).sum().backward()
    assert not is_running() and all(running for running, _ in answers)
    first, again, second, last = (number for _, number in answers)
    assert first == again != second == last


def test_outside_of_a_backward_each_call_is_a_pass():
    assert len({int(backward_pass(CPU)[0]) for _ in range(3)}) == 3


def test_a_step_of_an_optimizer_notes_the_last_pass_before_it():
    (first, before), (second, still) = backward_pass(CPU).tolist(), backward_pass(CPU).tolist()
    end_step()
    third, noted = backward_pass(CPU).tolist()
    assert before == still < first < second == noted < third
    with FakeTensorMode():  # whose step is of no weight
        end_step()
    assert backward_pass(CPU)[1] == third
