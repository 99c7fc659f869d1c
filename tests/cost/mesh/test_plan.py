"""``octavo plan --gpus``: which meshes fit, what limits and helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import cli
from octavo.cost.mesh import plan

LLAMA = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"num_hidden_layers": 1, "vocab_size": 96, "max_position_embeddings": 64, "use_cache": False}


def test_the_command_for_a_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "RECIPES", {"dynamic": plan.RECIPES["dynamic"]})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | LLAMA
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["plan", str(tmp_path), "--device", "H100", "--gpus", "16", "--tokens", "256"]
    layout = [
        "--mesh",
        "fsdp=4,tensor=2,replicate=2",
        "--micro-batches",
        "8",
        "--recompute",
        "1",
        "--checkpoint-in-fp8",
    ]
    assert cli.main([*asked, *layout]) == 0
    text = capsys.readouterr().out
    assert "64 sequences of 64 tokens" in text and f"{' '.join(layout[2:])}, micro-batches of 1 seq" in text
    for words in ("bf16 compiled ", "eager", "tensor: waits of all", "masters", "NVIDIA H100 SXM has 79"):
        assert words in text
    assert cli.main([*asked, "--algorithm", "muon"]) == 0  # the mesh is found
    text = capsys.readouterr().out
    sizes = text[text.index("GiB a rank") :].splitlines()
    assert sizes[0].split()[3:] == [
        "weights", "masters", "moments", "gradients", "gathered", "activations", "logits", "total", "fits",
    ]  # fmt: skip
    assert [line.split()[-1] for line in sizes[1:5]] == ["yes"] * 4
    assert "compiled, is the fastest that fits" in text and "tensor=" not in text.partition(", by the rates")[0]
    for flags, says in (
        (["--gpus", "16", "--recompute", "2"], "a share from 0 to 1"),
        (["--gpus", "16", "--mesh", "fsdp=16", "--micro-batches", "3"], "3 does not divide the 4 sequences"),
        (["--mesh", "fsdp=4"], "add --gpus"),
        (["--checkpoint-in-fp8"], "add --gpus"),
        (
            ["--gpus", "16", "--moments", "fp8"],
            "--moments, --master, --weight-storage, --update-in-backward, --head, --attention and --loss are",
        ),
        (["--gpus", "16", "--loss", "chunked"], "are for a step on one device"),
    ):
        assert cli.main(["plan", str(tmp_path), "--device", "H100", "--tokens", "256", *flags]) == 2
        assert says in capsys.readouterr().err
