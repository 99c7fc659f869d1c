"""octavo.integrations.torchtitan: against torchtitan 0.3 where it is installed, and the protocols' signatures anywhere.

torchtitan is no development requirement: it brings datasets, wandb and more. ``pip install torchtitan`` runs all tests.
"""

import copy
import dataclasses
import functools
import importlib
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.integrations import torchtitan as ours
from octavo.weights.fsdp2 import whole
from octavo.weights.stored import StoredWeight
from tests.support.helpers import every_layer, stepped


def converter(recipe: str, weight_storage: str | None = None) -> Any:
    """Return torchtitan's converter for all layers but the head."""
    recipes: Any = octavo.recipes
    return ours.OctavoConverter.Config(
        recipe=getattr(recipes, recipe)(), select=every_layer, weight_storage=weight_storage
    )


def llama_config(converters: list[Any] | None, model: str = "llama3") -> Any:
    """The configuration of its smallest Llama, or another decoder, with torch's attention, which needs no compiler."""
    models = importlib.import_module(f"torchtitan.models.{model}")
    attention = importlib.import_module("torchtitan.models.common.attention")
    config = models.model_registry("debugmodel", converters=converters).model
    for layer in config.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return config


def built(config: Any, prepare: Any = lambda model: None) -> nn.Module:
    """Return a model as torchtitan's trainer builds it: on the meta device, parallelized, then on the CPU."""
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    prepare(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model


def losses_of(model: nn.Module, steps: int, storage: str | None = None) -> list[float]:
    """Return losses of a few steps on the same tokens; logits may be a DTensor; ``storage``: see convert."""
    tokens = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(0))
    kind: Any = torch.optim.AdamW if storage is None else octavo.optim.AdamW
    optimizer, losses = kind(model.parameters(), lr=8e-4), []
    for _ in range(steps):
        logits = whole(model(tokens[:, :-1])).float().flatten(0, 1)
        losses.append(stepped(optimizer, nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())))
    return losses


WIDTH = 64


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, octavo.nn.Linear)]


# --- the protocols ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Named as torchtitan's."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("wq", "wk", "wv", "wo")})
        self.feed_forward = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("w1", "w2", "w3")})


class Model(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Block() for index in range(layers)})
        self.lm_head = nn.Linear(WIDTH, WIDTH, bias=False)


IN_A_BLOCK = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo")]
IN_A_BLOCK += [f"feed_forward.{name}" for name in ("w1", "w2", "w3")]


def loaded_anew(monkeypatch):
    """The integration over what is there of torchtitan now."""
    spec = importlib.util.find_spec("octavo.integrations.torchtitan")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    return module


def test_without_torchtitan_0_3_a_configuration_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan.protocols.model", None)
    with pytest.raises(octavo.MissingExtraError, match=r"torchtitan>=0\.3"):
        loaded_anew(monkeypatch).OctavoConverter.Config(recipe=recipes.mx())


class Module(nn.Module):
    """The base of all modules, as 0.3 has it."""

    _param_init = None

    def _init_self_parameters(self):
        if self._param_init is None:
            return self.reset_parameters() if hasattr(self, "reset_parameters") else None
        for name, parameter in self.named_parameters(recurse=False):
            self._param_init[name](parameter)


@pytest.fixture
def module(monkeypatch):
    """The integration over 0.3's protocol: a base with a Config of keywords, that configurations of models pass."""

    class ModelConfigConverter:
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

    for name in ("torchtitan", "torchtitan.protocols", "torchtitan.protocols.model", "torchtitan.protocols.module"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchtitan.protocols.model"].ModelConfigConverter = ModelConfigConverter
    sys.modules["torchtitan.protocols.module"].Module = Module
    return loaded_anew(monkeypatch)


def test_the_protocol_of_0_3(module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        layers: int

        def build(self, **kwargs):
            return Model(self.layers)

    config = Config(layers=2)
    converter = module.OctavoConverter(module.OctavoConverter.Config(recipe=recipes.mx(), select=every_layer))
    changed = converter.convert(config)
    assert changed is config and isinstance(config, Config) and dataclasses.replace(config).layers == 2
    for built_config in (config, copy.deepcopy(config)):  # some of its registries look at no result
        assert converted(built_config.build()) == [f"layers.{index}.{name}" for index in "01" for name in IN_A_BLOCK]


class TitanLinear(nn.Linear, Module):
    _param_init = types.MappingProxyType(
        {"weight": functools.partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
    )


class GroupedExperts(Module):
    _param_init = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), functools.partial(nn.init.trunc_normal_, std=0.02))

    def __init__(self):
        super().__init__()
        for name in self._param_init:
            self.register_parameter(name, nn.Parameter(torch.randn(2, WIDTH, WIDTH)))

    def forward(self, x_RD, num_tokens_per_expert_E):
        raise AssertionError(nn.functional.silu)


@pytest.mark.parametrize("storage", [None, "fp8"])
def test_models_of_0_3_are_initialised_as_plain_ones(module, storage):
    """Models of 0.3 are initialised as plain ones, by functions that look at values; experts' parts too."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **kwargs):
            return nn.Sequential(TitanLinear(WIDTH, WIDTH), GroupedExperts())

    def initialised(config):
        with torch.device("meta"):
            model = config.build()
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for child in (submodule for submodule in model.modules() if submodule is not model):
            assert isinstance(child, Module)
            child._init_self_parameters()
        return model

    expected = initialised(Config()).state_dict()
    options = {"recipe": recipes.delayed(), "select": every_layer, "weight_storage": storage}
    config = module.OctavoConverter(module.OctavoConverter.Config(**options)).convert(Config())
    model = initialised(config)
    assert sum(isinstance(submodule, octavo.nn.linear.Grouped) for submodule in model.modules()) == 3
    for name, parameter in model.named_parameters():
        cast = StoredWeight.cast(expected[name]) if storage and name != "0.bias" else expected[name]
        assert torch.equal(parameter.dequantize() if cast is not expected[name] else parameter, cast.dequantize())
    counts = torch.tensor([1, 3])
    assert model[1](model[0](torch.randn(4, WIDTH)), counts).shape == (4, WIDTH)
    assert {name for name, _ in model.named_buffers()} == set()  # of which torchtitan would want to know the layout


# --- torchtitan itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def llama3():
    pytest.importorskip("torchtitan.models.llama3")
    return llama_config


def test_its_llama_trains_in_fp8(llama3):
    options = converter("delayed")
    plain, model = built(llama3(None)), built(llama3([options]))
    assert len(converted(model)) == 6 * 5 and type(model.lm_head).__module__.startswith("torchtitan")
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    losses = losses_of(model, 3)
    assert losses == pytest.approx(losses_of(plain, 3), abs=0.02)
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:experts stay in high precision", "ignore:In CPU autocast")
@pytest.mark.parametrize("storage", [None, "fp8"])
@pytest.mark.parametrize(("model", "count"), [("llama3", 30), ("deepseek_v3", 62), ("kimi_k2_7", 80)])
def test_each_registry_converts_and_initialises(llama3, model, count, storage):
    """Experts and weights in FP8 too; kimi_k2_7's registry looks at no result of a converter."""
    config = llama3 if model == "llama3" else functools.partial(llama3, model=model)
    plain = built(config(None))
    ours_built = built(config([converter("dynamic", storage)]))
    assert len(octavo.summary(ours_built).converted) == count
    for name, parameter in ours_built.named_parameters():
        expected = plain.get_parameter(name)
        if isinstance(parameter, StoredWeight):
            assert (parameter.dequantize() - expected).abs().max() <= 2**-4 * expected.abs().max()
        else:
            assert torch.equal(parameter, expected)
    if model != "kimi_k2_7":
        losses, expected = losses_of(ours_built, 2, storage), losses_of(plain, 2)
        assert losses == pytest.approx(expected, abs=0.05)


def test_its_default_takes_large_layers_but_the_head(llama3):
    with pytest.warns(UserWarning, match="converted nothing"):
        built(llama3([ours.OctavoConverter.Config()]))  # 256 features
