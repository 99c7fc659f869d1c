import copy
import dataclasses
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import octavo
from octavo import E5M2, PerBlock, recipes
from octavo.errors import UnsupportedOpError
from octavo.weights.stored import StoredWeight
from tests.support.helpers import CountOps, assert_equal, every_layer, gradients, sqnr, to_fp8
from tests.support.stored_weights import STORED, H, K, N, T, codes, inputs, net, plain, store, trace, widened

dynamic = recipes.dynamic()


def with_weights(recipe, **change):
    """Return the recipe with other casts of its weights."""
    pair = recipe.output[0], dataclasses.replace(dynamic.output[1], **change)
    return dataclasses.replace(recipe, output=pair, grad_input=pair)


REFUSED = {
    "rowwise": (recipes.rowwise(), "its two layouts have different scales"),
    "mx": (recipes.mx(), "its two layouts have different scales.*; weights that are frozen before can be stored so"),
    "no grad_input": (dataclasses.replace(dynamic, grad_input=None), "a product reads the weight in high precision"),
    "no output": (dataclasses.replace(dynamic, output=None), "a product reads the weight in high precision"),
    "E5M2": (with_weights(dynamic, format=E5M2), "its weights are E5M2, and stored ones E4M3"),
    "small blocks": (
        with_weights(recipes.blockwise(), granularity=PerBlock(64, 64)),
        r"its weights are scaled PerBlock\(64, 64\), and stored ones per tensor or 128 x 128",
    ),
}
each_recipe = pytest.mark.parametrize("recipe", STORED)
both = pytest.mark.parametrize("recipe", ["dynamic", "blockwise"])


@each_recipe
def test_recipes_that_store_weights(recipe):
    model, before = plain(), plain()
    assert octavo.convert(model, STORED[recipe](), select=every_layer, weight_storage="fp8") is model
    granularity = STORED[recipe]().weight_casts.as_is.granularity
    for name in ("0", "2"):
        weight, values = model.get_parameter(f"{name}.weight"), before.get_parameter(f"{name}.weight")
        assert isinstance(weight, StoredWeight) and isinstance(weight, nn.Parameter) and weight.requires_grad
        assert weight.granularity == granularity and weight.dtype == torch.bfloat16 and weight.shape == values.shape
        assert torch.equal(weight.dequantize(), StoredWeight.cast(values, granularity).dequantize())
    assert type(model[0].bias) is nn.Parameter
    x = inputs()
    actual, truth = trace(model, x), trace(before, x)
    assert all(sqnr(actual[name], truth[name]) > 17 for name in truth)
    assert type(model[0].weight.grad) is torch.Tensor and model[0].weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", REFUSED)
def test_recipes_that_cannot_say_why_and_change_nothing(name):
    recipe, reason = REFUSED[name]
    assert StoredWeight.why_not_storable(dynamic) is None
    for wanted in (recipe, octavo.RecipeMap(dynamic, {"2": recipe})):
        model = plain()
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=rf"^[02]: weights can't be stored in FP8 under .*{reason}"):
            store(model, wanted)
        assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear]
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        with pytest.raises(ValueError, match=f"the recipe .* can't read weights that are stored in FP8: {reason}"):
            octavo.set_recipe(store(model), wanted)


def test_layers_in_high_precision_and_those_not_selected_stay_plain():
    model = store(plain(), octavo.RecipeMap(dynamic, {"2": recipes.high_precision()}))
    assert isinstance(model[0].weight, StoredWeight) and type(model[2].weight) is nn.Parameter
    trace(model, inputs())
    model = octavo.convert(plain(), dynamic, lambda module, name: name == "2", "fp8")
    assert type(model[0]) is nn.Linear and isinstance(model[2].weight, StoredWeight)


def test_converted_twice():
    model = net()
    weight, before = model[0].weight, widened(model)[0].weight
    store(model)
    assert torch.equal(model[0].weight.dequantize(), before)
    store(model, recipes.blockwise())  # of what was cast first: it is known to more bits than bf16 has
    assert model[0].weight.granularity == PerBlock(128, 128)
    assert_equal(codes(model), codes(net("blockwise")))
    first = model[0].weight
    octavo.convert(model, recipes.blockwise())  # leaves them as they are
    assert model[0].weight is first is weight and isinstance(first, StoredWeight)
    trace(model, inputs())
    store(to_fp8(plain(), recipes.rowwise()))  # from plain weights of a converted model


@pytest.mark.parametrize("shape", [(128, 128), (40, 100), (300, 200)], ids=str)
@each_recipe
def test_a_weight_that_is_stored_so_already_stays_where_it_is(recipe, shape):
    for layer in (nn.Linear(*shape), octavo.nn.GroupedLinear(3, *shape, recipe=STORED[recipe]())):
        address = store(layer, STORED[recipe]()).weight.qdata.data_ptr()
        store(layer, STORED[recipe]())
        assert layer.weight.qdata.data_ptr() == address


@both
def test_a_weight_is_widened_for_a_product_in_high_precision(recipe):
    """To the values that its codes stand for; its gradient is the plain weight's."""
    model = net(recipe)
    twin, x = widened(model), inputs()
    octavo.set_recipe(model, recipes.high_precision())
    assert_equal(trace(model, x), trace(twin, x))


def test_restored_weights_are_plain():
    model = net()
    model[0].weight.requires_grad_(False)  # which so gives up what its cast rounded away
    values = [model[0].weight.dequantize(), plain()[2].weight]
    octavo.restore(model)
    for module, value in zip((model[0], model[2]), values, strict=True):
        assert type(module) is nn.Linear and type(module.weight) is nn.Parameter and torch.equal(module.weight, value)
    assert not model[0].weight.requires_grad and model[2].weight.requires_grad
    assert "weight_scale_inv" not in " ".join(model.state_dict())


def tied(recipe):
    model = nn.Sequential(nn.Linear(K, K, bias=False), nn.Tanh(), nn.Linear(K, K, bias=False)).bfloat16()
    model[2].weight = model[0].weight
    return store(model, recipe)


def test_tied_weights_stay_tied():
    model = tied(dynamic)
    assert model[0].weight is model[2].weight and isinstance(model[0].weight, StoredWeight)
    x = inputs()
    first, second = trace(copy.deepcopy(model).requires_grad_(False), x), trace(model, x)
    assert torch.equal(first["y"], second["y"]) and list(gradients(model)) == ["0.weight"]
    octavo.restore(model)
    assert model[0].weight is model[2].weight and type(model[0].weight) is nn.Parameter
    model = tied(octavo.RecipeMap(dynamic, {"2": recipes.high_precision()}))
    assert model[0].weight is model[2].weight


def test_weights_tied_across_granularities_change_nothing():
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))
    weight = model[1].weight = model[0].weight
    with pytest.raises(ValueError):
        store(model, octavo.RecipeMap(dynamic, {"1": recipes.blockwise()}))
    assert model[0].weight is weight and type(model[0]) is nn.Linear


def test_a_weight_that_an_embedding_shares_stays_plain():
    model = nn.ModuleDict({"embed": nn.Embedding(N, K), "fc": nn.Linear(K, K), "head": nn.Linear(K, N, bias=False)})
    model["head"].weight = model["embed"].weight
    store(model)
    assert model["head"].weight is model["embed"].weight and type(model["head"].weight) is nn.Parameter
    assert isinstance(model["fc"].weight, StoredWeight)
    model["head"](model["fc"](model["embed"](torch.arange(5)))).sum().backward()
    assert model["embed"].weight.grad is not None


@each_recipe
def test_no_product_casts_a_weight(recipe):
    model, other, x = net(recipe), to_fp8(plain(), STORED[recipe]()), inputs()
    with CountOps() as forward:
        y = model(x)
    with CountOps() as backward:
        y.sum().backward()
    assert forward.casts == 2 and backward.casts == 2  # the inputs', the gradients'
    with CountOps() as ops:
        other(x.clone())  # layers that read one tensor share its cast
    assert ops.casts == 4
    with CountOps() as ops, torch.no_grad():
        model.eval()(x)
    assert ops.casts == 2


FUSED = {
    "LayerNormLinear": lambda **o: octavo.nn.LayerNormLinear(K, H, **o),
    "RMSNormLinear of splits": lambda **o: octavo.nn.RMSNormLinear(K, {"query": 128, "value": 32}, **o),
    "LayerNormMLP": lambda **o: octavo.nn.LayerNormMLP(K, H, **o),
    "RMSNormMLP": lambda **o: octavo.nn.RMSNormMLP(K, H, "gelu", **o),
    "SelfAttention": lambda **o: octavo.nn.SelfAttention(K, 5, **o),
    "TransformerBlock": lambda **o: octavo.nn.TransformerBlock(K, H, 5, **o),
}


@pytest.mark.parametrize("recipe", ["dynamic by powers of two", "blockwise"])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_modules(kind, recipe):
    recipe_of_module = STORED[recipe]()
    module = FUSED[kind](recipe=recipe_of_module, dtype=torch.bfloat16)
    other, x = copy.deepcopy(module), inputs(2, T, K)
    store(module, recipe_of_module)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, StoredWeight):
            other.get_parameter(name).data.copy_(parameter.dequantize())
    assert any(isinstance(parameter, StoredWeight) for parameter in module.parameters())

    def call(module):
        return lambda x: torch.cat([y.flatten() for y in ys]) if isinstance(ys := module(x), tuple) else ys

    assert_equal(trace(module, x, call(module)), trace(other, x, call(other)))


@both
def test_frozen_weights_take_a_byte_and_pass_gradients_on(recipe):
    model, x = net(recipe), inputs()
    expected = trace(model, x)["dx"]
    model.zero_grad()
    model.requires_grad_(False)
    assert torch.equal(trace(model, x)["dx"], expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    for weight in (model[0].weight, model[2].weight):
        storages = [value.untyped_storage() for value in vars(weight).values() if isinstance(value, torch.Tensor)]
        assert sum(each.nbytes() for each in storages) == weight.numel() + 4 * weight.scale_inv.numel()
    with pytest.raises(ValueError, match="empty parameter list"):
        octavo.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])


def test_a_recipe_or_storage_that_is_refused_changes_nothing():
    model = octavo.set_recipe(net(), recipes.delayed())
    with pytest.raises(ValueError, match=r"reads weights scaled PerBlock\(128, 128\), but they are stored PerTensor"):
        octavo.set_recipe(model, recipes.blockwise())
    for change in (octavo.set_recipe, octavo.convert):
        with pytest.raises(ValueError, match="can't read weights"):
            change(model, octavo.RecipeMap(recipes.dynamic(), {"2": recipes.rowwise()}))
    assert [model[0].recipe.name, model[2].recipe.name] == ["delayed", "delayed"]
    octavo.set_recipe(store(nn.Linear(128, 128)), recipes.blockwise())  # one block is all
    with pytest.raises(ValueError, match="weight_storage='int8': use 'fp8' or None"):
        octavo.convert(plain(), dynamic, weight_storage="int8")


def test_a_move_keeps_the_parameter_its_attributes_hooks_and_gradient():
    model, calls = net(), []
    weight = model[0].weight
    weak = weakref.ref(weight)
    weight.group = "attention"
    weight.register_hook(lambda gradient: calls.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(param is weight))
    trace(model, inputs())
    calls.clear()
    for move in (nn.Module.float, lambda model: model.to("meta"), lambda model: model.to_empty(device="cpu")):
        move(model)
        assert weak() is model[0].weight and weight.group == "attention"
        assert weight.dtype == weight.grad.dtype == torch.float32 and weight.grad.device == weight.device
    weight.detach().normal_()
    trace(model, inputs(dtype=torch.float32))
    assert calls == ["gradient", True]


def test_a_copy_keeps_nothing():
    layer = octavo.nn.Linear(K, N)
    octavo.nn.KeptWeights(layer).cast()
    other = copy.deepcopy(layer)
    assert layer.fp8.kept_operands is not None and other.fp8.kept_operands is None
    assert other.fp8.weight_writes is not layer.fp8.weight_writes


@pytest.mark.parametrize("how", ["functional_call", "weight_norm", "prune"])
def test_a_weight_that_is_not_what_its_history_is_of_takes_its_own_amax(how):
    """A plain tensor in a parameter's place, or one computed of parameters that were loaded."""
    layer, x = octavo.nn.Linear(64, 64, bias=False, recipe=recipes.delayed()), torch.randn(16, 64)
    if how == "weight_norm":
        parametrizations.weight_norm(layer)
    elif how == "prune":
        prune.l1_unstructured(layer, "weight", 0.3)
    for _ in range(2):
        layer(x).square().mean().backward()
    history, weight, weights = layer.delayed_amax_history.clone(), 50 * layer.weight.detach(), {}
    if how == "functional_call":
        weights["weight"] = weight
    else:
        key = "original0" if how == "weight_norm" else "weight_orig"
        layer.load_state_dict({name: v * 50 if key in name else v for name, v in layer.state_dict().items()})
    y = torch.func.functional_call(layer, weights, (x.requires_grad_(),))
    assert sqnr(y.detach(), x.detach().double() @ weight.double().t()) > 25
    torch.autograd.grad(y.sum(), x)
    if how == "functional_call":
        assert torch.equal(layer.delayed_amax_history[1], history[1])


@pytest.mark.parametrize(
    "parametrize", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal, "delete"]
)
def test_a_stored_weight_stays_a_parameter(parametrize):
    layer = octavo.convert(nn.Linear(K, K), recipes.dynamic(), select=every_layer, weight_storage="fp8")
    x = torch.randn(4, K)
    before = layer(x)
    with pytest.raises(UnsupportedOpError, match=r"octavo.restore\(layer\) first"):
        delattr(layer, "weight") if parametrize == "delete" else parametrize(layer)
    assert torch.equal(layer(x), before)
    assert torch.isfinite(nn.utils.parametrizations.weight_norm(octavo.restore(layer))(x)).all()


def test_a_trace_of_torch_jit_is_refused():
    layer = octavo.convert(nn.Linear(32, 32), recipes.dynamic(), every_layer, weight_storage="fp8").eval()
    says = r"torch\.jit\.trace can't hold a weight that lives in FP8: use torch\.export"
    with torch.no_grad(), warnings.catch_warnings(action="ignore"), pytest.raises(UnsupportedOpError, match=says):
        torch.jit.trace(layer, torch.randn(2, 32), check_trace=False)


def test_a_library_that_makes_a_stored_parameter_anew_is_told_what_to_do():
    """accelerate's set_module_tensor_to_device calls the parameter's class with one tensor."""
    weight = octavo.convert(nn.Linear(K, K), recipes.dynamic(), select=every_layer, weight_storage="fp8").weight
    with pytest.raises(UnsupportedOpError, match=r"cpu_offload.*octavo\.restore\(model\)"):
        type(weight)(weight.data.to("meta"), requires_grad=False)
