import copy
import dataclasses
import inspect
import itertools
import json
import pickle
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import octavo
from octavo import E2M1, E4M3, E5M2, Delayed, Dynamic, PerBlock, PerRow, PerTensor, Recipe, RecipeMap, recipes
from octavo.scaling.recipe import PRODUCTS, under
from tests.support.damage import damaged_json
from tests.support.seams.features import FEATURES
from tests.support.triton_kernels import in_place_of_reference

ALL = {name: getattr(recipes, name) for name in recipes.NAMED}


def test_tables_and_pages_name_every_recipe_and_no_other():
    assert ALL.keys() - {"high_precision"} <= FEATURES.keys()
    for page in ("docs/quickstart.md", "docs/guides/which-recipe.md", "docs/reference/recipes.md"):
        text = (Path(__file__).parents[1] / page).read_text(encoding="utf-8")
        assert {name for name in ALL if f"recipes.{name}" not in text and f"`{name}(" not in text} == set(), page
        names = re.findall(r"\brecipes\.(\w+)\(", text) + re.findall(r"^\| `(\w+)\(\)` \|", text, re.MULTILINE)
        assert [name for name in names if not hasattr(recipes, name)] == [], page
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in ALL if not re.search(rf"(`|recipes\.){name}(`|\()", changelog)] == [], (
        "CHANGELOG.md names each recipe"
    )


def test_the_page_has_the_formats_of_gradients():
    text = (Path(__file__).parents[1] / "docs/guides/which-recipe.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| formats \| (.+) \|$", text, re.MULTILINE)
    default, e5m2, e2m1 = row.split("; ")
    gradients = {name: (make().grad_input, make().grad_weight) for name, make in ALL.items() if make().grad_input}
    formats = {name: grad_input[0].format for name, (grad_input, _) in gradients.items()}
    assert all(
        grad_weight is None or grad_weight[0].format is formats[name] for name, (_, grad_weight) in gradients.items()
    )
    assert default == "E4M3"
    for text, format in ((e5m2, E5M2), (e2m1, E2M1)):
        assert text.startswith(format.name.upper())
        assert {*re.findall(r"`(\w+)\(\)`", text)} == {name for name in formats if formats[name] is format}


@pytest.mark.parametrize("name", ALL)
def test_every_recipe_is_a_frozen_printable_value(name):
    recipe = ALL[name]()
    assert recipe.name == name and recipe.is_high_precision == (name == "high_precision")
    assert [other for other in ALL if ALL[other]() == recipe] == [name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.output = None
    lines = str(recipe).splitlines()
    assert lines[0] == f"{name}:"
    assert [line.split()[0] for line in lines[1:]] == list(PRODUCTS)
    for other in (ALL[name](), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other == recipe and hash(other) == hash(recipe) and str(other) == str(recipe)
        assert other.input_casts == recipe.input_casts
        assert other.output is None or other.output[0].format is (E2M1 if name == "nvfp4" else E4M3)


@pytest.mark.parametrize(
    ("name", "input", "weight", "grad_output", "gradient_format", "powers", "once"),
    [
        ("dynamic", PerTensor(), PerTensor(), PerTensor(), E5M2, False, (True, True, True)),
        ("delayed", PerTensor(), PerTensor(), PerTensor(), E5M2, False, (True, True, True)),
        ("rowwise", PerRow(), PerRow(), PerRow(), E4M3, False, (False, False, False)),
        ("blockwise", PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 128), E4M3, True, (False, True, False)),
        ("mx", PerBlock(1, 32), PerBlock(1, 32), PerBlock(1, 32), E4M3, True, (False, False, False)),
    ],
)
def test_granularities_formats_and_what_is_cast_once(name, input, weight, grad_output, gradient_format, powers, once):
    """Scales are powers of two where the format or the source says so."""
    recipe = ALL[name]()
    for casts, granularity in zip(roles(recipe), (input, weight, grad_output), strict=True):
        assert casts.as_is.granularity == casts.transposed.granularity == granularity
    assert {c.format for c in recipe.input_casts[:2] + recipe.weight_casts[:2]} == {E4M3}
    assert {c.format for c in recipe.grad_output_casts[:2]} == {gradient_format}
    assert {cast.power_of_two for cast in (*recipe.output, *recipe.grad_weight)} == {powers}
    assert tuple(casts.coincide for casts in roles(recipe)) == once


def test_scales_are_powers_of_two_where_they_are_asked_for():
    asked = {name for name, make in ALL.items() if "power_of_two" in inspect.signature(make).parameters}
    assert {"blockwise", "dynamic", "rowwise"} <= asked
    for name, powers in itertools.product(asked, (False, True)):
        products = [getattr(ALL[name](power_of_two=powers), product) for product in PRODUCTS]
        assert {cast.power_of_two for casts in products if casts is not None for cast in casts} == {powers}, name


def test_a_head_with_its_output_in_high_precision():
    """Loss and logits are torch's, bit for bit; gradients have FP8's error, and are not torch's."""
    torch.manual_seed(0)
    rules = {"default": "delayed", "rules": {"head": "dynamic_with_output_hp"}}
    model = nn.ModuleDict({"head": nn.Linear(64, 160, bias=False)}).bfloat16()
    plain = copy.deepcopy(model)["head"]
    octavo.convert(model, recipes.as_recipe(rules), lambda *_: True)
    x, targets = torch.randn(48, 64).bfloat16(), torch.randint(160, (48,))
    losses, logits, inputs = [], [], [x.clone().requires_grad_() for _ in range(2)]
    for layer, leaf in zip((model["head"], plain), inputs, strict=True):
        logits.append(layer(leaf))
        losses.append(nn.functional.cross_entropy(logits[-1].float(), targets))
        losses[-1].backward()
    assert torch.equal(*logits) and torch.equal(*losses)
    for ours, theirs in ([leaf.grad for leaf in inputs], [model["head"].weight.grad, plain.weight.grad]):
        error = (ours - theirs).float().norm() / theirs.float().norm()
        assert 0.01 < error < 0.08, error  # a code of E5M2 is off by at most 1/8, of E4M3 by 1/16


def mx_pairs(x, format, mode):
    """Return octavo's exponents and codes of 1x32 blocks, and torchao's."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    ours = octavo.quantize(x, format, PerBlock(1, 32), power_of_two=True)
    exponents, codes = mx_tensor.to_mx(x, format.dtype, 32, mx_tensor.ScaleCalculationMode(mode))
    assert ours.scale_inv.dtype == exponents.dtype == torch.float8_e8m0fnu
    return [each.view(torch.uint8) for each in (ours.scale_inv, ours.qdata, exponents, codes)]


def test_mx_codes_and_scales_are_torchaos():
    """MX codes and scales are torchao's by RCEIL, cuBLAS's rule too; the OCP's FLOOR has some halves, and clips."""
    halves, shapes = 0, ((8, 64), (1, 32), (17, 96), (3, 5, 64), (0, 32))
    for number in range(400):
        shape, format = shapes[number // 10 % 5 if number % 10 else 0], (E4M3, E5M2)[number % 2]
        x = torch.randn(shape) * torch.exp2(torch.randint(-110, 125, (*shape[:-1], 1)))
        x.view(-1, 32)[number % 8 :: 16] = 0  # then ours is 1, theirs 2^-127, and codes are 0
        x = x.bfloat16() if number % 3 else x
        exponents, codes, theirs, their_codes = mx_pairs(x, format, "rceil")
        expected = torch.where(x.unflatten(-1, (-1, 32)).any(-1), theirs, theirs + 127)
        assert torch.equal(exponents, expected) and torch.equal(codes, their_codes)
        if number % 10 == 0:
            _, _, floors, floored = mx_pairs(x, format, "floor")
            is_half = theirs != floors
            alike = ~is_half.repeat_interleave(32, 1)
            assert torch.equal(floors[is_half], theirs[is_half] - 1) and torch.equal(codes[alike], floored[alike])
            halves += int(is_half.sum())
    assert 80 < halves < 140  # of 600, whose amax is above 1.75 times its power of two


def test_where_mx_is_not_torchaos():
    """MX differs from torchao's for the reasons in docs/concepts/overview.md."""
    x = torch.ones(4, 32)
    x[:, 0] = torch.tensor([1e-40, torch.inf, torch.nan, 7.0000005])
    x[0] = 1e-40
    exponents, codes, theirs, their_codes = mx_pairs(x, E4M3, "rceil")
    assert (exponents.flatten().tolist(), theirs.flatten().tolist()) == ([1, 119, 119, 122], [0, 254, 255, 121])
    values = [pair.view(E4M3.dtype)[:, :2].tolist() for pair in (codes, their_codes)]
    assert str(values[0]) == "[[0.0078125, 0.0078125], [nan, 256.0], [nan, 256.0], [224.0, 32.0]]"
    assert str(values[1]) == "[[0.0, 0.0], [448.0, 0.0], [nan, nan], [448.0, 64.0]]"


def test_delayed_arguments():
    recipe = recipes.delayed(history_length=3, reduce="most_recent", margin=2)
    assert recipe.delayed == Delayed(3, "most_recent")
    assert {cast.margin for pair in roles(recipe) for cast in pair[:2]} == {2}
    assert recipe.delayed_update == ((448.0, 448.0, 57344.0), (False,) * 3, (2,) * 3, "most_recent")
    assert recipes.dynamic().delayed is None
    assert {cast.rule for pair in roles(recipes.mx()) for cast in pair[:2]} == {Dynamic()}


def test_recipes_by_layer_are_a_file(tmp_path):
    saved = dataclasses.replace(recipes.blockwise(), saved=recipes.dynamic().output[0], fast_accum=())
    changes = {"grad_weight": None, "output": recipes.rowwise().output, "fast_accum": ("output",), "saved": None}
    rules = {"head": None, 'x[[]0]"é': recipes.delayed(4, "most_recent", margin=2), "*.fc2": changes, "last": saved}
    rules |= {name: make() for name, make in ALL.items()}
    path = tmp_path / "map.json"
    for default in (recipes.dynamic(), recipes.delayed(history_length=3)):
        path.write_text(recipes.to_json(octavo.RecipeMap(default, rules)))
        loaded = recipes.load(path)
        assert loaded == octavo.RecipeMap(default, rules) and loaded.of("last").name == saved.name
        assert recipes.load(path, recipes.mx()).default == recipes.mx()
    path.write_text("\ufeff" + recipes.to_json(recipes.mx()), encoding="utf-8")  # Windows' editors begin so
    assert recipes.load(path) == octavo.RecipeMap(recipes.mx())
    path.write_text(recipes.to_json(rules))  # as of a record, which doesn't know the model's recipe
    assert recipes.load(str(path), recipes.mx()) == octavo.RecipeMap(recipes.mx(), rules)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"rules": {}}', "names no default: give one"),
        ('{"default": "dynamic"}', '.default.: .dynamic.. is not of the form {"default": a recipe, "rules"'),
        ('"mx"', "'mx' is not of the form"),
        ('{"default": "fast", "rules": {}}', "'fast' is no recipe: choose default, dynamic"),
        ('{"default": "load", "rules": {}}', "'load' is no recipe"),
        ('{"default": null, "rules": {}}', "is no octavo.Recipe"),
        ('{"default": "mx", "rules": {"a": {"outputs": null}}}', "changes .'outputs'.; a recipe has output"),
        ('{"default": "mx", "rules": {"a": {"saved": "exit()"}}}', r"'exit\(\)' is no Cast, such as Cast\(E4M3"),
        ('{"default": "mx", "rules": {"a": {"saved": "E4M3"}}}', "'E4M3' is no Cast"),
        ('{"default": "mx", "rules": {"a": {"saved": "Cast(E4M3, PerRow(), Delayed())"}}}', "needs PerTensor"),
        ('{"default": "mx", "rules": {"a": {"output": ["Cast(E4M3)"]}}}', "is no Cast"),
        ('{"default": {"name": null, "output": null}, "rules": {}}', "name=None must be text"),
        ('{"default": "mx", "rules": {"a": 3}}', "3 is no rule: use null, a recipe's name, or"),
        ('{"default": "mx", "rules": null}', "is not of the form"),
        ("{", "JSONDecodeError"),
        ('{"default": "mx", "rule": {}, "rules": {}}', "it has 'rule', and may have 'default', 'rules' and 'prefix'"),
        ("[]", ".. is not of the form"),
    ],
)
def test_a_file_that_is_none_says_why(text, says, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"map.json holds no recipes by layer: .*{says}"):
        recipes.load(path)
    with pytest.raises(ValueError, match=r"nowhere.json does not exist; octavo inspect"):
        recipes.load(tmp_path / "nowhere.json")


def test_a_part_of_a_map_is_written_with_its_prefix():
    part = under(RecipeMap(recipes.dynamic(), {"model.lm_head": None}), "model")
    read = recipes.as_recipe(json.loads(recipes.to_json(part)))
    assert read == part and read.of("lm_head").is_high_precision
    with pytest.raises(TypeError, match=r"'prefix': 3\} is not of the form"):
        recipes.as_recipe({"default": "mx", "rules": {}, "prefix": 3})


def test_a_damaged_file_is_a_value_error_or_a_map_of_recipes(tmp_path):
    fine = Recipe(output=recipes.mx().output, name="own")
    rules = {"lm_head": None, "a": recipes.mx(), "*.fc2": {"grad_weight": None, "fast_accum": ("output",)}, "b": fine}
    value, path, read = json.loads(recipes.to_json(RecipeMap(recipes.delayed(), rules))), tmp_path / "map.json", 0
    for seed in range(100):
        path.write_bytes(damaged_json(value, seed))
        try:
            recipe = recipes.load(path)
        except ValueError as error:
            assert str(error).startswith(f"{path} holds no recipes by layer")
        else:
            read += bool([recipe.of(name) for name in ("lm_head", "a", "x.fc2", "b", "")])
    assert 0 < read < 90


def test_a_recipe_is_its_name_or_a_file_too(tmp_path):
    path, by_layer = tmp_path / "map.json", RecipeMap(recipes.mx(), {"1": {"grad_weight": None}})
    path.write_text(recipes.to_json(by_layer))
    for source in (path, str(path), json.loads(path.read_text()), by_layer):
        assert recipes.as_recipe(source) == by_layer
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    octavo.convert(net, str(path), lambda *_: True)
    assert [layer.recipe for layer in net] == [recipes.mx(), by_layer.of("1")] and net[1].recipe.grad_weight is None
    with octavo.using(net, "dynamic"):
        assert {layer.recipe for layer in net} == {recipes.dynamic()}
    octavo.set_recipe(net, path)
    assert net[1].recipe == by_layer.of("1")


def roles(recipe: Recipe):
    return recipe.input_casts, recipe.weight_casts, recipe.grad_output_casts


# --- what other rows contain ------------------------------------------------------------------------------------------

MODULES = {
    "Linear": lambda recipe: octavo.nn.Linear(256, 160, recipe=recipe),
    "Linear of odd sizes, in splits": lambda recipe: octavo.nn.Linear(256, {"q": 45, "k": 3}, False, recipe=recipe),
    "Conv1D": lambda recipe: octavo.convert(Conv1D(160, 256), recipe, lambda module, name: True),
    "LayerNormLinear": lambda recipe: octavo.nn.LayerNormLinear(256, 160, recipe=recipe),
    "LayerNormMLP": lambda recipe: octavo.nn.LayerNormMLP(256, 160, "gelu", recipe=recipe),
    "RMSNormMLP": lambda recipe: octavo.nn.RMSNormMLP(256, 160, "swiglu", recipe=recipe),
    "TransformerBlock": lambda recipe: octavo.nn.TransformerBlock(256, 192, 4, recipe=recipe),
    "GroupedLinear": lambda recipe: octavo.nn.GroupedLinear(3, 256, 160, recipe=recipe),
    "Experts": lambda recipe: octavo.nn.Experts(3, 256, 160, recipe=recipe),
}
ROWS, SEEN = 48, 20  # the positions of a sequence, and how many of them come before those that change
ROUTING = torch.arange(ROWS)[:, None] % 3, torch.ones(ROWS, 1)
OFFSETS = torch.tensor([17, 17, 46], dtype=torch.int32)  # an expert without rows, two rows of no expert
OTHERS = {  # what the other rows hold instead
    "other numbers": torch.randn_like,
    "larger ones": lambda x: 1.37 * x,
    "huge ones": lambda x: 1e30 * x,
    "zeros": torch.zeros_like,
    "inf": lambda x: torch.where(x > 1, torch.inf, x),
    "NaN": lambda x: torch.full_like(x, torch.nan),
}


def of_first(module, x):
    """The output of the first sequence, of x [2, positions, features]."""
    if isinstance(module, octavo.nn.Experts):
        return module(x[0], *(each.to(x.device) for each in ROUTING))
    if isinstance(module, octavo.nn.GroupedLinear):
        return module(x[0], OFFSETS.to(x.device))
    y = module(x)
    return torch.cat(y, -1)[0] if isinstance(y, tuple) else y[0]


@pytest.mark.parametrize("name", ALL)
def test_whether_what_other_rows_contain_moves_a_row(name):
    """Rows move others in forward where docs/guides/which-recipe.md's table says so. Delayed: once it has a history."""
    page = Path(octavo.__file__).parents[1] / "docs" / "guides" / "which-recipe.md"
    row = re.search(rf"^\| `{name}\(\)` \| (yes|no)\b", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None, f"{page.name} does not say whether other tokens change a token's output"
    for kind, make in MODULES.items():
        if name == "nvfp4" and kind in ("GroupedLinear", "Experts"):
            continue  # which refuse it
        torch.manual_seed(0)
        module, x = make(ALL[name]()), torch.randn(2, ROWS, 256)
        if name == "delayed":
            of_first(module, x)[:SEEN].sum().backward()
        other = torch.cat((x[:1], 7 * torch.randn(1, ROWS, 256)))
        other[0, SEEN:] = 7 * torch.randn(ROWS - SEEN, 256) * torch.randn(ROWS - SEEN, 1).exp()
        for training in (True, False):
            module.train(training)
            moved = not torch.equal(of_first(module, x)[:SEEN], of_first(module, other)[:SEEN])
            assert moved == (row[1] == "yes"), kind


def moved_by(kind, recipe, dtype, device="cpu"):
    """Return which of OTHERS in random rows move a bit of the rows left; tokens attend to another sequence's too."""
    module, x = MODULES[kind](recipe).to(device, dtype), torch.randn(2, ROWS, 256, dtype=dtype, device=device)
    stays = torch.randperm(ROWS, device=device) < (ROWS if kind == "TransformerBlock" else SEEN)
    with torch.no_grad():
        before = of_first(module, x)[stays]
        afterwards = {
            name: of_first(module, torch.stack((torch.where(stays[:, None], x[0], other(x[0])), other(x[1]))))[stays]
            for name, other in OTHERS.items()
        }
    return {name for name, after in afterwards.items() if not torch.equal(before, after)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_batch_invariant_whatever_other_rows_hold(kind, dtype):
    assert moved_by(kind, recipes.dynamic(), dtype) >= {"huge ones"}
    assert moved_by(kind, recipes.batch_invariant(), dtype) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Linear", pytest.param("RMSNormMLP", marks=pytest.mark.full)])
def test_batch_invariant_in_the_kernels_for_gpus(kind, kernels):
    with in_place_of_reference(kernels) if kernels.gpu.type == "cpu" else nullcontext():
        assert moved_by(kind, recipes.batch_invariant(), torch.bfloat16, kernels.gpu) == set()


def test_how_far_later_tokens_move_earlier_outputs():
    layers = [octavo.nn.Linear(256, 256, bias=False, recipe=recipes.dynamic()) for _ in range(2)]
    model, x = torch.nn.Sequential(*layers), torch.randn(64, 256)
    later = torch.cat((x[:32], 7 * x[32:]))
    with torch.no_grad():
        moved, expected = model(later)[:32], model(x)[:32]
        assert 0.03 < (moved - expected).norm() / expected.norm() < 0.09
        with octavo.using(model, recipes.rowwise()):
            assert torch.equal(model(later)[:32], model(x)[:32])


@pytest.mark.parametrize(
    ("share", "blocks", "count"), [(0.14, 50, 7), (0.28, 25, 7), (5 / 9, 9, 5), (0.15, 8, 2), (0.0, 8, 0), (1, 8, 8)]
)
def test_a_share_of_the_last_blocks_is_rounded_up_as_decimals(share, blocks, count):
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(blocks))
    assert len(recipes.last_blocks(model, share)) == count


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_of_the_last_blocks_is_from_0_to_1(share):
    with pytest.raises(ValueError, match=r"share=.*: needs a number from 0 to 1"):
        recipes.last_blocks(torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4)), share)


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (recipes.mx, TypeError, "is no octavo.Recipe; try octavo.recipes.mx()"),
        (recipes.load, TypeError, "is no octavo.Recipe; try octavo.recipes.default()"),
        (3, TypeError, "is no octavo.Recipe; try octavo.recipes.default()"),
        ({"head": None}, TypeError, "try octavo.RecipeMap(octavo.recipes.default(), rules)"),
        ({"default": "mx"}, TypeError, "is not of the form"),
        ("fast", ValueError, "'fast' is no recipe: choose default, dynamic"),
        ("fast", ValueError, "or a file that ends in .json"),
    ],
)
def test_what_is_no_recipe_is_told_what_to_write(value, error, says):
    for call in (octavo.convert, octavo.set_recipe):
        with pytest.raises(error, match=re.escape(says)):
            call(octavo.nn.Linear(512, 512), value)
