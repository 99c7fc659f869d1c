"""Weights that others free between forward and backward: no codes stay, and backward has forward's bits."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import octavo
from octavo import recipes
from octavo.errors import UnsupportedOpError
from octavo.kernels import capability
from tests.support.freed import Fsdp, Zero3
from tests.support.helpers import assert_equal, every_layer, gradients, to_fp8

K, T = 64, 32
RECIPES = {
    "dynamic": recipes.dynamic(),
    "delayed": recipes.delayed(history_length=2),
    "rowwise": recipes.rowwise(),
    "no grad_input": octavo.Recipe(output=recipes.dynamic().output, grad_weight=recipes.dynamic().grad_weight),
}


class Transposed(nn.Module):
    """A layer with what octavo.convert asks of transformers' Conv1D: y = x . W + b, W [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = pytest.importorskip("transformers").pytorch_utils.Conv1D(K, K)
        nn.init.normal_(self.layer.weight)

    def forward(self, x):
        return self.layer(x)


def model_of(kind, recipe):
    parts = {
        "linear": lambda: nn.Sequential(nn.Linear(K, 2 * K), nn.GELU(), nn.Linear(2 * K, K, bias=False)),
        "transposed": Transposed,
        "fused": lambda: octavo.nn.RMSNormMLP(K, K, recipe=recipe),
        "experts": lambda: Mixed(recipe),
    }
    return to_fp8(nn.Sequential(parts[kind](), parts[kind]()), recipe)


class Mixed(nn.Module):
    """A model with four experts, each token at two of them."""

    def __init__(self, recipe) -> None:
        super().__init__()
        self.experts = octavo.nn.Experts(4, K, K, recipe=recipe)

    def forward(self, x):
        index = torch.stack([torch.arange(len(x)) % 4, torch.arange(1, len(x) + 1) % 4], 1)
        return self.experts(x, index, x.new_full(index.shape, 0.5))


def trained(model):
    """The gradients of three steps of two forwards, then two backwards; the optimizer moves weights far."""
    gradients_by_step, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        xs = [torch.randn(T, K, generator=torch.Generator().manual_seed(seed)) * (1 + 4 * seed) for seed in (0, 1)]
        ys = [model(x.requires_grad_()) for x in xs]
        for y in ys:
            y.square().mean().backward()
        gradients_by_step |= {f"{step} {name}": value for name, value in gradients(model).items()}
        gradients_by_step |= {f"{step} dx {number}": x.grad for number, x in enumerate(xs)}
        optimizer.step()
        optimizer.zero_grad()
    return gradients_by_step


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["linear", "transposed", "fused", "experts"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("freed", [Fsdp, Zero3])
def test_backward_has_the_bits_of_a_layer_that_keeps_its_codes(kind, recipe, freed):
    model = model_of(kind, RECIPES[recipe])
    twin = copy.deepcopy(model)
    freed(model)
    assert_equal(trained(model), trained(twin))


def saved_bytes(model, *inputs):
    """Return how many bytes of storages with at least a weight's elements are saved, that stay after forward."""
    storages = {}

    def pack(tensor):
        if not hasattr(tensor, "placements"):
            storages[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs).sum()
    of_weights = [one.untyped_storage() for one in storages.values() if one.numel() >= K * K]
    return sum({one._cdata: one.nbytes() for one in of_weights}.values())


@pytest.mark.parametrize("freed", [Fsdp, Zero3])
@pytest.mark.parametrize("kind", ["linear", "transposed"])
def test_nothing_of_a_weight_stays_and_one_warning_names_fsdp2(kind, freed, caplog, monkeypatch):
    monkeypatch.setattr(capability, "_warned", set())
    model = model_of(kind, RECIPES["dynamic"])
    x = torch.randn(4, K, requires_grad=True)
    assert saved_bytes(model, x) >= 2 * K * K
    freed(model)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert saved_bytes(model, x) == saved_bytes(model, x) == 0
    assert len([one for one in caplog.messages if "FSDP2" in one]) == 1


def test_fsdp2_keeps_no_codes_of_a_weight_that_it_gathers_as_it_is(two_ranks, caplog, monkeypatch):
    """Nor does a warning name FSDP2 to those who have it."""
    monkeypatch.setattr(capability, "_warned", set())
    model = nn.Sequential(nn.Embedding(2 * K, K), nn.Linear(K, 2 * K, bias=False))
    model[1].weight = model[0].weight
    fully_shard(to_fp8(model, RECIPES["delayed"]), mesh=two_ranks, reshard_after_forward=True)
    assert model[1].fp8.gather.way(model[1]).kind == "as it is"
    with caplog.at_level(logging.WARNING, "octavo"):
        assert saved_bytes(model, torch.arange(4)) == 0
    assert not [one for one in caplog.messages if "FSDP2" in one]


def test_a_weight_that_nobody_gathered_for_backward_is_an_error():
    model = model_of("linear", RECIPES["dynamic"])
    freed = Fsdp(model)
    y = model(torch.randn(4, K, requires_grad=True))
    freed.gather = lambda held: None
    with pytest.raises(RuntimeError, match="was not gathered for its layer's backward"):
        y.sum().backward()


@pytest.mark.parametrize("by_name", [False, True])
def test_fsdp1_refuses_stored_weights_and_names_fsdp2(two_ranks, by_name):
    model = octavo.convert(nn.Sequential(nn.Linear(K, K)), recipes.dynamic(), every_layer, weight_storage="fp8")
    with pytest.raises(UnsupportedOpError, match=r"FSDP1 and DeepSpeed.*fully_shard \(FSDP2\)"):
        FullyShardedDataParallel(model, use_orig_params=by_name, device_id=torch.device("cpu"))


def test_deepspeed_is_refused_where_it_broadcasts_a_stored_weight_or_gives_it_other_data():
    layer = octavo.convert(nn.Linear(K, K), recipes.dynamic(), every_layer, weight_storage="fp8")
    with pytest.raises(UnsupportedOpError, match="FSDP2"):
        layer.weight.data.view(torch.uint8)
    with pytest.raises(UnsupportedOpError, match="FSDP2"):
        layer.weight.data = torch.empty(0)
