"""octavo.integrations.torchtitan: against torchtitan 0.3 where it is installed, and the protocols' signatures anywhere.

torchtitan is no development requirement: it brings datasets, wandb and more. ``pip install torchtitan`` runs all tests.
"""

import copy
import dataclasses
import importlib
import inspect
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.integrations import torchtitan as ours
from tests.support import titan_tasks

WIDTH = 64


def everything(module, name):
    return True


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


def test_the_protocol_of_0_2():
    """``__init__(job_config, parallel_dims)``, ``convert(model)`` in place, ``post_optimizer_hook(model)``."""
    for function, expected in [
        (ours.OctavoModelConverter.__init__, ["self", "job_config", "parallel_dims"]),
        (ours.OctavoModelConverter.convert, ["self", "model"]),
        (ours.OctavoModelConverter.post_optimizer_hook, ["self", "model"]),
    ]:
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.default is p.empty] == expected
    model = Model()
    converter = ours.OctavoModelConverter(object(), object(), recipe=recipes.rowwise(), select=everything)
    assert converter.convert(model) is None
    assert converted(model) == [f"layers.0.{name}" for name in IN_A_BLOCK]
    assert {model.get_submodule(name).recipe for name in converted(model)} == {recipes.rowwise()}
    assert converter.post_optimizer_hook([model]) is None


def test_registration_in_0_2(monkeypatch):
    registry = {}
    protocol = types.SimpleNamespace(register_model_converter=lambda kind, name: registry.update({name: kind}))
    monkeypatch.setitem(sys.modules, "torchtitan.protocols.model_converter", protocol)
    for parent in ("torchtitan", "torchtitan.protocols"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    ours.register("fp8", recipe=recipes.blockwise(), filter_fqns=["lm_head", "attention"], select=everything)
    model = Model()
    registry["fp8"](object(), object()).convert(model)
    assert converted(model) == [f"layers.0.feed_forward.{name}" for name in ("w1", "w2", "w3")]


def test_registration_in_another_version_says_what_to_write(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan.protocols.model_converter", None)
    with pytest.raises(octavo.MissingExtraError, match=r"OctavoConverter\.Config\(\.\.\.\) in model_registry"):
        ours.register()


@pytest.fixture
def module(monkeypatch):
    """The integration over 0.3's protocol: a base with a Config of keywords, that configurations of models pass."""

    class ModelConfigConverter:
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

    model = types.ModuleType("torchtitan.protocols.model")
    model.ModelConfigConverter = ModelConfigConverter
    for name in ("torchtitan", "torchtitan.protocols"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, model.__name__, model)
    spec = importlib.util.find_spec("octavo.integrations.torchtitan")
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stood_in", found)
    spec.loader.exec_module(found)
    return found


def test_the_protocol_of_0_3(module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        layers: int

        def build(self, **kwargs):
            return Model(self.layers)

    config = Config(layers=2)
    converter = module.OctavoConverter(module.OctavoConverter.Config(recipe=recipes.mx(), select=everything))
    changed = converter.convert(config)
    assert isinstance(changed, Config) and dataclasses.replace(changed).layers == 2
    assert converted(config.build()) == []
    for made in (changed, copy.deepcopy(changed)):
        assert converted(made.build()) == [f"layers.{index}.{name}" for index in "01" for name in IN_A_BLOCK]


class Distributed(nn.Linear):
    """As torchtitan's: parallelize distributes what it knows the layout of, and refuses the rest."""

    def _distribute_states(self, parallel_dims):
        assert parallel_dims == "dims"
        self.seen = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]


def test_delayed_state_has_no_layout_in_0_3(module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **kwargs):
            return nn.Sequential(Distributed(WIDTH, WIDTH))

    converter = module.OctavoConverter.Config(recipe=recipes.delayed(), select=everything)
    model = copy.deepcopy(module.OctavoConverter(converter).convert(Config()).build())
    model[0]._distribute_states("dims")
    assert model[0].seen == ["weight", "bias"]
    assert {name for name, _ in model.named_buffers()} == {"0.delayed_scale", "0.delayed_amax_history"}


# --- torchtitan itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def llama3():
    pytest.importorskip("torchtitan.models.llama3")
    return titan_tasks.llama_config


def test_its_llama_trains_in_fp8(llama3):
    options = titan_tasks.converter("delayed")
    plain, model = titan_tasks.built(llama3(None)), titan_tasks.built(llama3([options]))
    assert len(converted(model)) == 6 * 5 and type(model.lm_head).__module__.startswith("torchtitan")
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    losses = titan_tasks.losses_of(model, 3)
    assert losses == pytest.approx(titan_tasks.losses_of(plain, 3), abs=0.02)
    assert losses[-1] < losses[0]


def test_its_default_takes_large_layers_but_the_head(llama3):
    with pytest.warns(UserWarning, match="converted nothing"):
        titan_tasks.built(llama3([ours.OctavoConverter.Config()]))  # 256 features


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_its_own_sharding_of_a_converted_llama(llama3, pool, compiled):
    for losses, ways in pool.run(titan_tasks.sharded_llama, (2,), compiled):
        assert losses[-1] < losses[0]
        assert ways == {"in FP8"}


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "compiled"), [("delayed", False), ("rowwise", True)])
def test_its_own_tensor_parallelism_of_a_converted_llama(llama3, pool, recipe, compiled):
    """Sums are in another order, and change a code here and there."""
    for alone, losses in pool.run(titan_tasks.parallel_llama, (4,), recipe, compiled):
        assert losses == pytest.approx(alone, rel=2e-3) and losses[-1] < losses[0]
