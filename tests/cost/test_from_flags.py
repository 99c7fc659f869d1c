"""Models, inputs and optimizers that flags name: as a training has them."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import cli, recipes
from octavo.cost import steps
from octavo.cost.estimate import NamedParameters, estimate, orthogonalising_seconds
from octavo.cost.from_flags import context_of, from_hugging_face, optimizer_of, tokens_of
from octavo.cost.rates import PUBLISHED, PlanError
from octavo.cost.steps import step_in
from octavo.cost.work import work_of
from octavo.train import GPT, ModelConfig, OptimizerConfig, StateConfig
from octavo.train.trainer import build_optimizer
from octavo.weights.stored import local_stored
from tests.support.combinations import in_full

H200 = PUBLISHED["H200"]


def test_a_hugging_face_configuration(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = from_hugging_face(tmp_path / "config.json")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    for flags, says in ((["--layers", "9"], "--layers"), (["--width", "2", "--heads", "1"], "--heads, --width")):
        assert cli.main(["plan", str(tmp_path), "--device", "H200", *flags]) == 2
        assert f"{says}: the model's sizes are those of {tmp_path}" in capsys.readouterr().err
    monkeypatch.setattr(steps, "COMPARED", ("dynamic",))
    assert context_of(model) == 2048  # a Llama's, where the file says nothing else
    assert cli.main(["plan", str(tmp_path), "--device", "H200", "--tokens", "2048", "--context", "64"]) == 0
    assert "32 sequences of 64 tokens" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PlanError, match="no configuration of a causal language model"):
        from_hugging_face(tmp_path)
    with pytest.raises(PlanError, match=r"nowhere does not exist: give a config.json"):
        from_hugging_face(Path("nowhere"))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_values_of_which_transformers_makes_no_model_that_runs(tmp_path: Path, capsys: Any) -> None:
    path, config = tmp_path / "config.json", {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96}
    cases: list[tuple[str, Any, str]] = [
        ("num_key_value_heads", 3, "a causal language model: RuntimeError: The size of tensor a"),
        ("hidden_size", -3, r"ValidationError: .*ValueError: The hidden size \(-3\) is not a multiple"),
        ("hidden_size", "x", r"ValidationError: .*TypeError: Field 'hidden_size' expected int, got str \(value: 'x'\)"),
        ("hidden_size", None, "TypeError: Field 'hidden_size' expected int, got NoneType"),
        ("hidden_act", "foo", "KeyError: 'foo' is unknown or missing"),
        ("num_attention_heads", 0, "ZeroDivisionError: "),
        ("num_hidden_layers", 0, "ValueError: the model has no blocks"),
        ("vocab_size", 0, "ValueError: the model has no elements in model.embed_tokens.weight"),
        ("max_position_embeddings", -5, "does not say how long a sequence is"),
    ]
    for name, value, says in cases:
        path.write_text(json.dumps({**config, name: value}))
        assert cli.main(["plan", str(path), "--device", "H200", "--tokens", "2048"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert re.search(says, error) and (value == -5 or str(path) in error)


def test_what_flags_can_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace()))
    with pytest.raises(PlanError, match="does not say how long a sequence is: give --context"):
        context_of(endless)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="--algorithm muon: the model has no list of blocks"):
        optimizer_of(torch.nn.Linear(4, 4), "muon", "fp32", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PlanError, match="which transformers reads: pip install transformers; or plan the"):
        from_hugging_face(tmp_path)


def test_tokens_are_whole_sequences() -> None:
    assert tokens_of(96, 32)[0].shape == (3, 32)
    for tokens in (16, 100):
        with pytest.raises(PlanError, match="must be a multiple of the context, 32"):
            tokens_of(tokens, 32)
    shapes = [tokens_of(None, context)[0].shape for context in (128, 3000, 131072)]
    assert shapes == [(128, 128), (5, 3000), (1, 131072)]


def sizes_of(optimizer: Any) -> Counter[str]:
    """Return the bytes of an optimizer's state by name, codes with their scales."""
    sizes: Counter[str] = Counter()
    for state in optimizer.state.values():
        for name, tensor in state.items():
            sizes[name.removesuffix("_codes").removesuffix("_scale_inv")] += tensor.nbytes
    return sizes


STATES = [("muon", "fp8", "split24"), *in_full(("muon", "bf16", None), ("adamw", "fp32", "auto"))]


@pytest.mark.parametrize(("algorithm", "moments", "master"), STATES)
def test_the_bytes_of_an_optimizer_are_those_after_a_step(algorithm: str, moments: str, master: str | None) -> None:
    model = GPT(ModelConfig(width=32, layers=1, heads=2, context=16, experts=4)).bfloat16()
    optimizer_class = optimizer_of(model, algorithm, moments, master)
    planned = estimate(model, tokens_of(16, 16), recipes.dynamic(), H200, optimizer=optimizer_class)
    optimizer: Any = optimizer_class(NamedParameters(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    sizes = sizes_of(optimizer)
    assert planned.memory.masters == sizes["master_rest"]
    assert planned.memory.moments == sizes["momentum_buffer"] + sizes["exp_avg"] + sizes["exp_avg_sq"]
    memory, products = planned.memory, 0.0
    if algorithm == "muon":
        first, others = (group["params"] for group in optimizer.param_groups)
        assert {*map(id, others)} >= {id(model.embedding.weight), id(model.head.weight)} and len(first) >= 4
        products = sum(orthogonalising_seconds(param.shape, H200) for param in first)
    moved = 2 * (memory.weights + memory.masters + memory.moments) + memory.gradients
    assert planned.optimizer == pytest.approx(moved / H200.copy + products) and (products > 0) == (algorithm == "muon")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.square = nn.Linear(64, 256), nn.Linear(64, 64, bias=False)
        self.distances, self.conv = nn.Embedding(8, 2), nn.Conv1d(64, 64, 4, groups=64)
        self.experts = nn.Parameter(torch.zeros(4, 64, 64))
        self.experts_bias = nn.Parameter(torch.zeros(4, 64))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.blocks = nn.Embedding(64, 64), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 256, bias=False)


def groups_of(optimizer: Any, model: nn.Module) -> list[set[str]]:
    """Return the names of the parameters that Muon updates, and of those that AdamW does."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups: dict[str, set[str]] = {"muon": set(), "adamw": set()}
    for group in optimizer.param_groups:
        groups[group["algorithm"]] |= {names[id(p)] for p in group["params"]}
    return [*groups.values()]


def test_muon_has_the_matrices_of_blocks_though_others_have_their_shape() -> None:
    """Not embeddings, convolutions, experts' biases; of a GPT those that ``octavo train`` gives to it."""
    model = Model()
    muons, others = groups_of(optimizer_of(model, "muon", "fp8", "auto")(NamedParameters(model)), model)
    assert muons == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("up.weight", "square.weight", "experts")}
    assert muons | others == {name for name, _ in model.named_parameters()} and not muons & others
    gpt = GPT(ModelConfig(width=64, layers=2, heads=2, context=64, experts=4))
    trains = build_optimizer(gpt, OptimizerConfig(), StateConfig(algorithm="muon"))
    assert groups_of(optimizer_of(gpt, "muon", "fp32", "auto")(NamedParameters(gpt)), gpt) == groups_of(trains, gpt)


def test_weights_in_fp8_and_updates_in_backward_are_planned_as_a_training_keeps_them() -> None:
    model, inputs = GPT(ModelConfig(width=64, layers=2, heads=2, context=16)).bfloat16(), tokens_of(16, 16)
    stored: Any = {"optimizer": optimizer_of(model, "adamw", "fp8", "split16", 1024), "weight_storage": "fp8"}
    planned = step_in("blockwise", model, inputs, H200, work_of(model, inputs), **stored)
    octavo.convert(model, recipes.blockwise(), weight_storage="fp8")
    optimizer = octavo.optim.AdamW(model.parameters(), moments="fp8", master="split16")
    handle = octavo.optim.update_in_backward(optimizer, 1024)
    model(torch.zeros(1, 16, dtype=torch.int64)).float().sum().backward()
    optimizer.step()
    weights: list[torch.Tensor] = []
    for param in model.parameters():
        pair = local_stored(param)
        weights += [param] if pair is None else [pair.qdata, pair.scale_inv]
    assert planned.name == "blockwise" and planned.memory.weights == sum(t.nbytes for t in weights)
    sizes = sizes_of(optimizer)
    assert planned.memory.masters == sizes["master_rest"] + sizes["master_amax"]
    assert planned.memory.moments == sizes["exp_avg"] + sizes["exp_avg_sq"]
    largest = max(2 * param.numel() for param in model.parameters())
    assert handle.most_bytes <= planned.memory.gradients == 1024 + largest
