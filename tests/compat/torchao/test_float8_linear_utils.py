"""Layers converted by octavo.compat.torchao compute what torchao's own compute on a CPU."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import octavo
from octavo.compat import torchao as ours
from octavo.compat.torchao import float8_linear, float8_linear_utils
from tests.compat.torchao.test_config import RECIPES
from tests.support.helpers import sqnr


def emulated(library, name):
    """Torchao's own CPU products are checked by its emulation, whose products are torch's in the codes' float32."""
    return dataclasses.replace(library.Float8LinearConfig.from_recipe_name(name), emulate=True)


def results(model, x):
    """Return the output and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().mean().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def test_the_filter_is_the_same(theirs):
    sizes = [15, 16, 1024, 1040, 2048, 2064, 4096, 4112]
    for name in ("tensorwise", "rowwise"):
        filters = [library._auto_filter_for_recipe(name, ["head"]) for library in (ours, theirs)]
        for rows in sizes:
            for cols in sizes:
                layer = nn.Linear(cols, rows, device="meta")
                assert len({keep(layer, fqn) for keep in filters for fqn in ["up"]}) == 1, (name, rows, cols)
                assert not filters[0](layer, "lm_head")
        assert not filters[0](nn.Conv1d(2048, 4112, 1, device="meta"), "conv")
    for library in (ours, theirs):
        with pytest.raises(NotImplementedError):
            library._auto_filter_for_recipe("rowwise_with_gw_hp", [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_computes_what_torchaos_computes(theirs, name, dtype):
    """A layer computes what torchao's computes; in bfloat16 without a bias, which octavo adds before it rounds."""
    layer = nn.Linear(64, 48, bias=dtype is torch.float32, dtype=dtype)
    x = torch.randn(2, 16, 64, dtype=dtype)
    models = [
        library.convert_to_float8_training(copy.deepcopy(layer), config=emulated(library, name))
        for library in (ours, theirs)
    ]
    actual, expected = (results(model, x) for model in models)
    if name == "tensorwise" and dtype is torch.float32:
        # torchao multiplies the codes by their scales before it adds up, octavo the sum
        assert min(map(sqnr, actual, expected)) > 120
    elif name == "tensorwise":
        # so a sum that is nearly between two values may be rounded to the other, by the CPU's order
        for f, e in zip(actual, expected, strict=True):
            assert (f != e).float().mean() < 2e-3
            torch.testing.assert_close(f, e, rtol=2**-7, atol=0)
    else:
        for f, e in zip(actual, expected, strict=True):
            assert torch.equal(f, e)


def test_torchaos_own_configuration_is_not_taken_for_ours(theirs):
    with pytest.raises(TypeError, match=r"import Float8LinearConfig from octavo\.compat\.torchao too"):
        ours.convert_to_float8_training(nn.Linear(16, 16), config=theirs.Float8LinearConfig())


@pytest.mark.parametrize(("config", "message"), [("rowwise", r"from_recipe_name\('rowwise'\)"), ({}, "a builtins")])
def test_what_is_no_configuration(config, message):
    with pytest.raises(TypeError, match=message):
        ours.convert_to_float8_training(nn.Linear(16, 16), config=config)


def test_emulation_is_refused_where_fp8_is_native(monkeypatch):
    monkeypatch.setattr(float8_linear_utils, "runs_natively", lambda device: True)
    with pytest.raises(octavo.UnsupportedOptionError, match="train on a CPU"):
        ours.convert_to_float8_training(nn.Linear(16, 16), config=ours.Float8LinearConfig(emulate=True))


def test_chosen_layers_that_stay_as_they_are_are_named():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "up": nn.Linear(32, 32)})
    with pytest.warns(UserWarning, match=r"1 chosen layers stay.*attention.out_proj: a MultiheadAttention reads"):
        ours.convert_to_float8_training(model)
    assert isinstance(model["up"], octavo.nn.Linear) and isinstance(model["up"], float8_linear.Float8Linear)
    assert not isinstance(nn.Linear(8, 8), float8_linear.Float8Linear)
    assert ours.precompute_float8_dynamic_scale_for_fsdp(model) is None  # gathers need no scales in advance
