"""Names of a hub and of a model of transformers: experts that are tensors of their own there."""

import pytest
import torch

import octavo
from octavo import recipes
from octavo.export.hub_names import places_of_experts, split_stored
from tests.export.test_loading import mixtral
from tests.support.helpers import every_layer

safetensors = pytest.importorskip("safetensors.torch")

EXPERTS = "model.layers.0.mlp.experts"


def test_where_each_experts_tensors_lie() -> None:
    model = octavo.convert(mixtral(), recipes.dynamic(), every_layer, "fp8")
    places = places_of_experts(model)
    assert places.keys() == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}
    of_hub = "model.layers.0.block_sparse_moe.experts"
    assert places[f"{EXPERTS}.gate_up_proj"] == {
        f"{of_hub}.{expert}.{name}.weight": (expert, rows)
        for name, rows in (("w1", slice(0, 256)), ("w3", slice(256, 512)))
        for expert in range(3)
    }
    assert places[f"{EXPERTS}.down_proj"][f"{of_hub}.2.w2.weight"] == (2, slice(0, 128))
    assert places_of_experts(octavo.restore(model)) == {}


def test_what_save_pretrained_writes_is_for_the_same_model(tmp_path) -> None:
    model = octavo.convert(mixtral(), recipes.blockwise(), every_layer, "fp8")
    model.save_pretrained(tmp_path)
    given = safetensors.load_file(tmp_path / "model.safetensors")
    stored, others = split_stored(model, given)
    state = model.state_dict()
    assert f"{EXPERTS}.gate_up_proj" in stored and not any("experts" in name for name in others)
    assert all(torch.equal(value, state[name]) for name, value in stored.items())
