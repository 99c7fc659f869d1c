import math

import pytest
import torch
from torch import nn

from octavo.train import GPT, ModelConfig, next_byte_loss
from octavo.train.model import rotary_table, rotate

SMALL = ModelConfig(width=32, layers=2, heads=2, context=24)


def test_rotary_products_depend_on_the_distance_only():
    cos, sin = rotary_table(64, 16)
    query, key = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    queries, keys = (rotate(x.expand(64, 16), cos.double(), sin.double()) for x in (query, key))
    products = queries @ keys.T  # [position of the query, of the key]
    for distance in (0, 1, 7, 30):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-5, atol=1e-5)
    assert products.diagonal(-1)[0] != products.diagonal(1)[0]  # which of them comes first matters


def test_rotary_turns_keep_lengths_and_leave_the_first_position_alone():
    cos, sin = rotary_table(32, 8)
    x = torch.randn(3, 32, 8)
    y = rotate(x, cos, sin)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(y[:, 0], x[:, 0])
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


@pytest.mark.parametrize("position", [0, 5, 22])
def test_no_position_sees_the_next_ones(position):
    model = GPT(SMALL)
    tokens = torch.randint(256, (2, 24), dtype=torch.uint8)
    changed = tokens.clone()
    changed[:, position + 1 :] = torch.randint(256, (2, 23 - position), dtype=torch.uint8)
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, : position + 1], before[:, : position + 1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after[:, position + 1 :], before[:, position + 1 :], atol=1e-3)


def test_each_position_sees_all_before():
    model = GPT(SMALL)
    inputs = model.embedding(torch.randint(256, (1, 24))).detach().requires_grad_()
    model.embedding.forward = lambda tokens: inputs
    model(torch.zeros(1, 24, dtype=torch.int64))[0, -1].sum().backward()
    assert (inputs.grad[0].norm(dim=-1) > 0).all()


def test_it_starts_out_knowing_nothing():
    model = GPT(ModelConfig(width=64, layers=3, heads=2, context=32))
    tokens = torch.randint(256, (8, 33))
    loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(256)) < 0.5


def test_shorter_sequences_and_any_integer_type():
    model = GPT(SMALL)
    tokens = torch.randint(256, (2, 9), dtype=torch.uint8)
    assert model(tokens).shape == (2, 9, 256)
    assert torch.equal(model(tokens), model(tokens.long()))


def test_all_its_products_are_plain_linear_layers():
    linear = [module for module in GPT(SMALL).modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 4 * SMALL.layers + 1
    assert all(type(module) is nn.Linear and module.bias is None for module in linear)
    # what a checkpoint holds are parameters: the rotary tables are made anew
    assert all(name.endswith("weight") for name in GPT(SMALL).state_dict())
