"""The notes of a step have its forwards and the gradients of their outputs, and leave the training as it is."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numpy")

from octavo.inspect.notes import StepNotes


class TwoOutputs(nn.Module):
    """Returns two tensors that need a gradient, one made of the other, and one that needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"y": y, "twice": 2 * y, "x": x}


def noted(model: nn.Module, before_gradient: Callable[[], None] = lambda: None) -> StepNotes:
    return StepNotes(model, before_gradient, contextlib.nullcontext)


def test_an_output_has_the_gradient_that_it_gets_from_outside() -> None:
    torch.manual_seed(0)
    model, x, begun = TwoOutputs(), torch.randn(3, 8), []
    notes = noted(model, lambda: begun.append(model.layer.weight.grad))
    notes.begin()
    outputs = model(x)
    (outputs["y"].sum() + outputs["twice"].square().sum() / 2).backward()
    (call,) = notes.calls
    y, twice = call.outputs
    torch.testing.assert_close(y.grad, torch.ones(3, 4))
    torch.testing.assert_close(twice.grad, outputs["twice"].detach())
    assert float(twice.product) == pytest.approx(float(outputs["twice"].detach().double().square().sum()))
    assert begun == [None, None]  # called before backward reaches a weight
    again = TwoOutputs()
    again.load_state_dict(model.state_dict())
    plain = again(x)
    (plain["y"].sum() + plain["twice"].square().sum() / 2).backward()
    assert torch.equal(model.layer.weight.grad, again.layer.weight.grad)


def test_an_output_that_is_overwritten_has_no_product() -> None:
    model = TwoOutputs()
    notes = noted(model)
    notes.begin()
    y = model(torch.randn(3, 8))["y"]
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        y.zero_()
    y.sum().backward()
    output, _ = notes.calls[0].outputs
    assert output.product != output.product and torch.equal(output.grad, torch.full((3, 4), 2.0))


def test_only_outer_forwards_between_begin_and_end_are_noted() -> None:
    """A forward that another one calls is part of it; one without gradients is no call."""
    model = TwoOutputs()
    notes = noted(model)
    model(torch.randn(3, 8))
    assert notes.calls == []
    notes.begin()
    with torch.no_grad():
        model(torch.randn(3, 8))
    model(torch.randn(3, 8))
    (call,) = notes.calls
    assert not call.is_before_writes(model)
    with torch.no_grad():
        model.layer.weight.mul_(2)
    assert call.is_before_writes(model)
    notes.end()
    model(torch.randn(3, 8))
    assert notes.calls == [] and not model._forward_hooks and not model._forward_pre_hooks
