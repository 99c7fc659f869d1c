"""The notes of a step have its forwards and the gradients of their outputs, and leave the training as it is."""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numpy")

import octavo
from octavo.inspect.notes import StepNotes, gets_gradient
from octavo.private import pytree


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


def test_a_forward_by_which_a_pipeline_finds_shapes_is_not_noted() -> None:
    """Its input is memory that nobody wrote."""
    pytest.importorskip("torch.distributed.pipelining.stage")
    model = TwoOutputs()
    notes = noted(model)
    notes.begin()

    def _shape_inference(x: Tensor) -> None:  # the name of torch's function
        model(x)

    _shape_inference(torch.empty(3, 8))
    assert notes.calls == []
    model(torch.randn(3, 8))
    assert len(notes.calls) == 1


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
    assert not call.weights_written_since(model)
    with torch.no_grad():
        model.layer.weight.mul_(2)
    assert call.weights_written_since(model)
    notes.end()
    model(torch.randn(3, 8))
    assert notes.calls == [] and not model._forward_hooks and not model._forward_pre_hooks


class Returns(nn.Module):
    """Returns what a function makes of a layer's output."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(8, 8), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


def with_hook(y: Tensor) -> Tensor:
    y.register_hook(lambda grad: 3 * grad)
    return y


def loss_and_view(y: Tensor) -> tuple[Tensor, Tensor]:
    view = y.view(2, 3, 8)
    return view.log_softmax(-1).mean() + view.square().mean(), view


def parts(y: Tensor) -> tuple[Tensor, ...]:
    first, second = y.chunk(2, -1)
    return y, first, second, first * second


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "a view beside its base": lambda y: (y, y.view(-1)),
    "a loss and a view": loss_and_view,
    "views with elements in common": lambda y: (y[:, :5], y[:, 2:]),
    "parts of one node": parts,
    "hidden states": lambda y: {"y": y, "z": [z := y.exp(), z + z.sin()]},
    "a view": lambda y: y.view(2, 3, 8).transpose(0, 1),
    "a tensor twice": lambda y: (y, y),
    "a tensor with a hook": with_hook,
}


def of_first(tensors: list[Tensor]) -> Tensor:
    return tensors[0].square().sum()


def of_all(tensors: list[Tensor]) -> Tensor:
    return torch.stack([(y * (place + 1)).sin().sum() for place, y in enumerate(tensors)]).sum()


def written(tensors: list[Tensor]) -> Tensor:
    before = 2 * tensors[-1].sum()
    with contextlib.suppress(RuntimeError):  # of a node with several results
        tensors[-1][..., :2] = 0
    return before + of_all(tensors)


@pytest.mark.parametrize("loss_of", [of_first, of_all, written])
@pytest.mark.parametrize("case", RESULTS)
def test_a_noted_forward_gives_the_tensors_of_another_and_gradients_that_begin_its_backward(
    case: str, loss_of: Callable[[list[Tensor]], Tensor]
) -> None:
    """Gradients from outside, which begin a second backward of the model, give its weights the same gradients."""
    if (case, loss_of) in (("a loss and a view", written), ("parts of one node", written)):
        pytest.skip("backward needs what is written")
    model, x = Returns(RESULTS[case]), torch.randn(6, 8)
    loss_of(pytree.tree_leaves(model(x))).backward()
    plain = model.layer.weight.grad
    model.zero_grad()
    notes = noted(model)
    notes.begin()
    loss_of(pytree.tree_leaves(model(x))).backward()
    assert torch.equal(model.layer.weight.grad, plain)
    (call,) = notes.calls
    notes.end()
    model.zero_grad()
    again = filter(gets_gradient, pytree.tree_leaves(model(x)))
    pairs = [(y, note.grad) for y, note in zip(again, call.outputs, strict=True) if note.grad is not None]
    torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    torch.testing.assert_close(model.layer.weight.grad, plain)


def test_a_noted_forward_returns_the_very_objects() -> None:
    """A list of the module, a tensor with an attribute, and a tensor whose gradient is asked for."""
    returned: list[Tensor] = []

    def make(y: Tensor) -> list[Tensor]:
        y.aux = y.square().mean()  # type: ignore[attr-defined]
        returned.append(y)
        return returned

    model = Returns(make)
    notes = noted(model)
    notes.begin()
    outputs = model(torch.randn(6, 8))
    assert outputs is returned and len(returned) == 1
    returned[0].retain_grad()
    returned[0].aux.backward()  # type: ignore[attr-defined]
    torch.testing.assert_close(returned[0].grad, returned[0].detach() / 24)


def test_a_second_backward_adds_what_nodes_of_the_forward_add_once() -> None:
    model = TwoOutputs()
    notes = noted(model)
    notes.begin()
    outputs = model(torch.randn(3, 8))
    torch.autograd.grad(outputs["twice"].sum(), outputs["y"], retain_graph=True)  # it stops before the node
    (outputs["y"] + outputs["twice"]).sum().backward()
    y, twice = notes.calls[0].outputs
    torch.testing.assert_close([y.grad, twice.grad], [torch.ones(3, 4), torch.full((3, 4), 2.0)])


def test_copies_of_a_recorded_model_are_not_recorded(tmp_path: Any) -> None:
    """They have no optimizer, note no forwards and count no casts."""
    model = nn.Sequential(octavo.nn.Linear(64, 64))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(16, 64)
    with octavo.inspect.record(model, tmp_path / "record", 1, optimizer=optimizer) as recorder:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            recorder.step()
        torch.save(model, saved := io.BytesIO())
        copies: list[Any] = [copy.deepcopy(model), torch.load(io.BytesIO(saved.getvalue()), weights_only=False)]
        sums = recorder._table.sums.clone()
        for other in copies:
            assert other[0].fp8.observer is None
            hooks = [*other._forward_pre_hooks.values(), *other._forward_hooks.values()]
            assert [hook.call(None) for hook in hooks] == [None, None]
            assert torch.equal(other(x), model(x))
        notes = recorder._twin._notes
        assert len(notes.calls) == 2 and not torch.equal(sums, recorder._table.sums)  # of the model itself
    with_optimizer = io.BytesIO()
    torch.save(optimizer, with_optimizer)
    assert len(saved.getvalue()) < len(with_optimizer.getvalue())
