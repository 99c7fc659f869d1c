from __future__ import annotations

import copy
import math
import threading

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.inspect.what_if import WhatIfError, check, compare
from octavo.train import GPT, ModelConfig, next_byte_loss
from tests.support.expert_models import TOKENS, Mixture, batch
from tests.support.helpers import every_layer, to_fp8

WIDTH = 48


class Scale(nn.Module):
    """The first row by a factor."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.cat([x[:1] * self.factor, x[1:]])


def network(outlier=1.0):
    """Four layers; one row of what "4" reads is so many times larger, and divided again behind it: nothing changes."""
    layers = [nn.Linear(32, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    layers += [Scale(outlier), nn.Linear(WIDTH, WIDTH, bias=False), Scale(1 / outlier)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(WIDTH, 8))


def loss(model, batch):
    return (model(batch) - 1).square().mean()


def batches(number=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64, 32, generator=generator) for _ in range(number)]


def compared(model, *chosen, loss=loss, inputs=None, **options):
    return compare(model, loss, inputs or batches(2), chosen or [recipes.dynamic()], select=every_layer, **options)


def effect_of(result, layer, recipe="dynamic"):
    (effect,) = (effect for effect in result.effects if (effect.layer, effect.recipe) == (layer, recipe))
    return effect


def test_the_hostile_layer_is_found_first_and_kept():
    result = compared(network(outlier=2.0**17))
    ranked, rules = result.ranked("dynamic"), result.recipe_map(keep=1).rules
    assert ranked[0].layer == "4" and [name for name, rule in rules.items() if rule is None] == ["4"]
    assert ranked[0].predicted > 10 * ranked[1].predicted
    assert compared(network()).ranked("dynamic")[0].predicted < 0.1 * ranked[0].predicted


@pytest.mark.parametrize("layer", ["0", "2", "7"])
@pytest.mark.parametrize("recipe", [recipes.dynamic(), recipes.mx()], ids=lambda recipe: recipe.name)
def test_effects_are_those_of_a_model_with_one_layer_converted(layer, recipe):
    model, (batch,) = network(), batches(1)
    effect = effect_of(compared(model, recipe, inputs=[batch]), layer, recipe.name)
    gradients, values = [], []
    for select in (lambda module, name: False, lambda module, name: name == layer):
        twin = copy.deepcopy(model)
        if select(None, layer):
            octavo.convert(twin, recipe, select)
        value = loss(twin, batch)
        value.backward()
        values.append(value.detach().double())
        gradients.append(torch.cat([p.grad.double().flatten() for p in twin.parameters()]))
    exact, other = gradients
    assert effect.cosine == pytest.approx(float(exact @ other / exact.norm() / other.norm()), abs=1e-12)
    assert effect.norm_ratio == pytest.approx(float(other.norm() / exact.norm()), abs=1e-12)
    assert effect.loss == pytest.approx(float((values[1] - values[0]) / values[0]), abs=1e-12)
    assert 0 < 1 - effect.cosine < 0.01


def test_products_are_those_of_the_layer_alone():
    model, (x,) = network()[:1], batches(1)
    effect = effect_of(compared(model, inputs=[x]), "0")
    in_fp8 = to_fp8(copy.deepcopy(model), recipes.dynamic())
    results = []
    for twin in (model, in_fp8):
        output = twin(x)
        grad_output = 2 * (model(x).detach() - 1) / output.numel()
        (grad_weight,) = torch.autograd.grad(output, twin[0].weight, grad_output)
        results.append((output.detach().double(), grad_weight.double()))
    for mine, exact, other in zip((effect.output, effect.grad_weight), *results, strict=True):
        assert mine == pytest.approx(float((other - exact).norm() / exact.norm()), rel=1e-6)
    assert math.isnan(effect.grad_input)  # the batch needs no gradient


def test_effects_add_up():
    result = compared(network(), inputs=batches(4))
    whole = result.whole["dynamic"]
    assert sum(1 - effect.cosine for effect in result.effects) == pytest.approx(1 - whole.cosine, rel=0.2)


def test_a_loss_that_is_linear_in_the_output_has_no_curvature():
    result = compared(nn.Sequential(nn.Linear(32, 8)), loss=lambda model, x: (model(x) + 1).mean())
    effect = effect_of(result, "0")
    assert abs(effect.loss) > 1e-6
    assert abs(effect.curvature) < 1e-7


def test_of_few_runs_the_worst_layers_are_measured_and_the_others_estimated():
    model = network(outlier=2.0**17)
    measured, some = compared(model), compared(model, runs=4)  # two layers by two batches
    assert all(effect.measured for effect in measured.effects)
    known = [effect for effect in some.effects if effect.measured]
    assert len(known) == 2 and measured.ranked("dynamic")[0] in known
    for effect in some.effects:
        exact = effect_of(measured, effect.layer)
        assert (effect.output, effect.grad_weight) == (exact.output, exact.grad_weight)
        assert 1 / 5 < (1 - effect.cosine) / (1 - exact.cosine) < 5


def test_maps_of_recipes_with_names_of_ones_own_have_their_losses_and_costs():
    named = {"rowwise": recipes.dynamic(), "dynamic": recipes.rowwise()}
    result = compare(network(), loss, batches(), named, select=every_layer)
    for chosen in (result.recipe_map(keep=1), result.recipe_map(loss=1.0)):
        (name,) = (name for name, recipe in named.items() if recipe == chosen.default)
        losses = {effect.layer: effect.predicted for effect in result.effects if effect.recipe == name}
        saved = {cost.layer: cost.loss for cost in result.costs(chosen)}
        assert saved == {layer: losses[layer] for layer in chosen.rules}
        assert result.predicted(chosen) == pytest.approx(sum(losses.values()) - sum(saved.values()), rel=1e-9)
    with pytest.raises(WhatIfError, match="mx was not compared so: give a map that recipe_map returned"):
        result.predicted(octavo.RecipeMap(recipes.mx()))
    for keep in (1.5, True):
        with pytest.raises(ValueError, match=f"keep={keep}: needs a whole number, at least 0"):
            result.recipe_map(keep=keep)


def test_runs_are_the_most_passes_with_one_layer_alone():
    few = compared(network(), runs=1)  # fewer than a layer by two batches
    assert few.effects and not any(effect.measured for effect in few.effects)
    for runs in (0, -7):
        with pytest.raises(ValueError, match=f"runs={runs}: needs a whole number, at least 1"):
            compared(network(), runs=runs)


def test_delayed_scales_a_batch_by_those_before():
    one = batches(1)
    same = compared(network(), recipes.delayed(), recipes.dynamic(), inputs=one)
    assert effect_of(same, "2", "delayed").cosine == effect_of(same, "2").cosine
    grown = compared(network(), recipes.delayed(), recipes.dynamic(), inputs=[*one, 100 * one[0]])
    assert effect_of(grown, "0", "delayed").output > 5 * effect_of(grown, "0").output
    assert 1 - effect_of(grown, "0", "delayed").cosine > 5 * (1 - effect_of(grown, "0").cosine)


def test_a_gpt_with_its_parts_and_autocast():
    model = GPT(ModelConfig(width=32, layers=1, heads=2, context=16))
    tokens = torch.randint(0, 256, (4, 17))

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return next_byte_loss(model(batch[:, :-1]), batch[:, 1:])

    result = compared(model, loss=loss, inputs=[tokens])
    assert set(result.works) == {
        name for name, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, nn.Embedding)
    }
    for effect in result.effects:
        assert max(effect.output, effect.grad_input, effect.grad_weight) < 0.2
        assert 0.9 < effect.cosine < 1


def shown(value):
    return sorted(value) if isinstance(value, set) else repr(value)


def snapshot(model):
    return {
        name: (
            type(module),
            module.training,
            {key: id(value) for key, value in module._parameters.items()},
            {key: (id(value), value.clone()) for key, value in module._buffers.items() if value is not None},
            {key: id(p.grad) for key, p in module._parameters.items() if p is not None},
            {key: shown(value) for key, value in module.__dict__.items()},
            [repr(value) for value in (module.fp8.recipe, module.fp8.state)] if hasattr(module, "fp8") else None,
        )
        for name, module in model.named_modules()
    }


def test_the_model_is_left_as_it_was():
    delayed = octavo.nn.Linear(WIDTH, WIDTH, recipe=recipes.delayed())
    other = octavo.nn.Linear(WIDTH, WIDTH, recipe=recipes.mx())
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(32, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), delayed, other)
    model.append(nn.Unflatten(0, (4, -1))).append(encoder).append(nn.Linear(WIDTH, 8))
    loss(model, *batches(1)).backward()  # a delayed history
    model[0].weight.grad = None
    model[2].eval()
    gradient = model[3].weight.grad.clone()
    stepped = []
    model[7].weight.register_post_accumulate_grad_hook(stepped.append)
    weights, before, random = (
        {n: p.clone() for n, p in model.named_parameters()},
        snapshot(model),
        torch.get_rng_state(),
    )
    for select in (every_layer, lambda module, name: name in ("0", "3")):
        compare(model, loss, batches(2), [recipes.delayed(), recipes.rowwise()], select=select)
        check(model, loss, batches(1), recipes.blockwise(), select=select)
    after = snapshot(model)
    assert str(after) == str(before)
    for name in before:
        for key, (_, value) in before[name][3].items():
            assert torch.equal(value, after[name][3][key][1])
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    assert torch.equal(gradient, model[3].weight.grad) and torch.equal(random, torch.get_rng_state()) and not stepped


class Counts(nn.Module):
    """It counts its forwards in a tensor that is no buffer, by which it multiplies."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x):
        return x * self.count.add_(1)


def test_so_are_tensors_that_modules_hold_and_each_pass_begins_with_them():
    torch.manual_seed(0)
    plain, counting = network(), Counts()
    results = [compared(model) for model in (plain, nn.Sequential(*plain, counting))]
    assert counting.count == 0 and results[0].rows() == results[1].rows()


def test_it_is_left_so_by_a_loss_that_fails():
    model = network()
    before = snapshot(model)

    def fails(model, batch):
        model(batch)
        raise RuntimeError("out of tokens")

    with pytest.raises(RuntimeError, match="out of tokens"):
        compared(model, loss=fails)
    assert str(snapshot(model)) == str(before)


def test_weights_that_live_in_fp8():
    model = octavo.convert(network(), recipes.dynamic(), every_layer, weight_storage="fp8")
    assert all(0 < 1 - effect.cosine < 0.01 for effect in compared(model).effects)
    with pytest.raises(WhatIfError, match=r"can't read weights that are stored in FP8.*leave rowwise out"):
        compared(model, "rowwise")


def test_a_map_is_measured_as_a_whole():
    """Dropout is the same in each pass."""
    model = network().insert(1, nn.Dropout(0.5))
    result = compared(model)
    assert all(1 - effect.cosine < 0.01 for effect in result.effects)
    whole, checked = result.whole["dynamic"], check(model, loss, batches(2), recipes.dynamic(), select=every_layer)
    assert (checked.loss, checked.cosine, checked.norm_ratio) == (whole.loss, whole.cosine, whole.norm_ratio)
    nothing = octavo.RecipeMap(recipes.dynamic(), {"*": None})
    assert check(model, loss, batches(1), nothing, select=every_layer).cosine == pytest.approx(1, abs=1e-15)
    with pytest.raises(ValueError, match="recipes by layer were compared: compare recipes, to choose among them"):
        compared(model, octavo.RecipeMap(recipes.dynamic(), {"0": None})).recipe_map(keep=1)
    with pytest.raises(ValueError, match="keep=None, loss=nan: give one of them, of at least 0"):
        result.recipe_map(loss=math.nan)


def test_a_layer_that_no_gradient_reaches_has_no_effect():
    model = network()
    model[0].requires_grad_(False)
    result = compared(model)
    assert {effect.layer for effect in result.effects} == {"2", "4", "7"} == result.works.keys()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batches": []}, "batches is empty"),
        ({"recipes": []}, "needs recipes"),
        ({"recipes": [recipes.dynamic(), recipes.dynamic(True)]}, "each of another name"),
        ({"recipes": [recipes.high_precision()]}, "products in FP8"),
        ({"recipes": {"high_precision": recipes.dynamic()}}, "each of another name"),
        ({"recipes": ["dynamic", "dynamic"]}, r"recipes=\['dynamic', 'dynamic'\]: "),
        ({"recipes": "dynamic"}, "recipes is a str: give a list of recipes, or a dict of them by name"),
        ({"recipes": recipes.dynamic()}, "recipes is a Recipe: give a list"),
        ({"select": None}, "no layer to compare.*octavo.convert takes"),
        ({"loss": lambda model, batch: model(batch)}, r"a tensor of shape \(64, 8\): it must be a scalar"),
        ({"loss": lambda model, batch: 1.0}, "gave a float"),
        ({"loss": lambda model, batch: model(batch).sum() * math.nan}, "is nan in high precision"),
        ({"loss": lambda model, batch: torch.ones((), requires_grad=True) * 2}, "no layer took part"),
    ],
)
def test_what_can_not_be_compared(options, says):
    arguments = {"model": network(), "loss": loss, "batches": batches(1), "select": every_layer, **options}
    with pytest.raises(WhatIfError, match=says):
        compare(**arguments)


def test_a_model_that_can_not_be_copied():
    model = network()
    model.lock = threading.Lock()
    with pytest.raises(WhatIfError, match=r"can't be copied .*lock.*: take away"):
        compared(model)


@pytest.mark.parametrize("kind", ["octavo", "stored transposed"])
def test_experts_are_layers(kind: str) -> None:
    """All experts' matrices are one layer each, with the errors of each expert's rows."""
    torch.manual_seed(0)
    net = Mixture(kind, 4, 48)
    kinds, before = [type(module) for module in net.modules()], {n: p.clone() for n, p in net.named_parameters()}
    inputs = [batch(step, 0) for step in range(2)]
    chosen = [recipes.dynamic(), recipes.delayed()]
    comparison = octavo.inspect.compare(net, lambda m, x: m(x).square().mean(), inputs, chosen, select=not_the_router)
    assert [(e.layer, e.recipe) for e in comparison.effects] == [
        (f"experts.{part}", recipe.name) for recipe in chosen for part in ("gate_up", "down")
    ]
    assert all(0.02 < e.output < 0.06 and e.curvature + 1 - e.cosine > 0 and e.measured for e in comparison.effects)
    assert {work.groups for work in comparison.works.values()} == {4}
    assert [work.tokens for work in comparison.works.values()] == [2 * TOKENS] * 2
    assert [type(module) for module in net.modules()] == kinds
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in net.named_parameters())
    octavo.convert(net, comparison.recipe_map(keep=1), not_the_router)
    formats = [net.experts.gate_up.recipe.is_high_precision, net.experts.down.recipe.is_high_precision]
    assert sorted(formats) == [False, True]


def not_the_router(module: nn.Module, name: str) -> bool:
    return name != "router"


def test_a_layer_that_only_its_bias_trains_has_an_output_alone():
    model = network()
    model[0].weight.requires_grad_(False)
    effect = effect_of(compared(model), "0")
    assert effect.output > 0 and math.isnan(effect.grad_input) and math.isnan(effect.grad_weight)
