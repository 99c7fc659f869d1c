import copy
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.nn.candidates import MIN_FEATURES, features, large_enough
from tests.support.helpers import to_fp8
from tests.support.left_alone import LEFT_ALONE

BIG = MIN_FEATURES


def test_the_default_select():
    net = nn.ModuleDict(
        {
            "both": nn.Linear(BIG, BIG),
            "thin": nn.Linear(BIG, BIG - 1),
            "short": nn.Linear(BIG - 1, BIG),
        }
    )
    octavo.convert(net, recipes.dynamic())
    assert [name for name, m in net.items() if isinstance(m, octavo.nn.Linear)] == ["both"]
    assert [large_enough(m, name) for name, m in net.items()] == [True, False, False]
    assert features(net["thin"]) == (BIG, BIG - 1)


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_left_alone(kind):
    net = nn.Sequential(LEFT_ALONE[kind]())
    classes = {name: type(m) for name, m in net.named_modules()}
    with pytest.warns(UserWarning, match=r"converted nothing: \S"):
        to_fp8(net, recipes.dynamic())
    assert {name: type(m) for name, m in net.named_modules()} == classes
    assert octavo.summary(net).converted == ()


class Configured(nn.Linear):
    """As torchtitan's Linear: another constructor, and all else is nn.Linear's."""

    def __init__(self, config):
        super().__init__(config["size"], config["size"], bias=False)
        self.config = config

    def scaled(self, x):
        return self(x) / self.config["size"]

    def extra_repr(self):
        return "configured"


def test_subclasses_that_compute_as_linear_are_converted():
    net, x = nn.Sequential(Configured({"size": 32})), torch.randn(4, 32)
    plain = to_fp8(nn.Sequential(nn.Linear(32, 32, bias=False)), recipes.mx())
    plain.load_state_dict(net.state_dict())
    to_fp8(net, recipes.mx())
    copies = [net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    for found in copies:
        assert isinstance(found[0], Configured) and isinstance(found[0], octavo.nn.Linear)
        assert repr(found[0]) == "Configured(configured, recipe=mx)"
        assert torch.equal(found(x), plain(x)) and torch.equal(found[0].scaled(x), plain(x) / 32)
    assert type(octavo.restore(net)[0]) is Configured
