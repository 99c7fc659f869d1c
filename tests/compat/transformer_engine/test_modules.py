"""Transformer Engine's layers against torch's functions outside of autocast, and octavo's own layers inside."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import octavo
from octavo.compat import transformer_engine as te
from tests.support.compat_tasks import sharded_te_layers

BLOCKS = te.Float8BlockScaling()
ACTIVATIONS = {  # what Transformer Engine's kernels compute
    "gelu": lambda h: F.gelu(h, approximate="tanh"),
    "geglu": lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh") * h.chunk(2, -1)[1],
    "qgelu": lambda h: h * torch.sigmoid(1.702 * h),
    "relu": F.relu,
    "reglu": lambda h: F.relu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "srelu": lambda h: F.relu(h) ** 2,
    "silu": F.silu,
    "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
}


def normed(state, x, normalization):
    if normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], state["layer_norm_weight"], 1e-5)
    return F.layer_norm(x, x.shape[-1:], state["layer_norm_weight"], state["layer_norm_bias"], 1e-5)


def scrambled(layer):
    """A layer whose parameters all count."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    return layer


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_outside_is_what_its_keys_say(activation, normalization):
    layer, x = (
        scrambled(te.LayerNormMLP(16, 24, activation=activation, normalization=normalization)),
        torch.randn(5, 16),
    )
    s = layer.state_dict()
    h = ACTIVATIONS[activation](F.linear(normed(s, x, normalization), s["fc1_weight"], s["fc1_bias"]))
    torch.testing.assert_close(layer(x), F.linear(h, s["fc2_weight"], s["fc2_bias"]))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_norm_and_a_linear_layer_outside(normalization):
    layer = scrambled(te.LayerNormLinear(16, 24, normalization=normalization, return_layernorm_output=True))
    s, x = layer.state_dict(), torch.randn(5, 16)
    output, norm = layer(x)
    torch.testing.assert_close(norm, normed(s, x, normalization))
    torch.testing.assert_close(output, F.linear(norm, s["weight"], s["bias"]))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: octavo.nn.Linear(128, 96), lambda: te.Linear(128, 96)),
        (lambda: octavo.nn.RMSNormLinear(128, 96), lambda: te.LayerNormLinear(128, 96, normalization="RMSNorm")),
        (lambda: octavo.nn.LayerNormMLP(128, 96, "gelu_tanh"), lambda: te.LayerNormMLP(128, 96)),
        (
            lambda: octavo.nn.RMSNormMLP(128, 96, bias=False),
            lambda: te.LayerNormMLP(128, 96, bias=False, normalization="RMSNorm", activation="swiglu"),
        ),
    ],
    ids=["Linear", "RMSNormLinear", "LayerNormMLP", "RMSNormMLP"],
)
def test_inside_they_are_octavos_layers(ours, theirs):
    layer, twin, x = scrambled(theirs()), ours(), torch.randn(32, 128)
    twin.load_state_dict(dict(layer.named_parameters()))
    octavo.set_recipe(twin, BLOCKS.octavo())
    with te.autocast(recipe=BLOCKS):
        found = layer(x, is_first_microbatch=True)
    found.square().mean().backward()
    expected = twin(x)
    expected.square().mean().backward()
    assert torch.equal(found, expected)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, twin.get_parameter(name).grad), name


def test_initialisation():
    for layer in (te.Linear(512, 512), te.LayerNormLinear(512, 512), te.LayerNormMLP(512, 512)):
        for name, value in layer.state_dict().items():
            if name.endswith("bias"):
                assert not value.any(), name
            elif "layer_norm" in name:
                assert (value == 1).all()
            else:
                assert abs(value.std().item() - 0.023) < 2e-4, name
    layer = te.LayerNormMLP(8, 8, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_)
    assert (layer.fc1.weight == 1).all() and not layer.fc2.weight.any()
    assert not te.LayerNormLinear(8, 8, zero_centered_gamma=True).norm.weight.any()
    assert te.Linear(8, 8, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_parameters_are_split_by_names_or_sizes():
    even, sized = te.Linear(8, 6, parameters_split=("a", "b_")), te.Linear(8, 6, parameters_split={"a": 5, "b": 1})
    assert [value.shape[0] for value in even.state_dict().values()] == [3, 3, 3, 3]
    assert [value.shape[0] for value in sized.state_dict().values()] == [5, 1, 5, 1]
    with pytest.raises(octavo.UnsupportedOptionError, match="add up to 6"):
        te.Linear(8, 6, parameters_split={"a": 5})


@pytest.mark.parametrize("change", [octavo.restore, lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
def test_octavos_tools_and_pickles_take_them(change):
    parts = te.Linear(16, 16, parameters_split=("a", "b")), te.LayerNormLinear(16, 16), te.LayerNormMLP(16, 16)
    model, x = nn.Sequential(*parts), torch.randn(5, 16)
    with te.autocast(recipe=BLOCKS):
        model(x).sum().backward()
    expected, state = model(x), model.state_dict()
    other = change(copy.deepcopy(model))
    torch.testing.assert_close(other(x), expected)
    assert other.state_dict().keys() == state.keys()
    other.load_state_dict(state)


@pytest.mark.full
def test_sharded_layers_gather_in_fp8_once_they_know_their_recipe(pool):
    for losses, ways, message in pool.run(sharded_te_layers, (2,)):
        assert ways == {"in FP8"}
        assert losses["sharded"] == pytest.approx(losses["whole"], rel=1e-6)
        assert re.search(r"before fully_shard call octavo\.convert\(model, recipe", message)
