"""Experts whose weights live in FP8: each computes and trains as a linear layer whose weight does."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import PerTensor, recipes
from octavo.tensor.stored_weight import StoredWeight
from tests.nn.test_experts import KINDS, E, GroupedExperts, built, results
from tests.support.helpers import assert_equal, every_layer
from tests.support.stored_weights import STORED, of_codes, store

K, N = 160, 288  # blocks are ragged
both = pytest.mark.parametrize("recipe", ["dynamic by powers of two", "blockwise"])  # codes are those of a cast


@pytest.mark.covering(1)
@both
@pytest.mark.parametrize("kind", KINDS)
def test_converted_experts_compute_as_plain_ones_of_their_values(kind: str, recipe: str) -> None:
    stored = store(nn.ModuleDict({"experts": built(kind)}), STORED[recipe]())["experts"]
    for part in stored.parts:
        weight = part.weight_parameter
        assert isinstance(weight, StoredWeight) and isinstance(weight, nn.Parameter)
        assert torch.equal(getattr(stored, f"{part.key}_scale_inv"), weight.scale_inv)
    plain = octavo.convert(nn.ModuleDict({"experts": built(kind)}), STORED[recipe](), every_layer)["experts"]
    expected = results(plain)
    assert_equal(results(stored), expected)
    for copied in (copy.deepcopy(stored), pickle.loads(pickle.dumps(stored))):
        assert_equal(results(copied), expected)
    codes, narrow = stored.down_proj.qdata, copy.deepcopy(stored).bfloat16().down_proj
    assert isinstance(narrow, StoredWeight) and torch.equal(narrow.qdata.view(torch.uint8), codes.view(torch.uint8))
    restored = octavo.restore(of_codes(stored))
    plain.load_state_dict(stored.state_dict())
    assert type(restored) is type(built(kind)) and type(restored.down_proj) is nn.Parameter
    assert_equal(dict(restored.state_dict()), dict(plain.state_dict()))
    with torch.no_grad():
        stored.down_proj.zero_()
    stored.load_state_dict(plain.state_dict())
    assert_equal(results(stored), expected)
    octavo.set_recipe(stored, recipes.high_precision())
    octavo.set_recipe(plain, recipes.high_precision())
    assert_equal(results(stored), results(plain))
    index, x = torch.zeros(3, 1, dtype=torch.int64), torch.randn(3, 32)
    with torch.inference_mode():
        torch.testing.assert_close(stored(x, index, torch.ones(3, 1)), plain(x, index, torch.ones(3, 1)))


def test_what_a_state_dict_holds() -> None:
    layer = store(octavo.nn.GroupedLinear(2, 300, 40, bias=False), recipes.blockwise())
    state = layer.state_dict()
    assert {name: (value.dtype, list(value.shape)) for name, value in state.items()} == {
        "weight": (torch.uint8, [2, 40, 1, 300]),
        "weight_scale_inv": (torch.float32, [2, 1, 3]),
    }
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.zeros(3, 40, 300)})
    with pytest.raises(ValueError, match=r"weight_scale_inv of shape \(1, 3\) does not fit \(2, 40, 300\)"):
        layer.load_state_dict(state | {"weight_scale_inv": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="weight holds FP8 codes, but there is no weight_scale_inv"):
        layer.load_state_dict({"weight": state["weight"]})


def model_of_both() -> nn.Module:
    torch.manual_seed(0)
    experts = octavo.nn.Experts(E, K, N, recipe=recipes.high_precision())
    return nn.ModuleDict({"linear": nn.Linear(K, K, bias=False), "own": experts, "titan": GroupedExperts()}).bfloat16()


@pytest.mark.parametrize(("recipe", "scales"), [("dynamic", (1, 1)), ("blockwise", (2, 3))])
def test_linears_and_experts_take_a_byte_an_element(recipe: str, scales: tuple[int, int]) -> None:
    model = store(model_of_both(), STORED[recipe]())
    weights = list(model.parameters())
    assert len(weights) == 6 and all(isinstance(weight, StoredWeight) for weight in weights)
    assert sum(weight.qdata.nbytes for weight in weights) == sum(p.nbytes for p in model_of_both().parameters()) / 2
    assert model["own"].down.weight.scale_inv.shape == (E, *scales)
    assert model["titan"].w1.granularity == PerTensor() and model["titan"].w1.scale_inv.shape == (E, 1, 1)


@pytest.mark.parametrize("make", [recipes.rowwise, recipes.mx, recipes.rowwise_with_gw_hp])
def test_recipes_that_can_not_store_change_nothing(make: Any) -> None:
    model, recipe = model_of_both(), octavo.RecipeMap(recipes.dynamic(), {"titan.down": make()})
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"^titan.w2: weights can't be stored in FP8 under"):
        store(model, recipe)
    assert type(model["linear"]) is nn.Linear and type(model["titan"]) is GroupedExperts
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with pytest.raises(ValueError, match="can't read weights that are stored in FP8"):
        octavo.set_recipe(store(model), recipe)


def test_some_of_the_experts_matrices() -> None:
    experts = store(GroupedExperts(), octavo.RecipeMap(recipes.dynamic(), {"w3": recipes.high_precision()}))
    assert [isinstance(experts.get_parameter(key), StoredWeight) for key in ("w1", "w3", "w2")] == [True, False, True]
    experts(torch.randn(6, 32), torch.tensor([1, 2, 0, 3])).sum().backward()
