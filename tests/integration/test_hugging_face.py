"""Llama, Qwen2 and GPT-2 of transformers, tiny and random, save, load and restore; tests/integrations trains them."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import Recipe, RecipeMap, recipes
from tests.support.helpers import assert_equal, every_layer, to_fp8

transformers = pytest.importorskip("transformers")

from tests.support.tiny_models import DECODER, MODELS, POSITIONS, VOCABULARY, new, train  # noqa: E402

MODELS = MODELS | {"qwen2, tied": ("Qwen2", "Qwen2ForCausalLM", DECODER | {"tie_word_embeddings": True})}


def build(kind: str, recipe: Recipe | RecipeMap | None = None) -> nn.Module:
    """The model of a seed, converted if there is a recipe."""
    torch.manual_seed(0)
    net = new(*MODELS[kind]).train()
    return net if recipe is None else octavo.convert(net, recipe, select=every_layer)


TOKENS = torch.randint(VOCABULARY, (4, POSITIONS), generator=torch.Generator().manual_seed(5))


def logits(net: nn.Module) -> Tensor:
    with torch.no_grad():
        return net.eval()(input_ids=TOKENS).logits


def embedding_and_head(net: nn.Module) -> tuple[Tensor, Tensor]:
    return net.get_input_embeddings().weight, net.get_output_embeddings().weight


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen2", "gpt2"))])
def test_it_saves_and_loads_and_comes_back(kind: str, tmp_path: Path) -> None:
    plain = build(kind)
    train(net := build(kind, recipes.delayed()), [TOKENS] * 2)
    state = net.state_dict()
    assert state.keys() == plain.state_dict().keys()
    net.save_pretrained(tmp_path)

    read = type(plain).from_pretrained(tmp_path)
    plain.load_state_dict(state, strict=True)
    assert_equal(read.state_dict(), plain.state_dict())
    for other in (read, plain):
        to_fp8(other, recipes.delayed())
        octavo.nn.load_delayed_state_dict(other, octavo.nn.delayed_state_dict(net))
        assert torch.equal(logits(other), logits(net))
    assert train(read.train(), [TOKENS] * 2) == train(copy.deepcopy(net).train(), [TOKENS] * 2)

    untouched = build(kind)
    octavo.restore(net)
    assert [type(module) for module in net.modules()] == [type(module) for module in untouched.modules()]
    untouched.load_state_dict(state, strict=True)
    assert torch.equal(logits(net), logits(untouched))
    assert octavo.nn.delayed_state_dict(net) == {}


@pytest.mark.parametrize("kind", ["gpt2", "qwen2, tied"])
def test_a_tied_head_stays_tied(kind: str, tmp_path: Path) -> None:
    net = build(kind, recipes.dynamic())
    embedding, head = embedding_and_head(net)
    assert isinstance(net.get_output_embeddings(), octavo.nn.Linear)
    assert embedding is head
    before = embedding.clone()
    train(net, [TOKENS] * 2)
    assert embedding_and_head(net) == (embedding, embedding)
    assert not torch.equal(embedding, before)
    net.save_pretrained(tmp_path)
    for other in (copy.deepcopy(net), type(net).from_pretrained(tmp_path), octavo.restore(net)):
        embedding, head = embedding_and_head(other)
        assert embedding is head
        assert torch.equal(embedding, net.get_input_embeddings().weight)


def test_codes_that_save_pretrained_writes_are_read_by_the_same_model_only(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net = octavo.convert(build("qwen2"), recipes.dynamic(), select=every_layer, weight_storage="fp8")
    net.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(net).from_pretrained(tmp_path)
    for parameter in (other := copy.deepcopy(net)).parameters():
        parameter.detach().copy_(torch.zeros(parameter.shape))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)  # as its Trainer resumes
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())
