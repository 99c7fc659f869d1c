import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from tests.support.helpers import every_layer


@pytest.mark.parametrize("storage", [None, "fp8"])
def test_a_transformer_encoder_computes_with_its_recipe_in_evaluation(storage):
    """Where torch computes plain layers by a function that reads weights and calls no module."""
    layer = nn.TransformerEncoderLayer(32, 2, dim_feedforward=64, dropout=0.0, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 32)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    plain = copy.deepcopy(net).eval()
    octavo.convert(net, recipes.dynamic(), every_layer, storage)
    wanted = net(x, src_key_padding_mask=padding)
    with torch.no_grad():
        found = copy.deepcopy(net).eval()(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found[~padding], wanted[~padding].detach())
        restored = octavo.restore(net).eval()
        assert vars(restored).keys() == vars(plain).keys() and vars(restored.layers[0]).keys() == vars(layer).keys()
        if storage is None:
            assert torch.equal(restored(x), plain(x))
