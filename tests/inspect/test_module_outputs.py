"""What modules compute of one batch is compared from one run of it to the next."""

import pytest
import torch
from torch import nn

pytest.importorskip("numpy")

from octavo.inspect.module_outputs import ModuleOutputs


def test_tensors_are_compared_with_those_of_the_run_before() -> None:
    """A module that gets another size has no comparison, nor has one that did not run in both; nor their gradients."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
    outputs, x, moved, gradients = ModuleOutputs(model), torch.randn(4, 8), [], []
    for rows, last in ((4, "b"), (4, "b"), (3, "c")):
        with outputs.sampled():
            y = model["a"](x)
            z = model[last](y[:rows])
            z.backward(torch.full_like(z, 1.0 + len(moved)))
        sums = outputs.changes(x.device).sums
        moved.append(sums[:8].view(4, 4))
        gradients.append(dict(zip(outputs.parameters, sums[8:].sqrt().tolist(), strict=True)))
        model.zero_grad()
        with torch.no_grad():
            model["a"].bias += 1
    assert outputs.modules == ["", "a", "b", "c"] and not moved[0].any()
    of_b = float((model["b"].weight.detach().sum(1) ** 2).sum() * 4)
    changes = torch.tensor([[0, 32], [32, of_b], [0, 0]]).double()
    torch.testing.assert_close(moved[1][1:, (0, 2)], changes, rtol=1e-5, atol=0)
    sizes = [x.double().square().sum(), (y - 1).double().square().sum()]
    torch.testing.assert_close(moved[1][1, (1, 3)], torch.stack(sizes), rtol=1e-5, atol=0)
    assert moved[2][1, 2] > 0 and not moved[2][2:].any() and z.shape == (3, 8)
    # of a's bias the gradient doubles; b's are 4 and 8, of 8 numbers; c has none in the run before
    assert gradients[1]["a.bias"][0] * 2 == pytest.approx(gradients[1]["a.bias"][1])
    assert gradients[1]["b.bias"] == pytest.approx([4 * 8**0.5, 8 * 8**0.5])
    assert gradients[0]["b.bias"][0] == 0 == gradients[2]["c.bias"][0] and gradients[2]["a.weight"][0] > 0
    assert not any(module._forward_hooks for module in model.modules())
