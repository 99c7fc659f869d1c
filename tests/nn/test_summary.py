import dataclasses
import inspect
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import octavo
from octavo import Recipe, recipes
from octavo.nn.saved import MIB
from octavo.nn.summary import SavedBytes, Summary
from tests.nn.test_convert import Block, Special, Twice, foreign, legacy_weight_norm, with_own_forward
from tests.support.helpers import to_fp8


def of_another_library() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight = foreign(layer.weight)
    return layer


COMPUTED = "computed from other parameters"
LEFT_ALONE = {
    "subclass": (lambda: Special(8, 8), "a subclass of Linear (Special)"),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "MultiheadAttention is not a linear layer"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), COMPUTED),
    "parametrized bias": (lambda: parametrize.register_parametrization(nn.Linear(8, 8), "bias", Twice()), COMPUTED),
    "weight_norm": (lambda: legacy_weight_norm(nn.Linear(8, 8)), COMPUTED),
    "own forward": (with_own_forward, "forward was replaced on the instance"),
    "float64": (lambda: nn.Linear(8, 8, dtype=torch.float64), "its weight is torch.float64"),
    "float8": (lambda: nn.Linear(8, 8).requires_grad_(False).to(torch.float8_e4m3fn), "weight is torch.float8_e4m3fn"),
    "embedding": (lambda: nn.Embedding(8, 8), "Embedding is not a linear layer"),
    "bilinear": (lambda: nn.Bilinear(8, 8, 8), "Bilinear is not a linear layer"),
    "conv": (lambda: nn.Conv2d(8, 8, 1), "Conv2d is not a linear layer"),
    "lazy": (lambda: nn.LazyLinear(8), None),  # which has no matrix yet
    "another library": (of_another_library, "can't read weights that are torch.testing._internal.two_tensor.TwoTensor"),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_is_left_alone_has_its_reason(kind):
    make, reason = LEFT_ALONE[kind]
    net = nn.Sequential(make())
    classes = [type(module) for module in net.modules()]
    with pytest.warns(UserWarning, match=r"converted nothing: \S"):
        to_fp8(net, recipes.dynamic())
    assert [type(module) for module in net.modules()] == classes
    summary = octavo.summary(net)
    count = 0 if reason is None else 2 if kind == "attention" else 1
    assert summary.converted == () and len(summary.left_alone) == count
    for row in summary.left_alone[:1]:
        assert reason in row.reason
    assert all(row.reason in str(summary) for row in summary.left_alone)


def test_separate_splits_are_a_matrix_each():
    net = octavo.nn.separate_splits(nn.Sequential(octavo.nn.Linear(8, {"query": 8, "key": 4}, recipe=recipes.mx())))
    rows = [(row.name, row.shape, row.recipe.name) for row in octavo.summary(net).modules]
    assert rows == [("0.query", (8, 8), "mx"), ("0.key", (4, 8), "mx")]


def test_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 8, 16))
            self.scale = nn.Parameter(torch.ones(8))
            self.position = nn.Parameter(torch.zeros(1, 3, 16))  # no expert's

    net = nn.ModuleDict({"moe": Experts(), "proj": nn.Linear(32, 16)})
    row, *_ = octavo.summary(net).modules
    assert (row.name, row.kind, row.shape) == ("moe.up", "Experts", (4, 8, 16))
    assert "3-D parameter (expert weights)" in row.reason
    with pytest.warns(UserWarning, match=r"experts stay in high precision: 1 modules' weights, first moe's, .* 47\.8"):
        to_fp8(net, recipes.dynamic())


def test_rows_of_a_converted_model():
    summary = octavo.summary(octavo.convert(Block(), recipes.mx(), lambda module, name: name == "up"))
    (up,), (down,) = summary.converted, summary.left_alone
    assert (up.name, up.kind, up.shape, up.recipe, up.reason) == ("up", "Linear", (64, 32), recipes.mx(), "")
    assert (down.name, down.recipe) == ("down", None)
    text = str(summary)
    assert text == repr(summary)
    assert text.startswith("1 of 2 matrices in FP8 (50.0 % of their elements)\n")
    assert text.endswith(str(recipes.mx()))  # with which casts
    assert "  up    Linear [64, 32]  recipe mx\n" in text


def test_matrices_in_four_bits_are_not_said_to_be_in_fp8():
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    octavo.convert(net, octavo.RecipeMap(recipes.nvfp4(), {"2": None}), lambda module, name: True)
    assert str(octavo.summary(net)).startswith("2 of 3 matrices in 4 bits (66.7 % of their elements)\n")
    assert "FLOPs in 4 bits" in str(octavo.summary(net, torch.randn(16, 32)))
    net[0].recipe = recipes.dynamic()
    assert str(octavo.summary(net)).startswith("2 of 3 matrices in FP8 and 4 bits (66.7 %")


def test_the_default_select_is_named():
    big, small = nn.Linear(512, 512, device="meta"), nn.Linear(512, 4, device="meta")
    reasons = [m.reason for m in octavo.summary(nn.ModuleDict({"big": big, "small": small})).modules]
    assert reasons == ["not selected", "4 x 512 features; the default select converts from 512 on"]
    by_own_select = octavo.summary(nn.ModuleList([octavo.nn.Linear(8, 8), small]))
    assert by_own_select.left_alone[0].reason == "not selected"


def test_a_root_and_nothing_at_all():
    summary = octavo.summary(octavo.nn.Linear(8, 8))
    assert summary.converted[0].name == ""
    assert "(model)" in str(summary)
    assert str(octavo.summary(nn.ReLU())) == "0 of 0 matrices in FP8 (0.0 % of their elements)"


def test_parts_of_fused_modules_have_their_names():
    module = octavo.nn.TransformerBlock(16, 24, 2, recipe=octavo.RecipeMap(recipes.mx(), {"*.fc2": None}))
    summary = octavo.summary(module)
    assert [(m.name, m.kind, m.shape, m.recipe.name) for m in summary.modules] == [
        ("attention.qkv.linear", "Linear", (48, 16), "mx"),
        ("attention.out", "Linear", (16, 16), "mx"),
        ("mlp.fc1", "Linear", (48, 16), "mx"),
        ("mlp.fc2", "Linear", (16, 24), "high_precision"),
    ]
    assert str(summary).startswith("3 of 4 matrices in FP8 (82.4 % of their elements)\n")
    assert str(recipes.mx()) in str(summary) and "recipe high_precision" in str(summary)
    octavo.restore(module)
    assert str(octavo.summary(module)).startswith("0 of 4 matrices in FP8 (0.0 %")
    assert [m.name for m in octavo.summary(module).left_alone] == ["attention.out", "mlp.fc2"]


# --- what a forward doesn't compute in FP8, though it is converted

REPLACED = "its forward was replaced on the instance after octavo.convert"


def test_a_forward_that_was_replaced_after_convert():
    net = to_fp8(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), recipes.dynamic())
    net[0].forward = MethodType(lambda self, x: nn.functional.linear(x, self.weight, self.bias), net[0])
    net[1].forward = partial(lambda forward, x: forward(x), net[1].forward)  # as accelerate wraps one
    summary = octavo.summary(net, torch.randn(4, 16))
    assert [row.reason for row in summary.modules] == [REPLACED, "", ""]
    assert summary.flops == (2 * 2 * 4 * 16 * 16, 3 * 2 * 4 * 16 * 16)
    assert str(summary).startswith("2 of 3 matrices in FP8")
    may_be = f"{REPLACED}, or calls it: octavo.summary(model, *inputs) says which"
    assert [row.reason for row in octavo.summary(net).modules] == [may_be, may_be, ""]


class WithHead(nn.Module):
    """A model whose head is called in evaluation; in training it is called too, or its weight is read."""

    def __init__(self, training):
        super().__init__()
        self.body, self.head, self.in_training = nn.Linear(16, 16), nn.Linear(16, 32, bias=False), training

    def forward(self, x):
        h = self.body(x)
        if self.training and self.in_training == "asks for values":
            assert h.sum().item() != 0  # which a copy without data doesn't have
        if self.training and self.in_training == "reads":
            return nn.functional.linear(h, self.head.weight)
        return self.head(h)


@pytest.mark.parametrize("training", ["reads", "calls", "asks for values"])
def test_a_head_that_training_reads(training):
    """Liger-Kernel's fused loss takes the weight in training; the summary is of training, where it can be counted."""
    summary = octavo.summary(to_fp8(WithHead(training), recipes.dynamic()), torch.randn(4, 16))
    reason = "a WithHead reads its weight without calling it" if training == "reads" else ""
    assert [row.reason for row in summary.modules] == ["", reason]
    body, head = 2 * 4 * 16 * 16, 2 * 4 * 16 * 32
    assert summary.flops == (body if training == "reads" else body + head, body + head)
    assert bool(summary.saved.reason) is (training == "asks for values")


class Functional(nn.Module):
    """A model that calls its first layer, and passes the second one to a function, which reads its weight."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return by_weight(self.head, self.body(x))


def by_weight(layer, x):
    return nn.functional.linear(x, layer.weight)


def test_a_layer_that_a_forward_does_not_call():
    summary = octavo.summary(to_fp8(Functional(), recipes.dynamic()), torch.randn(4, 16))
    assert [row.reason for row in summary.modules] == ["", "a forward in training does not call it"]
    assert str(summary).startswith("1 of 2 matrices in FP8")


def test_a_layer_that_a_forward_calls_by_its_second_name():
    layer = nn.Linear(16, 16)
    net = nn.ModuleDict({"unused": nn.ModuleList([layer]), "used": nn.Sequential(layer)})
    net.forward = MethodType(lambda self, x: self["used"](x), net)
    (row,) = octavo.summary(to_fp8(net, recipes.dynamic()), torch.randn(4, 16)).modules
    assert row.name == "unused.0" and not row.reason


def test_a_model_whose_replaced_forward_reads_a_weight():
    net = to_fp8(Block(), recipes.mx())
    net.forward = MethodType(lambda self, x: nn.functional.linear(self.up(x), self.down.weight), net)
    reasons = {row.name: row.reason for row in octavo.summary(net, torch.randn(4, 32)).modules}
    assert reasons == {"up": "", "down": "a Block reads its weight without calling it"}


# --- FLOPs, against counts made by hand

TOKENS = 24


@pytest.mark.parametrize("name", ["dynamic", "rowwise", "blockwise", "mx", "high_precision"])
def test_linear_layers(name):
    recipe = getattr(recipes, name)()
    model = nn.Sequential(to_fp8(nn.Linear(48, 80), recipe), nn.Dropout(), nn.Linear(80, 16))
    summary = octavo.summary(model, torch.randn(2, TOKENS // 2, 48))
    inside, outside = 2 * TOKENS * 48 * 80, 2 * TOKENS * 80 * 16
    assert summary.flops == ((0, inside + outside) if recipe.is_high_precision else (inside, inside + outside))
    assert all(module.training for module in model.modules())


def test_the_table_says_it_and_only_where_a_forward_ran():
    model = nn.Sequential(to_fp8(nn.Linear(32, 96), recipes.dynamic()), nn.Linear(96, 32))
    assert "50.0 % of the forward pass's 9.83e+04 FLOPs in FP8" in str(octavo.summary(model, input=torch.randn(8, 32)))
    summary = octavo.summary(model)
    assert summary.flops is None and "FLOPs" not in str(summary)


def test_where_an_unconverted_layer_saves_nothing_the_table_says_how_much_the_converted_one_does():
    model = nn.Sequential(to_fp8(nn.Linear(32, 32), recipes.dynamic()))
    says = "a forward saves 0.03 MiB where it saves nothing unconverted, weights apart\n"
    assert says in str(octavo.summary(model, torch.randn(1024, 32)))


def test_every_column_is_described_and_printed():
    """A field of each class stands among its attributes, and another value of it prints another summary."""
    of_forward = octavo.summary(to_fp8(nn.Linear(32, 32), recipes.dynamic()), torch.randn(16, 32))
    unset = [field.name for field in dataclasses.fields(of_forward) if not getattr(of_forward, field.name)]
    assert unset == ["fused", "not_fused"], "octavo.summary passes each to Summary, but those of a fused model"
    row = of_forward.modules[0]
    numbers = [field.name for field in dataclasses.fields(row) if getattr(row, field.name) in (None, 0)]
    assert numbers == [], "a forward in FP8 has a number of each"
    saved = SavedBytes({"norms": MIB}, {"norms": MIB}, regions={"": (1, MIB, MIB)})
    whole = Summary(modules=(row,), flops=(1, 2), saved=saved, fused={"mlp": "MLP"}, not_fused={"norm": "a hook"})
    missing = [field.name for field in dataclasses.fields(whole) if not getattr(whole, field.name)]
    assert missing == [], "`whole` has a value of each"
    saved_more = dataclasses.replace(saved, plain={"norms": 3 * MIB})
    other: dict[type, Any] = {str: "another", Recipe: recipes.mx(), tuple: (5, 6), SavedBytes: saved_more}
    for value, printed in (
        (row, lambda row: str(dataclasses.replace(whole, modules=(row,)))),
        (saved, lambda saved: str(dataclasses.replace(whole, saved=saved))),
        (whole, str),
    ):
        for field in dataclasses.fields(value):
            assert f"\n    {field.name}: " in (inspect.getdoc(type(value)) or ""), field
            was = getattr(value, field.name)
            if isinstance(was, dict):
                new: Any = {key: 2 * MIB for key, size in was.items() if isinstance(size, int)}
            else:
                new = () if field.name == "modules" else other[type(was)]
            assert printed(dataclasses.replace(value, **{field.name: new})) != printed(value), field


def test_a_forward_that_fails_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).train()
    model[1].eval()
    with pytest.raises(RuntimeError, match="shapes"):
        octavo.summary(model, torch.randn(3, 7))
    assert [module.training for module in model.modules()] == [True, True, False]
