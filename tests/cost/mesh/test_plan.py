"""``octavo plan --gpus``: which meshes fit and are better, what limits a step and helps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import checkpoint_in_fp8, cli
from octavo.cost.mesh import plan
from octavo.cost.mesh.plan import fastest_mesh, fp8_region_bytes, improvements, limit, merit
from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.settings import MeshLayout, Precision
from octavo.cost.mesh.shapes import Shapes, Weight
from octavo.cost.mesh.step import RankStep
from octavo.nn.checkpointing import region_counts
from tests.support.meshes import BF16, LLAMA, SHAPES


def test_the_command_for_a_mesh(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "COMPARED", ("dynamic",))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1} | LLAMA
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["plan", str(tmp_path), "--device", "H100", "--gpus", "16", "--tokens", "256"]
    layout = "--mesh fsdp=4,tensor=2,replicate=2 --micro-batches 8 --recompute 1 --checkpoint-in-fp8".split()
    assert cli.main([*asked, *layout]) == 0
    text = capsys.readouterr().out
    assert "64 sequences of 64 tokens" in text and f"{' '.join(layout[2:])}, micro-batches of 1 seq" in text
    for words in ("bf16 compiled ", "eager", "tensor: waits of all", "masters", "NVIDIA H100 SXM has 79"):
        assert words in text
    assert cli.main([*asked, "--algorithm", "muon"]) == 0  # the mesh is found
    text = capsys.readouterr().out
    sizes = text[text.index("GiB a rank") :].splitlines()
    kinds = "weights masters moments gradients gathered activations logits total fits"
    assert sizes[0].split()[3:] == kinds.split()
    assert [line.split()[-1] for line in sizes[1:5]] == ["yes"] * 4
    assert "compiled, is the fastest that fits" in text and "tensor=" not in text.partition(", by the rates")[0]
    assert cli.main([*asked, "--micro-batches", "8", "--recompute", "0.5"]) == 0  # more than a rank of 16 has
    flags = capsys.readouterr().out.partition(", micro-batches of")[0]
    assert flags.endswith("--micro-batches 8 --recompute 0.5")
    for flags, says in (
        (["--gpus", "16", "--recompute", "2"], "a share from 0 to 1"),
        (["--gpus", "16", "--mesh", "fsdp=16", "--micro-batches", "3"], "3 does not divide the 4 sequences"),
        (["--gpus", "16", "--micro-batches", "3"], "on no mesh of 16 GPUs has a rank so many"),
        (["--gpus", "16", "--micro-batches", "0"], "--micro-batches 0: at least one"),
        (["--micro-batches", "0"], "add --gpus"),
        (["--mesh", "fsdp=4"], "add --gpus"),
        (["--checkpoint-in-fp8"], "add --gpus"),
        (["--gpus", "16", "--moments", "fp8"], "--moments, --master, --weight-storage, --update-in-backward, --head"),
        (["--gpus", "16", "--loss", "chunked"], "are for a step on one device"),
    ):
        assert cli.main(["plan", str(tmp_path), "--device", "H100", "--tokens", "256", *flags]) == 2
        assert says in capsys.readouterr().err


def test_what_limits_and_what_to_change() -> None:
    block = Weight(10240, 8192, True, "out"), Weight(8192, 8192, True, "in"), Weight(8192, 22528, True, "in")
    wide = Shapes("", 8192, 12, block, (Weight(0), Weight(12288, 8192)), 8192, 200000, heads=(64, 8))
    layout = MeshLayout(64, 128, 8192, tensor=2, micro_batch_size=2)
    rank = RankStep(wide, layout, Precision("dynamic", gathers=True, pairs=True), Hardware())
    assert "of the step is products" in limit(rank) and "NVLink" in limit(rank)
    small = replace(rank, hardware=replace(rank.hardware, memory=0.7 * rank.bytes_needed))
    ways = improvements(small)
    orders = [merit(way) for _, way in ways]
    assert ways and ways[0][1].fits and orders == sorted(orders, reverse=True)
    assert fastest_mesh(small).fits and merit(fastest_mesh(small)) >= merit(ways[0][1])
    none = replace(rank, hardware=replace(rank.hardware, memory=1e6))
    assert not fastest_mesh(none).fits and all(way.bytes_needed < none.bytes_needed for _, way in improvements(none))
    slow = replace(rank, layout=replace(layout, tensor=1), hardware=replace(rank.hardware, network=1e8))
    assert "the network between servers, on which ranks wait for fsdp" in limit(slow)


def test_another_mesh_is_named_where_this_one_is_too_small_and_no_link_where_none_limits() -> None:
    layout = MeshLayout(8, 64, 1024, micro_batch_size=4)
    rank = RankStep(SHAPES, layout, BF16, Hardware())
    small = replace(rank, hardware=replace(rank.hardware, memory=0.5 * rank.bytes_needed))
    other = replace(small, layout=replace(layout, tensor=2), hardware=replace(rank.hardware, memory=rank.bytes_needed))
    lines = list(plan.MeshPlan({"compiled": [small]}, small, [("half", other)], other)._what_to_change())
    assert lines[0].startswith("change first: half: ") and lines[1].startswith("bf16 fits with ")
    assert "tensor=2" in lines[1] and f": {other.bytes_needed / plan.GIB:.0f} GiB" in lines[1]
    alone = replace(rank, layout=MeshLayout(1, 64, 1024, micro_batch_size=4))
    assert limit(alone).endswith("; no link limits") and "% of the step is" in limit(alone)


def test_what_checkpointed_layers_keep_in_fp8() -> None:
    x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    with region_counts() as bytes_of_layers:
        checkpoint_in_fp8(torch.sin, x)
    assert bytes_of_layers[""] == (1, 2 * x.numel(), fp8_region_bytes(96) * x.numel())
