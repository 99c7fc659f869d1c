"""What ``octavo plan`` says: the tables, whether FP8 pays, and which layers to leave out."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import cli, recipes
from octavo.cost import command
from octavo.cost.estimate import estimate
from octavo.cost.rates import PUBLISHED, device_label

H200 = PUBLISHED["H200"]


def plan(tokens: int, *sizes: int) -> str:
    """Of linear layers from each size to the next."""
    with torch.device("meta"):
        layers = [nn.Linear(a, b, dtype=torch.bfloat16) for a, b in itertools.pairwise(sizes)]
    x = torch.empty(tokens, sizes[0], dtype=torch.bfloat16, device="meta")
    found = [estimate(nn.Sequential(*layers), (x,), recipe, H200) for recipe in (None, recipes.delayed())]
    return command.describe_plan(found, H200)


def test_large_layers_pay() -> None:
    text = plan(16384, 8192, 8192, 8192)
    assert "delayed is the fastest: 0." in text and "leave out" not in text and "Don't" not in text


def test_small_layers_do_not() -> None:
    assert "Don't: no recipe takes less than 97% of bf16's time here" in plan(512, 512, 512, 512)


def test_a_small_layer_among_large_ones_is_named() -> None:
    assert "delayed: leave out, as fast in bf16 or faster: 1 of 512 x 8192 (1)" in plan(1024, 16384, 8192, 512)


def test_whether_a_step_fits() -> None:
    assert "A step in any of them fits the 139 GiB of NVIDIA H200." in plan(16384, 8192, 8192)
    text = plan(16384, *[65536] * 7)
    assert "A step in bf16, delayed does not fit the 139 GiB of NVIDIA H200." in text and "the fastest" not in text
    assert "None fits one device: it needs 2" in text
    # in between, the fastest is of those that fit
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192), nn.GELU(), nn.Linear(8192, 8192)).bfloat16()
    x = torch.empty(16384, 8192, dtype=torch.bfloat16, device="meta")
    found = [estimate(model, (x,), recipe, H200) for recipe in (None, recipes.delayed(), recipes.blockwise())]
    sizes = [each.memory.total for each in found]
    found[1] = dataclasses.replace(found[1], memory=dataclasses.replace(found[1].memory, saved={"other": 1 << 40}))
    text = command.describe_plan(found, dataclasses.replace(H200, memory=float(max(sizes))))
    assert "A step in delayed does not fit" in text and "blockwise is the fastest" in text


def test_where_fp8_pays_grows_with_the_tokens() -> None:
    found = command.pays(recipes.delayed(), H200)
    sizes = [found[tokens] for tokens in command.TOKENS]
    assert sizes == sorted(sizes, reverse=True)  # type: ignore[type-var]
    assert set(command.pays(recipes.mx(), H200).values()) == {None}
    text = command.describe_rates(H200)
    assert "at 16384 tokens from 1024 features on" in text and "copy 4.3 TB/s" in text


def test_a_hugging_face_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = command.from_hugging_face(tmp_path / "config.json")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    found = estimate(model, command.tokens_of(64, 32), recipes.dynamic(), H200, select=lambda module, name: True)
    assert len(found.layers) == 8  # the head too
    for flags, says in ((["--layers", "9"], "--layers"), (["--width", "2", "--heads", "1"], "--heads, --width")):
        assert cli.main(["plan", str(tmp_path), "--device", "H200", *flags]) == 2
        assert f"{says}: the model's sizes are those of {tmp_path}" in capsys.readouterr().err
    monkeypatch.setattr(command, "RECIPES", {"dynamic": recipes.dynamic})
    for flags, says in (([], "1 sequences of 2048 tokens"), (["--context", "64"], "32 sequences of 64 tokens")):
        assert cli.main(["plan", str(tmp_path), "--device", "H200", "--tokens", "2048", *flags]) == 0
        assert says in capsys.readouterr().out  # 2048: a Llama's, where the file says nothing else
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(command.PlanError, match="no configuration of a causal language model"):
        command.from_hugging_face(tmp_path)
    with pytest.raises(command.PlanError, match=r"nowhere does not exist: give a config.json"):
        command.from_hugging_face(Path("nowhere"))


def test_tokens_are_whole_sequences() -> None:
    assert command.tokens_of(96, 32)[0].shape == (3, 32)
    for tokens in (16, 100):
        with pytest.raises(command.PlanError, match="must be a multiple of the context, 32"):
            command.tokens_of(tokens, 32)
    assert [command.tokens_of(None, context)[0].shape for context in (128, 3000, 131072)] == [
        (128, 128), (5, 3000), (1, 131072)
    ]  # fmt: skip


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    size = ["--width", "64", "--layers", "2", "--heads", "2", "--context", "32", "--tokens", "128"]
    assert cli.main(["plan", *size]) == 2
    assert "octavo: error: the rates of this device" in capsys.readouterr().err
    here = dataclasses.replace(H200, device=device_label(torch.device("cpu")))
    monkeypatch.setattr("octavo.cost.measure", lambda: here)
    assert cli.main(["info", "--measure"]) == 0
    assert "at 16384 tokens from 1024 features on" in capsys.readouterr().out
    assert cli.main(["plan", *size]) == 0
    found = capsys.readouterr().out
    assert "4 sequences of 32 tokens" in found and "Don't" in found
    assert "no layer is faster than in bf16: dynamic, delayed, rowwise, blockwise, mx" in found
    assert cli.main(["plan", str(tmp_path), "--device", "H200"]) == 2
    assert "no configuration of a causal language model" in capsys.readouterr().err
