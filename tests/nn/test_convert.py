import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor
from transformers.pytorch_utils import Conv1D

import octavo
from octavo import RecipeMap, recipes
from octavo.nn import convert as convert_file
from octavo.nn import delayed_state_dict
from tests.support.helpers import assert_equal, every_layer, sqnr, stepped, to_fp8


class Block(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size, bias=False)
        self.up_again = self.up  # a second name for the same module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up_again(self.down(self.up(x)))))


class Special(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def legacy_weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


# What makes a layer's weight a result of other parameters.
COMPUTED = {
    "register_parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
    "utils.weight_norm": legacy_weight_norm,
    "utils.spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def with_own_forward() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    return layer


def foreign(weight: torch.Tensor) -> nn.Parameter:
    """Return a parameter as torchao's quantised weights are: a tensor that is wrapped."""
    return nn.Parameter(TwoTensor(weight.detach(), weight.detach().clone()))


def test_in_place_and_everything_stays():
    net = Block()
    net.up.note = "mine"
    called = []
    net.up.register_forward_hook(lambda *_: called.append("forward"))
    net.up.register_full_backward_hook(lambda *_: called.append("backward"))
    net.up.register_buffer("extra", torch.ones(2))
    modules, parameters = dict(net.named_modules()), dict(net.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    assert to_fp8(net, recipes.delayed()) is net
    for step in ("converted", "restored"):
        assert all(module is modules[name] for name, module in net.named_modules())
        assert all(p is parameters[name] for name, p in net.named_parameters())
        assert_equal(dict(net.named_parameters()), values)
        assert net.up is net.up_again
        assert net.up.note == "mine"
        called.clear()
        net(torch.randn(3, 32, requires_grad=True)).sum().backward()
        assert called.count("forward") == called.count("backward") == 2
        assert type(net.up) is (octavo.nn.Linear if step == "converted" else nn.Linear)
        assert ("extra" in net.state_dict().keys().__str__()) is True
        assert octavo.restore(net) is net
    assert type(net.down) is nn.Linear
    assert dict(net.named_buffers()).keys() == {"up.extra"}
    assert repr(net.down) == "Linear(in_features=64, out_features=32, bias=False)"


def test_converting_again_changes_the_recipe_and_adds_layers():
    net = octavo.convert(Block(), recipes.dynamic(), lambda module, name: name == "up")
    octavo.convert(net, recipes.mx(), lambda module, name: name == "down")
    assert (net.up.recipe, net.down.recipe) == (recipes.dynamic(), recipes.mx())
    octavo.convert(net, recipes.rowwise())  # the default chooses all that are converted, of any size
    assert net.up.recipe == net.down.recipe == recipes.rowwise()
    assert octavo.convert(net).up.recipe == octavo.nn.Linear(2, 2).recipe == recipes.default()
    octavo.convert(net, recipes.rowwise())
    with pytest.warns(UserWarning, match=r"converted nothing: select returned False \(\d such, first up\)"):
        octavo.convert(net, recipes.mx(), lambda module, name: False)
    assert net.up.recipe == recipes.rowwise()


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_a_weight_that_is_computed_after_conversion(compute):
    """A computed weight takes recipes, is one matrix of the summary, and stays computed after restore."""
    net, x = to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipes.dynamic()), torch.randn(4, 32)
    compute(net[1])
    for change in (octavo.set_recipe, to_fp8):
        change(net, recipes.mx())
        assert net[0].recipe == net[1].recipe == recipes.mx()
        net(x).sum().backward()
    assert [(m.name, m.kind, m.shape) for m in octavo.summary(net).converted] == [(i, "Linear", (32, 32)) for i in "01"]
    net.eval()
    assert sqnr(net(x), nn.functional.linear(net[0](x), net[1].weight, net[1].bias)) > 15
    restored = octavo.restore(net)
    assert isinstance(restored[1], nn.Linear) and not isinstance(restored[1], octavo.nn.Linear)
    assert torch.equal(restored(x), nn.functional.linear(restored[0](x), restored[1].weight, restored[1].bias))
    if hasattr(restored[1], "parametrizations"):  # torch does not copy the others
        assert torch.equal(copy.deepcopy(restored)(x), restored(x))


def test_a_weight_of_another_library_is_refused_wherever_it_comes_from():
    """A weight of another library is refused where torchao's quantize_ sets it, and where parallelize_module does."""
    layer = to_fp8(nn.Linear(8, 8), recipes.dynamic())
    weight = foreign(layer.weight)
    for put in (setattr, nn.Module.register_parameter, type(layer).register_parameter):
        before = layer.weight
        if put is nn.Module.register_parameter:  # past the door
            put(layer, "weight", weight)
            with pytest.raises(TypeError, match=r"can't read weights that are .*TwoTensor"):
                layer(torch.randn(2, 8))
            with pytest.raises(ValueError, match=r"'mx' can't read weights .*TwoTensor.*octavo\.restore"):
                octavo.set_recipe(layer, recipes.mx())
            layer._parameters["weight"] = before
            continue
        with pytest.raises(ValueError, match=r"'dynamic' can't read weights .*TwoTensor.*octavo\.restore"):
            put(layer, "weight", weight)
        assert layer.weight is before


@pytest.mark.parametrize("call", [octavo.convert, octavo.set_recipe])
@pytest.mark.parametrize(("net", "recipe"), [("model", recipes.dynamic()), (nn.Linear(8, 8), ["dynamic"])])
def test_wrong_arguments(call, net, recipe):
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module|is no octavo\.Recipe"):
        call(net, recipe)


def test_weights_that_can_not_be_stored_in_fp8_change_nothing():
    of_gpt2, computed = Conv1D(32, 32), to_fp8(nn.Linear(32, 32), recipes.dynamic())
    parametrizations.weight_norm(computed)
    for layer, says in ((of_gpt2, "a Conv1D's weight"), (computed, "a weight that is computed from others")):
        net = nn.Sequential(layer, nn.Linear(32, 32))
        kinds = [type(module) for module in net.modules()]
        with pytest.raises(ValueError, match=f"0: {says} can't be stored in FP8: leave it out by select="):
            octavo.convert(net, recipes.mx(), every_layer, weight_storage="fp8")
        assert [type(module) for module in net.modules()] == kinds and type(net[1].weight) is nn.Parameter
    assert computed.recipe == recipes.dynamic()


def test_errors_change_nothing(monkeypatch):
    net = Block()

    def fails_later(module, name):
        if name == "down":
            raise RuntimeError("mine")
        return True

    with pytest.raises(RuntimeError, match="mine"):
        octavo.convert(net, recipes.dynamic(), fails_later)
    assert type(net.up) is nn.Linear
    with pytest.raises(ValueError, match=r"call octavo\.convert"):
        octavo.set_recipe(net, recipes.dynamic())
    to_fp8(net, recipes.mx())
    for wrong in (["dynamic"], "dinamic"):
        with pytest.raises((TypeError, ValueError), match="recipe"):
            octavo.set_recipe(net, wrong)
    last, check = net.down.weight, convert_file.check_readable
    monkeypatch.setattr(convert_file, "check_readable", lambda recipe, w: 1 / 0 if w is last else check(recipe, w))
    for change in (octavo.convert, octavo.set_recipe):
        with pytest.raises(ZeroDivisionError):
            change(net, recipes.dynamic())
        assert type(net.up) is octavo.nn.Linear and net.up.recipe == recipes.mx()


def test_a_subclass_of_octavos_linear():
    class Mine(octavo.nn.Linear):
        pass

    layer = Mine(8, 8)
    octavo.convert(layer, recipes.mx())
    assert type(layer) is Mine
    assert layer.recipe == recipes.mx()
    assert type(octavo.restore(layer)) is nn.Linear


def test_restoring_named_splits_leaves_them_in_high_precision():
    mlp = octavo.nn.RMSNormMLP(8, 12, recipe=recipes.delayed())
    net = nn.Sequential(octavo.nn.Linear(16, {"a": 8, "b": 8}, recipe=recipes.delayed()), nn.Identity(), mlp)
    plain = copy.deepcopy(net)
    octavo.set_recipe(plain, recipes.high_precision())
    keys = list(net.state_dict())
    assert octavo.restore(net) is net
    assert type(net[0]) is type(net[2].fc1) is octavo.nn.Linear and type(net[2].fc2) is nn.Linear
    assert net[0].recipe.is_high_precision and net[2].fc1.recipe.is_high_precision
    assert list(net.state_dict()) == keys
    x = torch.randn(4, 16)
    for a, b in zip(net[0](x), plain[0](x), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(net[2](a), plain[2](b))
    octavo.convert(net, recipes.mx(), select=every_layer)
    assert {m.recipe.name for m in octavo.summary(net).modules} == {"mx"}
    assert type(net[2].fc2) is octavo.nn.Linear


def test_select_sees_module_and_name_of_each_candidate_once():
    net, seen = Block(), []

    def select(module, name):
        seen.append((name, module))
        return name == "down"

    octavo.convert(net, recipes.dynamic(), select)
    assert [name for name, _ in seen] == ["up", "down"]
    assert all(net.get_submodule(name) is module for name, module in seen)
    assert type(net.up) is nn.Linear
    assert type(net.down) is octavo.nn.Linear


def test_what_convert_says_when_it_converts_nothing():
    net = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4), "c": with_own_forward()})
    with pytest.warns(UserWarning, match=r"4 x 8 features; .* 512 on \(2 such, first a\); its forward was .* first c"):
        octavo.convert(net, recipes.dynamic())
    with pytest.warns(UserWarning, match=r"select returned False \(3 such, first a\)"):
        octavo.convert(net, recipes.dynamic(), select=lambda module, name: False)
    with pytest.warns(UserWarning, match=r"a MultiheadAttention reads its weight without calling it \(1 such"):
        octavo.convert(nn.MultiheadAttention(8, 2), recipes.dynamic(), select=lambda module, name: True)
    with pytest.warns(UserWarning, match="the model has no linear layer"):
        octavo.convert(nn.ReLU(), recipes.dynamic())
    with pytest.raises(TypeError, match=r"select=\['a'\] must be a function select\(module, name\) -> bool"):
        octavo.convert(net, recipes.dynamic(), select=["a"])


def test_layers_whose_forward_was_replaced_are_named():
    """Layers whose forward was replaced, as transformers does, are named; not those that select leaves."""

    def model():
        net = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "b", "c")})
        for layer in (net["b"], net["c"]):
            plain = layer.forward
            layer.forward = lambda *args, plain=plain: plain(*args)
        return net

    with pytest.warns(UserWarning, match=r"2 layers stay in high precision, first b: its .* \(transformers' tp_"):
        octavo.convert(model(), recipes.dynamic(), lambda module, name: True)
    with pytest.warns(UserWarning, match="1 layers stay in high precision, first c: its forward was replaced"):
        octavo.convert(model(), recipes.dynamic(), lambda module, name: name != "b")
    octavo.convert(model(), recipes.dynamic(), lambda module, name: name == "a")


@pytest.mark.parametrize("storage", [None, "fp8"])
def test_a_transformer_encoder_computes_with_its_recipe_in_evaluation(storage):
    """A TransformerEncoder, whose plain layers torch computes by a function, computes with its recipe in evaluation."""
    layer = nn.TransformerEncoderLayer(32, 2, dim_feedforward=64, dropout=0.0, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 32)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    plain = copy.deepcopy(net).eval()
    octavo.convert(net, recipes.dynamic(), every_layer, storage)
    wanted = net(x, src_key_padding_mask=padding)
    with torch.no_grad():
        y = copy.deepcopy(net).eval()(x, src_key_padding_mask=padding)
        torch.testing.assert_close(y[~padding], wanted[~padding].detach())
        restored = octavo.restore(net).eval()
        assert vars(restored).keys() == vars(plain).keys() and vars(restored.layers[0]).keys() == vars(layer).keys()
        if storage is None:
            assert torch.equal(restored(x), plain(x))


# --- octavo.using

HIGH = recipes.high_precision()


def trained() -> nn.Module:
    """Return two layers, each with a recipe of its own, after two steps."""
    net = to_fp8(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), RecipeMap(recipes.delayed(4), {"1": recipes.mx()}))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        stepped(optimizer, net(torch.randn(4, 16)).sum())
    return net


def test_they_return_after_an_exception_and_from_a_block_in_a_block():
    net = trained()
    first_recipes, before = [layer.recipe for layer in net], delayed_state_dict(net)
    with pytest.raises(RuntimeError, match="mine"), octavo.using(net, HIGH):
        with octavo.using(net[0], recipes.delayed(4)):
            net(torch.randn(4, 16)).sum().backward()
            assert net[0].delayed_scale.all() and net[1].recipe is HIGH
        assert net[0].recipe is HIGH and not delayed_state_dict(net)
        raise RuntimeError("mine")
    assert all(layer.recipe is recipe for layer, recipe in zip(net, first_recipes, strict=True))
    assert_equal(delayed_state_dict(net), before)


@pytest.mark.parametrize(("recipe", "error"), [("dinamic", ValueError), (None, TypeError)])
def test_a_wrong_recipe_changes_nothing(recipe, error):
    net = trained()
    before = delayed_state_dict(net)
    with pytest.raises(error, match=r"is no (octavo\.Recipe|recipe)"), octavo.using(net, recipe):
        pass
    assert_equal(delayed_state_dict(net), before)
    with pytest.raises(ValueError, match="holds no octavo module"), octavo.using(nn.Linear(2, 2), HIGH):
        pass
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module"), octavo.using(None, HIGH):
        pass


def test_a_backward_of_a_forward_before_the_block_rolls_the_history():
    net, twin = trained(), None
    twin = copy.deepcopy(net)
    x = torch.randn(4, 16)
    loss, same = net(x).sum(), twin(x).sum()
    with octavo.using(net, HIGH):
        loss.backward()
    same.backward()
    assert_equal(delayed_state_dict(net), delayed_state_dict(twin))


@pytest.mark.parametrize("recipe", [HIGH, recipes.delayed(4)], ids=str)
def test_weights_loaded_in_the_block_begin_with_an_empty_history(recipe):
    net = trained()
    with octavo.using(net, recipe):
        net.load_state_dict(trained().state_dict())
    assert not any(state.any() for state in delayed_state_dict(net).values())


def test_weights_written_or_replaced_in_the_block_are_noticed():
    for replace in (False, True):
        layer = trained()[0]
        layer(torch.ones(1, 16))
        with octavo.using(layer, HIGH), torch.no_grad():
            if replace:
                layer.weight = nn.Parameter(layer.weight * 100)
            else:
                layer.weight.mul_(100)
        y = layer(torch.ones(1, 16))
        with octavo.using(layer, recipes.dynamic()):
            torch.testing.assert_close(y, layer(torch.ones(1, 16)), rtol=0.1, atol=1.0)


def test_what_the_block_makes_of_the_model():
    net = trained()
    with octavo.using(net, HIGH):
        octavo.restore(net)
    assert type(net[0]) is nn.Linear and not net[0]._buffers and "fp8" not in net[0].__dict__
    net = trained()
    with octavo.using(net, HIGH):
        twin = pickle.loads(pickle.dumps(net))
    assert twin[0].recipe == HIGH
    with octavo.using(net, HIGH):
        net.to("meta")
    assert all(buffer.is_meta for buffer in net.buffers())
