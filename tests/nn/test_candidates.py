import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import octavo
from octavo import recipes
from octavo.nn.candidates import MIN_FEATURES, features, large_enough, reads_of_weights
from tests.support.helpers import every_layer, to_fp8

BIG = MIN_FEATURES


def test_the_default_select():
    sizes = {"both": (BIG, BIG), "thin": (BIG, BIG - 1), "short": (BIG - 1, BIG)}
    net = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    octavo.convert(net, recipes.dynamic())
    assert [name for name, m in net.items() if isinstance(m, octavo.nn.Linear)] == ["both"]
    assert [large_enough(m, name) for name, m in net.items()] == [True, False, False]
    assert features(net["thin"]) == (BIG, BIG - 1)


def test_the_sizes_of_a_layer_whose_weight_lies_in_a_vector():
    """As FSDP1 keeps it."""
    for layer in (nn.Linear(24, 40), Conv1D(40, 24)):
        assert sorted(features(layer)) == [24, 40]
        whole = features(layer)
        layer._parameters["weight"] = nn.Parameter(layer.weight.detach().flatten()[:7])
        assert features(layer) == whole


class Configured(nn.Linear):
    """A layer as torchtitan's Linear: another constructor, and all else is nn.Linear's."""

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
    for copied in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(copied[0], Configured) and isinstance(copied[0], octavo.nn.Linear)
        assert repr(copied[0]) == "Configured(configured, recipe=mx)"
        assert torch.equal(copied(x), plain(x)) and torch.equal(copied[0].scaled(x), plain(x) / 32)
    assert type(octavo.restore(net)[0]) is Configured


class Mixer(nn.Module):
    """dt as Mamba's, qkv as BEiT's, wo as T5's; fc's weight is read for a penalty, and out is called by nobody here."""

    def __init__(self, read):
        super().__init__()
        for name in ("dt", "qkv", "wo", "fc", "out"):
            self.add_module(name, nn.Linear(32, 32))
        self.read = read
        nn.init.normal_(self.out.weight)

    def penalty(self):
        return sum((w.square().sum() for w in (self.fc.weight,)), torch.zeros(()))  # () is an instruction's argument

    def forward(self, x):
        x = (self.dt.weight @ x.mT).mT + self.dt.bias
        if self.read:
            x = F.linear(x, weight=self.qkv.weight, bias=torch.zeros(self.qkv.out_features))
        else:
            x = self.qkv(x)
        if isinstance(self.wo.weight, torch.Tensor) and x.dtype != self.wo.weight.dtype:
            x = x.to(self.wo.weight.dtype)
        return self.fc(self.wo(x)) if x.numel() else self.penalty()


def model(read=True, **options):
    with pytest.warns(UserWarning, match=r"1 layers stay in high precision, first mixer\.dt: a Mixer reads its weight"):
        return octavo.convert(nn.ModuleDict({"mixer": Mixer(read)}), recipes.dynamic(), every_layer, **options)


def test_a_layer_that_is_never_called_is_left_alone():
    net = model()
    assert type(net.mixer.dt) is nn.Linear
    names = {id(module): name for name, module in net.mixer.named_children()}
    called = {names[layer]: reads.is_called for layer, reads in reads_of_weights(net).items()}
    assert called == {"dt": False, "qkv": True, "fc": True}
    with pytest.warns(UserWarning, match=r"converted nothing: a Mixer reads its weight without calling it \(1 such"):
        octavo.convert(nn.ModuleDict({"mixer": Mixer(True)}), recipes.dynamic(), lambda m, name: name == "mixer.dt")


@pytest.mark.parametrize("read", [True, False])
def test_the_summary_counts_what_a_forward_called(read):
    net = model(read)
    assert str(octavo.summary(net)).startswith("2 of 5 matrices in FP8 (40.0 %")
    rows = {row.name: row for row in octavo.summary(net).modules}
    assert rows["mixer.dt"].recipe is None and rows["mixer.dt"].reason == "a Mixer reads its weight without calling it"
    assert rows["mixer.qkv"].reason.endswith("or calls it: octavo.summary(model, *inputs) says which")
    assert rows["mixer.wo"].reason == rows["mixer.out"].reason == ""
    net.forward = net.mixer.forward
    summary = octavo.summary(net, torch.randn(4, 32))
    assert str(summary).startswith(f"{2 if read else 3} of 5 matrices in FP8")
    assert summary.flops[0] == (2 if read else 3) * summary.flops[1] / 4
    reasons = {row.name: row.reason for row in summary.modules if row.recipe is not None and row.reason}
    of_qkv = {"mixer.qkv": "a Mixer reads its weight without calling it"} if read else {}
    assert reasons == of_qkv | {"mixer.out": "a forward in training does not call it"}
    assert (", but a Mixer reads" in str(summary)) is read
    assert octavo.summary(Mixer(read)).modules[1].reason.startswith("32 x 32 features")


def test_a_weight_in_fp8_that_is_read_names_its_layer():
    net = model(weight_storage="fp8")
    assert type(net.mixer.dt.weight) is nn.Parameter
    for _ in range(2):
        with pytest.raises(octavo.UnsupportedOpError, match=r"^mixer\.qkv: aten\..* select=\) leaves the layer out"):
            net.mixer(torch.randn(4, 32))
        net = net.to(torch.bfloat16).float()
    model(read=False, weight_storage="fp8").mixer(torch.randn(4, 32)).sum().backward()
