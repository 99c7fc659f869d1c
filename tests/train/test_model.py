import math

import pytest
import torch
from torch import nn

from octavo.train import GPT, ModelConfig, next_byte_loss
from tests.support.helpers import CountOps

SMALL = ModelConfig(width=32, layers=2, heads=2, context=24)


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


def test_its_blocks_compute_as_plain_torch_until_they_get_a_recipe():
    model = GPT(SMALL)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 4 * SMALL.layers + 1
    assert all(module.bias is None for module in linear)
    assert type(model.head) is nn.Linear
    assert all(module.recipe.is_high_precision for module in linear if module is not model.head)
    with CountOps() as ops, torch.autocast("cpu", torch.bfloat16):
        next_byte_loss(model(torch.randint(256, (2, 24))), torch.randint(256, (2, 24))).backward()
    assert not ops.calls
    # what a checkpoint holds are parameters: the rotary tables are made anew
    assert all(name.endswith("weight") for name in model.state_dict())


def test_initial_weights_have_variance_one_by_fan_in():
    config = ModelConfig(width=128, layers=2, heads=2, context=8)
    for name, weight in GPT(config).state_dict().items():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        expected = {"embedding.weight": 1.0, "head.weight": 0.5 * 128**-0.5}.get(name, weight.shape[1] ** -0.5)
        if name.endswith(("out.weight", "fc2.weight")):
            expected /= math.sqrt(2 * config.layers)
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
