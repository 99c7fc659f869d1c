"""A state_dict has Transformer Engine's keys, as read in its source (2.20), and loads with them or octavo's."""

import pytest
import torch
from torch import nn

from octavo.compat import transformer_engine as te

NORM = ["layer_norm_weight", "layer_norm_bias"]


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (lambda: te.Linear(8, 6), ["weight", "bias"]),
        (lambda: te.Linear(8, 6, bias=False, parameters_split={"a_": 4, "b": 2}), ["a_weight", "b_weight"]),
        (lambda: te.LayerNormLinear(8, 6), [*NORM, "weight", "bias"]),
        (lambda: te.LayerNormMLP(8, 6), [*NORM, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]),
        (lambda: te.LayerNorm(8), ["weight", "bias"]),
        (lambda: te.RMSNorm(8), ["weight"]),
    ],
)
def test_keys_are_transformer_engines(make, keys):
    torch.manual_seed(0)
    model, other = nn.Sequential(make()), nn.Sequential(make())
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    assert sorted(state) == sorted(f"0.{key}" for key in keys)
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    other.load_state_dict({name: parameter.detach() for name, parameter in model.named_parameters()})  # octavo's keys
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name])


def test_a_missing_key_is_missed():
    layer = te.LayerNormLinear(8, 6)
    state = layer.state_dict()
    del state["layer_norm_weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.weight"):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        layer.load_state_dict({**layer.state_dict(), "other": torch.zeros(1)})


def test_transformer_engines_extra_state_is_named_where_it_holds_anything():
    layer = te.LayerNormMLP(8, 6)
    layer.load_state_dict({**layer.state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)})
    with pytest.warns(UserWarning, match="_extra_state is not read"):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": torch.zeros(9, dtype=torch.uint8)})


def test_weights_in_fp8_keep_their_scales():
    def make():
        with te.quantized_model_init(recipe=te.Float8CurrentScaling()):
            return te.LayerNormLinear(32, 16)

    first, second = make(), make()
    state = first.state_dict()
    assert sorted(state) == ["bias", *sorted(NORM), "weight", "weight_scale_inv"]
    second.load_state_dict(state)
    assert torch.equal(second.linear.weight.dequantize(), first.linear.weight.dequantize())
