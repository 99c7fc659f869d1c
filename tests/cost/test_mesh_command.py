"""``octavo plan --gpus``: a model's shapes, meshes that are proposed, and what fits, limits and helps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from octavo import cli
from octavo.cost import mesh_command as command
from octavo.cost.command import tokens_of
from octavo.cost.estimate import work_of
from octavo.cost.mesh import Hardware, MeshLayout, Precision, Shapes, Stage, Weight
from octavo.cost.rates import PlanError
from octavo.train import GPT, ModelConfig

LLAMA = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"num_hidden_layers": 3, "vocab_size": 96, "max_position_embeddings": 64, "use_cache": False}


def meta(model_class: type, config: object) -> torch.nn.Module:
    with torch.device("meta"):
        return model_class(config).bfloat16()  # type: ignore[no-any-return]


def test_shapes_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SOME", 1)
    model = meta(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA))
    short = command.shortened(model)
    found = command.shapes_of(model, work_of(short, tokens_of(64, 64)), 64, None)
    assert found.block[:4] == (
        Weight(64 + 2 * 32, 64, True, "out"), Weight(64, 64, True, "in"), Weight(2 * 176, 64, True, "out"),
        Weight(64, 176, True, "in"),
    )  # fmt: skip
    assert (found.layers, found.width, found.heads, found.attention) == (3, 64, (4, 2), 64)
    assert found.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), abs=64)
    assert len(short.model.layers) == 1 and len(model.model.layers) == 3  # type: ignore[union-attr,arg-type]
    ideal = 10 * 64 + 2 * (64 + 2 * 32) + 3 * 176  # read and written by kernels that are fused by hand
    assert ideal < found.elementwise < 2 * ideal
    whole = command.shapes_of(model, work_of(model, tokens_of(64, 64)), 64, {"norms": 6400})
    assert (
        whole.block == found.block and 20 < whole.launches < 150 and found.launches == 0
    )  # asking for a device is none
    assert whole.elementwise > 2 * found.elementwise and whole.saved == 6400 / 64 / 3


def test_shapes_of_the_trainers_models_with_and_without_experts() -> None:
    for experts, splits in ((0, ["out", "in", "out", "in"]), (4, ["out", "in", None, "experts", "experts"])):
        model = meta(GPT, ModelConfig(64, 2, 2, 32, experts=experts, top_k=2 if experts else 1))
        work = work_of(command.shortened(model), tokens_of(32, 32))
        block = command.shapes_of(model, work, 32, {"inputs of layers": 6400}).block
        assert [weight.split for weight in block[:-1]] == splits
        assert [(w.held, w.used) for w in block if w.split == "experts"] == [(4, 2), (4, 2)] * bool(experts)
    with pytest.raises(PlanError, match="no list of blocks"):
        command.shortened(torch.nn.Linear(4, 4))


def test_what_limits_and_what_to_change() -> None:
    block = Weight(10240, 8192, True, "out"), Weight(8192, 8192, True, "in"), Weight(8192, 22528, True, "in")
    wide = Shapes("", 8192, 12, block, (Weight(0), Weight(12288, 8192)), 8192, 200000, heads=(64, 8))
    layout = MeshLayout(64, 128, 8192, tensor=2, batch=2)
    stage = Stage(wide, layout, Precision("dynamic", gathers=True, pairs=True), Hardware())
    assert "of the step is products" in command.limit(stage) and "NVLink" in command.limit(stage)
    small = replace(stage, hardware=replace(stage.hardware, memory=0.7 * stage.size))
    ways = command.better(small)
    assert (
        ways
        and ways[0][1].fits
        and [command.order(way) for _, way in ways] == sorted((command.order(way) for _, way in ways), reverse=True)
    )
    assert command.searched(small).fits and command.order(command.searched(small)) >= command.order(ways[0][1])
    none = replace(stage, hardware=replace(stage.hardware, memory=1e6))
    assert not command.searched(none).fits and all(way.size < none.size for _, way in command.better(none))
    slow = replace(stage, layout=replace(layout, tensor=1), hardware=replace(stage.hardware, network=1e8))
    assert "the network between servers, on which ranks wait for fsdp" in command.limit(slow)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RECIPES", {"dynamic": command.RECIPES["dynamic"]})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | LLAMA | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["plan", str(tmp_path), "--device", "H100", "--gpus", "16", "--tokens", "256"]
    assert cli.main([*asked, "--mesh", "fsdp=4,tensor=2,replicate=2", "--micro-batches", "8"]) == 0
    text = capsys.readouterr().out
    assert "64 sequences of 64 tokens" in text and "--micro-batches 8 --recompute 0, micro-batches of 1 seq" in text
    for words in ("bf16       ", "compiled", "eager", "tensor: waits of all", "masters", "NVIDIA H100 SXM has 79"):
        assert words in text
    assert cli.main([*asked, "--json"]) == 0  # the mesh is found
    found = json.loads(capsys.readouterr().out)
    fits = [step["fits"] for kernels in ("compiled", "eager") for step in found[kernels]]
    assert fits == [True] * 4 and found["best"]["seconds"] == min(step["seconds"] for step in found["compiled"])
    assert set(found["best"]["memory"]) == {
        "weights", "masters", "moments", "gradients", "gathered", "activations", "logits",
    }  # fmt: skip
    for flags, says in (
        (["--mesh", "fsdp=4,tensor=2"], "fsdp=8 or --gpus 8 would do"),
        (["--mesh", "fsdp=4,tensor=4"], "tensor may be 1, 2"),
        (["--recompute", "2"], "a share from 0 to 1"),
        (["--mesh", "data=16"], "'data=16' is not KIND=RANKS; kinds are fsdp, replicate"),
        (["--mesh", "fsdp=16", "--micro-batches", "3"], "--micro-batches 3 does not divide the 4 sequences"),
    ):
        assert cli.main([*asked, *flags]) == 2
        assert says in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path), "--device", "H100", "--mesh", "fsdp=4"]) == 2
    assert "add --gpus" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path), "--device", "H100", "--tokens", "64", "--json"]) == 0
    assert {"fused", "other", "memory"} < set(json.loads(capsys.readouterr().out)[0])
