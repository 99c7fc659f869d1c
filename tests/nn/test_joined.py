"""Layers that read one tensor as one product, beside octavo.nn's module of one matrix, and plain torch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.nn.fused import run_as_one
from octavo.nn.joined import Joined
from octavo.nn.tensor_parallel import FusedParts
from octavo.scaling.delayed import state_of
from tests.support.helpers import every_layer

transformers = pytest.importorskip("transformers")

from tests.support.tiny_models import MODELS, new  # noqa: E402

WIDTH, HIDDEN = 64, 256


def feed_forward(recipe: octavo.Recipe, dtype: torch.dtype = torch.float32) -> Any:
    """Llama's, fused."""
    kind, model, sizes = MODELS["llama"]
    net = new(kind, model, sizes | {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 1})
    return octavo.convert(net.to(dtype), recipe, every_layer, fuse=True).model.layers[0].mlp.train()


def own_of(mlp: Any) -> octavo.nn.RMSNormMLP:
    """Return octavo's module of the same weights; its norm is the one that the test applies to the other's input."""
    octavos = octavo.nn.RMSNormMLP(WIDTH, HIDDEN, eps=1e-6, bias=False, recipe=mlp.down_proj.recipe)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    state = {"norm.weight": torch.ones(WIDTH), "fc1.weight": gate_up, "fc2.weight": mlp.down_proj.weight}
    octavos.load_state_dict(state)
    return octavos.to(mlp.down_proj.weight.dtype)


def weights(mlp: Any) -> list[nn.Parameter]:
    return [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]


@pytest.mark.parametrize("name", ["dynamic", "delayed", "rowwise", "blockwise", "mx"])
def test_a_feed_forward_is_octavos_module_bit_for_bit_over_steps(name: str) -> None:
    mlp = feed_forward(getattr(recipes, name)())
    octavos = own_of(mlp)
    norm = octavo.nn.RMSNorm(WIDTH, 1e-6)  # whose result octavo's module casts from float32, as this one's is
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.3) for one in (mlp, octavos.fc1, octavos.fc2)]
    for step in range(3):
        x = torch.randn(2, 9, WIDTH) * 4**step
        a, b = (x.clone().requires_grad_() for _ in range(2))
        y, expected = mlp(norm(a)), octavos(b)
        y.square().mean().backward()
        expected.square().mean().backward()
        torch.testing.assert_close(y, expected, rtol=0, atol=2e-3 * float(expected.detach().abs().max()))
        joined = torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])
        for one, other in ((joined, octavos.fc1.weight.grad), (mlp.down_proj.weight.grad, octavos.fc2.weight.grad)):
            assert (one - other).norm() <= 0.01 * other.norm()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_are_views_of_one_tensor_and_backward_accumulates() -> None:
    mlp, x = feed_forward(recipes.dynamic(), torch.bfloat16), torch.randn(5, WIDTH, dtype=torch.bfloat16)
    mlp(x).sum().backward()
    gate, up, _ = weights(mlp)
    assert gate.grad.untyped_storage().data_ptr() == up.grad.untyped_storage().data_ptr()
    once = [weight.grad.clone() for weight in (gate, up)]
    mlp(x).sum().backward()
    for weight, grad in zip((gate, up), once, strict=True):
        torch.testing.assert_close(weight.grad, 2 * grad)
    gate.requires_grad_(False)
    mlp.zero_grad()
    mlp(x).sum().backward()
    assert gate.grad is None and torch.equal(up.grad, once[1])


def apart(mlp: Any, x: Tensor) -> bool:
    """Whether gate and up would compute each by itself."""
    assert torch.isfinite(mlp(x)).all()
    return not Joined((mlp.gate_proj, mlp.up_proj)).can_join()


def test_each_layer_is_recorded_with_what_all_read(tmp_path: Path) -> None:
    """The gradient is cast once, for all layers; each one's counts are of all of it."""
    pytest.importorskip("numpy")
    mlp, x = feed_forward(recipes.dynamic()), torch.randn(5, WIDTH, requires_grad=True)
    assert not apart(mlp, x)
    with octavo.inspect.record(mlp, tmp_path, every=1) as recorder:
        mlp(x).sum().backward()
        recorder.step()
    record = octavo.inspect.load(tmp_path)
    counted = {(row.layer, row.role): at for at, row in enumerate(record.rows)}
    elements, amax = record.measures["elements"][0], record.measures["amax"][0]
    for name in ("gate_proj", "up_proj"):
        assert elements[counted[name, "input"]] == 5 * WIDTH and amax[counted[name, "input"]] == x.abs().max().item()
        assert elements[counted[name, "weight"]] == HIDDEN * WIDTH
        assert elements[counted[name, "grad_output"]] == 5 * 2 * HIDDEN


def test_where_someone_looks_on_each_computes_by_itself() -> None:
    mlp, x = feed_forward(recipes.dynamic()), torch.randn(5, WIDTH)
    assert not apart(mlp, x)
    handle = mlp.up_proj.register_forward_hook(lambda *_: None)
    assert apart(mlp, x)
    handle.remove()
    mlp.up_proj.recipe = recipes.rowwise()
    assert apart(mlp, x)
    mlp.up_proj.recipe = mlp.gate_proj.recipe
    mlp.up_proj.eval()
    assert apart(mlp, x)
    mlp.up_proj.train()
    assert not apart(mlp, x)
    nn.utils.parametrizations.weight_norm(mlp.gate_proj)
    assert apart(mlp, x)
    stored = feed_forward(recipes.dynamic())
    octavo.convert(stored, recipes.dynamic(), every_layer, weight_storage="fp8")
    assert apart(stored, x)


def test_blocks_never_have_rows_of_two_layers() -> None:
    gate, up = (octavo.nn.Linear(64, 192, bias=False, recipe=recipes.blockwise()) for _ in range(2))
    assert not Joined((gate, up)).can_join()
    gate.recipe = up.recipe = recipes.mx()
    assert Joined((gate, up)).can_join()
    units = [r.rows_unit for r in (recipes.dynamic(), recipes.rowwise(), recipes.blockwise(), recipes.mx())]
    assert units == [1, 1, 128, 32]


def product(layers: tuple[Any, ...], x: Tensor) -> Tensor:
    """The layers' outputs beside each other, by one product."""
    joined = Joined(layers)
    assert joined.can_join()
    result: Tensor = run_as_one(FusedParts(x, [joined.layer_tensors()]), None, [joined], "", x.dtype)
    return result


def test_a_history_covers_all_layers_whatever_computed_them_before() -> None:
    """A history covers all layers, after one layer alone, a write, a copy, a load: the largest weight isn't clipped."""
    recipe, x = recipes.delayed(), torch.randn(16, WIDTH)
    layers = tuple(octavo.nn.Linear(WIDTH, 32, bias=False, recipe=recipe) for _ in range(2))
    layers[1].weight.detach().mul_(30)
    layers[0](x).sum().backward()  # its history knows nothing of the other's weight
    layers[1](x[:1] * 1e-3).sum().backward()
    assert state_of(layers[0]) is not state_of(layers[1])

    def check() -> None:
        exact = x.double() @ torch.cat([layer.weight for layer in layers]).double().t()
        y = product(layers, x)
        assert (y - exact).norm() < 0.05 * exact.norm()
        assert state_of(layers[0]) is state_of(layers[1])
        y.sum().backward()

    check()
    layers[1].weight.detach().mul_(20)
    check()
    layers = copy.deepcopy(layers)
    check()
    fresh = tuple(octavo.nn.Linear(WIDTH, 32, bias=False, recipe=recipe) for _ in range(2))
    for one, other in zip(fresh, layers, strict=True):
        one.load_state_dict(other.state_dict())
        octavo.nn.load_delayed_state_dict(one, octavo.nn.delayed_state_dict(other))
    assert torch.equal(product(fresh, x), product(layers, x))
    saved = octavo.nn.delayed_state_dict(both := nn.ModuleList(layers))
    layers[0].load_state_dict(layers[0].state_dict())
    octavo.nn.load_delayed_state_dict(both, saved)  # of all layers, between the weights of two
    layers[1].load_state_dict(layers[1].state_dict())
    assert torch.equal(layers[0].delayed_scale, saved["0.delayed_scale"]) and saved["0.delayed_scale"].all()
