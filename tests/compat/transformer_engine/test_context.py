"""The recipe of the autocast in which a forward runs counts, as in Transformer Engine."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import octavo
from octavo.compat import transformer_engine as te
from octavo.compat.transformer_engine import context

HYBRID, CURRENT = te.DelayedScaling(amax_history_len=4), te.Float8CurrentScaling()


def layer_and_input():
    return te.Linear(32, 48), torch.randn(16, 32)


def twin_of(layer, recipe):
    """Octavo's own layer of the same weights."""
    twin = octavo.nn.Linear(layer.in_features, layer.out_features, recipe=recipe.octavo())
    twin.load_state_dict(layer.state_dict())
    return twin


def test_the_program_of_its_readme():
    """Written for Transformer Engine but for the imports; against octavo's own layer, step by step."""
    from octavo.compat import transformer_engine as te
    from octavo.compat.transformer_engine import recipe

    model = te.Linear(768, 256, bias=True)
    inp = torch.randn(64, 768)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
    twin = twin_of(model, fp8_recipe)
    for _ in range(2):
        with te.autocast(enabled=True, recipe=fp8_recipe):
            out = model(inp)
        out.sum().backward()
        expected = twin(inp)
        expected.sum().backward()
        assert torch.equal(out, expected)
        assert torch.equal(model.weight.grad, twin.weight.grad)
    assert torch.equal(model.delayed_scale, twin.delayed_scale)


def test_outside_a_layer_computes_in_high_precision_and_keeps_its_history():
    layer, x = layer_and_input()
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), plain)
    with te.fp8_autocast(enabled=True, fp8_recipe=HYBRID):
        layer(x).sum().backward()
    history = layer.delayed_amax_history.clone()
    assert history.any()
    assert torch.equal(layer(x), plain)
    with te.autocast(enabled=False):
        layer(x).sum().backward()
    layer.eval()
    with te.autocast(recipe=CURRENT):
        evaluated = layer(x)
    assert torch.equal(evaluated, twin_of(layer, CURRENT).eval()(x))
    assert torch.equal(layer.delayed_amax_history, history)
    assert layer.recipe == HYBRID.octavo()


def test_contexts_nest_and_end_with_an_exception():
    layer, x = layer_and_input()
    with te.autocast(recipe=CURRENT):
        with pytest.raises(ZeroDivisionError), te.autocast(enabled=False):
            assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
            _ = 1 / 0
        assert torch.equal(layer(x), twin_of(layer, CURRENT)(x))
    assert context.Around.recipe.is_high_precision


def test_layers_follow_their_own_context():
    first, x = layer_and_input()
    second = copy.deepcopy(first)
    for _ in range(2):
        with te.autocast(recipe=HYBRID):
            first(x).sum().backward()
        with te.autocast(recipe=te.MXFP8BlockScaling()):
            second(x).sum().backward()
    assert [layer.recipe.name for layer in (first, second)] == ["DelayedScaling", "MXFP8BlockScaling"]
    assert first.delayed_amax_history[0].count_nonzero() == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_forward_is_computed_again_by_its_recipe(use_reentrant):
    model = nn.Sequential(te.LayerNormLinear(32, 64), te.Linear(64, 32))
    kept, x = copy.deepcopy(model), torch.randn(16, 32, requires_grad=True)
    for _ in range(2):
        with te.autocast(recipe=HYBRID):
            again = te.checkpoint(model, x, use_reentrant=use_reentrant)
            once = kept(x)
        again.square().sum().backward()
        once.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, kept.get_parameter(name).grad), name
    with pytest.raises(octavo.UnsupportedOptionError, match=r"torch\.manual_seed"):
        te.checkpoint(model, x, get_rng_state_tracker=print)


def test_weights_that_are_made_in_fp8():
    with te.fp8_model_init(recipe=CURRENT):
        model = nn.Sequential(te.Linear(32, 64), te.LayerNormMLP(64, 64))
    plain = te.Linear(64, 64)
    stored = {name for name, parameter in model.named_parameters() if hasattr(parameter, "qdata")}
    assert stored == {"0.weight", "1.fc1.weight", "1.fc2.weight"} and not hasattr(plain.weight, "qdata")
    optimizer, x = octavo.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(16, 32)
    losses = []
    for _ in range(5):
        with te.autocast(recipe=CURRENT):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    wide = model[0].weight.dequantize()
    assert torch.equal(model[0](x), nn.functional.linear(x, wide, model[0].bias))  # outside: as Transformer Engine
    with te.autocast(recipe=te.MXFP8BlockScaling()), pytest.raises(ValueError, match="can't read weights"):
        model(x)


def test_weights_that_cant_be_stored_say_so():
    with (
        pytest.raises(ValueError, match="can't be stored in FP8"),
        te.quantized_model_init(recipe=te.MXFP8BlockScaling()),
    ):
        te.Linear(32, 32)
    with pytest.raises(octavo.UnsupportedOptionError, match="outside of FP8"), te.quantized_model_init():
        te.Linear(32, 32, parameters_split=("a", "b"))
    with (
        pytest.raises(octavo.UnsupportedOptionError, match="makes masters"),
        te.quantized_model_init(preserve_high_precision_init_val=True),
    ):
        pass
    assert context.Around.storage is None


def test_what_a_context_cant_do():
    for option, match in (("calibrating", "inspect"), ("amax_reduction_group", "carries its scale")):
        with pytest.raises(octavo.UnsupportedOptionError, match=match), te.autocast(**{option: True}):
            pass


@pytest.mark.parametrize("enter", [te.autocast, te.quantized_model_init])
def test_recipes_of_others_are_refused(enter):
    with pytest.raises(TypeError, match=r"take one of octavo\.compat\.transformer_engine"), enter(recipe="delayed"):
        pass


def test_ranks_that_would_share_an_amax_are_told(monkeypatch):
    monkeypatch.setattr(context.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(context.dist, "get_world_size", lambda: 2)
    with pytest.warns(UserWarning, match="write reduce_amax=False"), te.autocast():
        pass
    with te.autocast(recipe=te.DelayedScaling(reduce_amax=False)), te.autocast(recipe=CURRENT):
        pass


@pytest.mark.full
def test_compiled():
    """One graph, of the recipe that it trains by; what runs by another is not compiled."""
    layer, x = te.LayerNormMLP(32, 64), torch.randn(16, 32)
    counter = CompileCounterWithBackend("aot_eager")
    kept, compiled = copy.deepcopy(layer), torch.compile(layer, backend=counter)
    for _ in range(3):
        with te.autocast(recipe=HYBRID):
            found, expected = compiled(x), kept(x)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(found, expected)
        assert torch.equal(layer.fc1.delayed_scale, kept.fc1.delayed_scale)
        assert torch.equal(compiled(x), kept(x))  # outside
    assert counter.frame_count == 1
