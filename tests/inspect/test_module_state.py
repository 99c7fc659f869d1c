"""What a model's modules hold is put back: the very objects, with their contents, or copies of an earlier moment."""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import nn

import octavo

np = pytest.importorskip("numpy")

from octavo.inspect import module_state  # noqa: E402
from octavo.inspect.module_state import ModuleState  # noqa: E402


class Holder(nn.Module):
    """State in every place that a module may have it."""

    mask: torch.Tensor
    made: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1).expand(4))
        with torch.inference_mode():
            self.register_buffer("made", torch.ones(4))
        self.whole, self.count = torch.zeros(4), 0
        self.view = self.whole[:2]
        self.hidden = [nn.BatchNorm1d(4)]
        self.numbers: dict[str, Any] = {
            "ordered": OrderedDict(n=0),
            "default": defaultdict(int),
            "counter": Counter("aab"),
        }
        self.numbers |= {"deque": deque([torch.zeros(4)], maxlen=2), "nested": [[0], ({0},)]}
        self.generators = torch.Generator(), random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
        self.freed = torch.zeros(4)
        self.freed.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of_torch, of_python, *of_numpy = self.generators
        y = x * (self.mask + self.made + self.whole) + torch.rand(4, generator=of_torch) + of_python.random()
        y = self.hidden[0](y + sum(float(one.random()) for one in of_numpy)) + sum(self.numbers["deque"])
        y = y + self.numbers["nested"][0][0] + self.numbers["counter"]["a"] + len(self.numbers["nested"][1][0])
        self.view.add_(1)
        self.made = self.made.clone() * 2
        self.count += 1
        for name in ("ordered", "default", "counter"):
            self.numbers[name]["a"] = self.numbers[name].get("a", 0) + 1
        self.numbers["deque"].append(y.detach())
        self.numbers["nested"][0][0] += 1
        self.numbers["nested"][1][0].add(self.count)
        return y * self.count


def held(model: Holder) -> list[Any]:
    """Return all that the model has, as values."""
    tensors = [model.mask, model.made, model.whole, model.view, *model.numbers["deque"], *model.hidden[0].buffers()]
    numbers = [repr(value) for value in (*model.numbers.values(), model.count, model.hidden[0].training)]
    states = [module_state._setter_and_state(one)[1] for one in model.generators[1:]]
    return [*(x.tolist() for x in tensors), *numbers, str(states), model.generators[0].get_state().tolist()]


def test_modules_have_their_own_objects_back() -> None:
    """With the contents that they had; forwards in between wrote copies, whose views are of each other."""
    model = Holder()
    before, ids, version = (
        held(model),
        [id(x) for x in (model.made, model.whole, model.hidden[0])],
        model.whole._version,
    )
    state = ModuleState(model)
    state.put_copies()
    model(torch.randn(3, 4))
    assert model.whole.tolist() == [1, 1, 0, 0] and held(model) != before
    state.put_back()
    assert held(model) == before and model.whole._version == version
    assert ids == [id(x) for x in (model.made, model.whole, model.hidden[0])] and isinstance(
        model.numbers["counter"], Counter
    )


@pytest.mark.parametrize("most", [module_state.LARGEST_COPY, 0])
def test_a_forward_begins_with_what_it_had(most: int) -> None:
    """As often as it runs, and whatever ran since; large tensors are not copied, and have what was written to them."""
    model, x = nn.Sequential(octavo.nn.Linear(4, 4), Holder()), torch.randn(3, 4)
    state, expected = ModuleState(model, before_forward=True, most_bytes=most), model(x)
    handle, fp8 = model[1].register_forward_hook(lambda *_: None), model[0].fp8
    for _ in range(2):
        model(x)
        model.eval()
        state.put_copies()
        assert not model.training and len(model[1]._forward_hooks) == 1 and model[0].fp8 is fp8
        assert torch.equal(model.train()(x), expected) == bool(most)
    handle.remove()
