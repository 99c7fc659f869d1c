"""``octavo plan``: tables, whether FP8 pays, what to leave out; which meshes fit, what limits and helps."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import octavo
from octavo import checkpoint_in_fp8, cli, recipes
from octavo.cost import command
from octavo.cost.estimate import FUSED_BF16, Estimate, estimate, orthogonalising
from octavo.cost.mesh import Hardware, MeshLayout, Precision, Shapes, Stage, Weight
from octavo.cost.rates import PUBLISHED, PlanError, device_label, with_attention
from octavo.cost.work import work_of
from octavo.nn.checkpointing import watched
from octavo.train import GPT, ModelConfig
from octavo.weights.stored import local_stored

H200 = PUBLISHED["H200"]


def steps(tokens: int, *sizes: int) -> list[Estimate]:
    """Return plans of linear layers from each size to the next, in bf16 and delayed."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(a, b, dtype=torch.bfloat16) for a, b in itertools.pairwise(sizes)))
    x = (torch.empty(tokens, sizes[0], dtype=torch.bfloat16, device="meta"),)
    work = work_of(layers, x)
    return [estimate(layers, x, recipe, H200, work=work) for recipe in (None, recipes.delayed())]


def plan(*sizes: int) -> str:
    """Return the text about such layers, of so many tokens."""
    return command.describe_plan(steps(*sizes), H200)


def test_large_layers_pay_and_small_ones_do_not() -> None:
    text = plan(16384, 8192, 8192, 8192)
    assert "delayed is the fastest: 0." in text and "leave out" not in text and "Don't" not in text
    assert "A step in any of them fits the 139 GiB of NVIDIA H200." in text
    assert "Don't: no recipe takes less than 97% of bf16's time here" in plan(512, 512, 512, 512)
    assert "delayed: leave out, as fast in bf16 or faster: 1 of 512 x 8192 (1)" in plan(1024, 16384, 8192, 512)


def test_bf16_with_the_same_fusions_is_a_row_beside_which_the_best_is_named() -> None:
    bf16, fp8 = steps(16384, 8192, 8192)
    rates = PUBLISHED["H100"]
    fused = replace(bf16, name=FUSED_BF16, other=bf16.other - 0.1 * bf16.products, host=(), device=())
    text = command.describe_plan([bf16, fused, fp8], rates)
    assert "delayed is the fastest" in text and f"\n{FUSED_BF16} " in text
    assert f"delayed takes {fp8.total / fused.total:.2f} of bf16's time with the same fusions" in text
    assert "same fusions" not in command.describe_plan([bf16, fp8], rates)
    for kernel, rate in (("flash", "228"), ("cudnn", "334")):
        lines = command.describe_plan([bf16, fp8], with_attention(rates, kernel)).splitlines()
        assert lines[1].startswith(f"causal attention by {kernel}: {rate} TFLOP/s with heads of 64 and")
        assert "(published: arXiv 2407.08608)" in lines[1]
    with pytest.raises(PlanError, match="no rate of cudnn attention is published of NVIDIA B200; of H100, H200"):
        with_attention(PUBLISHED["B200"], "cudnn")


def test_which_steps_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are of bf16, with fuse also of bf16 with the same fusions, and of each recipe, the head by another."""
    asked: list[tuple[Any, Any, Any]] = []
    (bf16, fp8), model = steps(64, 64, 64), GPT(ModelConfig(width=64, layers=1, heads=2, context=16)).bfloat16()

    def note(*arguments: Any, **how: Any) -> Estimate:
        asked.append((arguments[2], how["fuse"], how.get("chunked_loss", False)))
        return bf16 if arguments[2] is None else fp8

    monkeypatch.setattr(command, "estimate", note)
    tokens = (torch.empty(4, 16, dtype=torch.int64, device="meta"),)
    plans = command.estimates(model, tokens, H200, head="dynamic_with_output_hp", chunked_loss=True, fuse=True)
    assert [each.name for each in plans[2:]] == list(command.RECIPES)
    assert asked[:2] == [(None, False, False), (None, True, False)]
    for name, (recipe, fuse, chunked) in zip(command.RECIPES, asked[2:], strict=True):
        assert fuse and chunked and recipe.default.name == name
        assert [recipe.of(layer).name for layer in ("head", "blocks.0.mlp.fc1")] == ["dynamic_with_output_hp", name]
    assert len(command.estimates(model, tokens, H200, fuse=False)) == 1 + len(command.RECIPES)
    stored = command.estimates(model, tokens, H200, weight_storage="fp8", fuse=False)
    assert [each.name for each in stored[1:]] == ["dynamic", "delayed", "blockwise"]
    with pytest.raises(PlanError, match="--head dynamic: no layer of this model computes logits"):
        command.estimates(nn.Linear(8, 8), (torch.ones(2, 8),), H200, head="dynamic")


def test_whether_a_step_fits() -> None:
    text = plan(16384, *[65536] * 7)
    assert "A step in bf16, delayed does not fit the 139 GiB of NVIDIA H200." in text and "the fastest" not in text
    assert "None fits one device: it needs 2" in text
    # in between, the fastest of the meshes that fit
    bf16, fp8 = steps(16384, 8192, 8192)
    larger = replace(fp8, name="larger", products=0.0, memory=replace(fp8.memory, weights=1 << 40))
    text = command.describe_plan([bf16, larger, fp8], replace(H200, memory=float(max(bf16.peak, fp8.peak))))
    assert "A step in larger does not fit" in text and "delayed is the fastest" in text


def test_tables_fit_a_line() -> None:
    """A table of large numbers has at most 100 characters a line; a wider one goes on below."""
    bf16, fp8 = steps(16384, 8192, 8192)
    slow = [replace(fp8, name=name, products=5.0, casts=1.0, other=2.0) for name in ("blockwise", FUSED_BF16)]
    lines = command.tables([bf16, *slow]).splitlines()
    assert max(map(len, lines)) <= 100 and [len(line.split()) for line in lines[1:3]] == [14, 10]
    assert lines[3].split()[5] == f"{1e3 * slow[0].total:.2f}"
    rows = [["step", *(f"column {place}" for place in range(12))], ["bf16", *"abcdefghijkl"]]
    one, other = (table.splitlines() for table in command.folded(rows).split("\n\n"))
    assert max(map(len, (*one, *other))) <= 100 and one[1].split()[0] == other[1].split()[0] == "bf16"
    assert [*one[1].split()[1:], *other[1].split()[1:]] == [*"abcdefghijkl"]


def test_weights_in_fp8_and_updates_in_backward_are_planned_as_a_training_keeps_them() -> None:
    config = ModelConfig(width=64, layers=2, heads=2, context=16)
    model, inputs = GPT(config).bfloat16(), command.tokens_of(16, 16)
    optimizer_class = command.optimizer_of(model, "adamw", "fp8", "split16", 1024)
    stored: Any = {"optimizer": optimizer_class, "weight_storage": "fp8"}
    planned = command.step_in("blockwise", model, inputs, H200, work_of(model, inputs), **stored)
    octavo.convert(model, recipes.blockwise(), weight_storage="fp8")
    optimizer = octavo.optim.AdamW(model.parameters(), moments="fp8", master="split16")
    handle = octavo.optim.update_in_backward(optimizer, 1024)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model(tokens).float().sum().backward()
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


def test_the_smallest_change_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are tried from those that change least on; the bytes here are made up, and each change saves some."""

    def step(name: str, model: Any, inputs: Any, rates: Any, work: Any, **options: Any) -> Any:
        state = 100 if options.get("weight_storage") else {"fp32": 1000, "fp8": 500}[options["optimizer"]["moments"]]
        return SimpleNamespace(peak=state + inputs[0].numel() * (0.9 if options.get("fuse") else 1))

    monkeypatch.setattr(command, "step_in", step)
    monkeypatch.setattr(command, "work_of", lambda model, inputs: None)
    monkeypatch.setattr(command, "optimizer_of", lambda model, **options: options)

    def change(room: float) -> str:
        rates, state = replace(H200, memory=room), {"algorithm": "adamw", "moments": "fp32", "master": "auto"}
        inputs = command.tokens_of(1024, 256)
        return command.change_that_fits(nn.Linear(2, 2), inputs, rates, state, optimizer={"moments": "fp32"})

    in_fp8 = "--weight-storage fp8 --moments fp8 --master split16 --update-in-backward 64MB"
    for room, flags in (
        (1950, "--fuse"), (1600, "--tokens 512, with as many more micro-batches"), (1300, "--tokens 256, with as many"),
        (1200, in_fp8), (400, f"{in_fp8} --fuse --tokens 256. delayed takes 0 GiB then."),
    ):  # fmt: skip
        assert change(room).startswith(f"The smallest change that fits: {flags}")
    too_large = f"Not even {in_fp8} --fuse --tokens 256 is enough (0 GiB). Plan for several devices: --gpus 4 or more."
    assert change(100) == too_large


def test_where_fp8_pays_grows_with_the_tokens() -> None:
    sizes_of_tokens = command.pays(recipes.delayed(), H200)
    sizes = [sizes_of_tokens[tokens] for tokens in command.TOKENS]
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
    for flags, says in ((["--layers", "9"], "--layers"), (["--width", "2", "--heads", "1"], "--heads, --width")):
        assert cli.main(["plan", str(tmp_path), "--device", "H200", *flags]) == 2
        assert f"{says}: the model's sizes are those of {tmp_path}" in capsys.readouterr().err
    monkeypatch.setattr(command, "RECIPES", {"dynamic": recipes.dynamic})
    assert command.context_of(model) == 2048  # a Llama's, where the file says nothing else
    assert cli.main(["plan", str(tmp_path), "--device", "H200", "--tokens", "2048", "--context", "64"]) == 0
    assert "32 sequences of 64 tokens" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(command.PlanError, match="no configuration of a causal language model"):
        command.from_hugging_face(tmp_path)
    with pytest.raises(command.PlanError, match=r"nowhere does not exist: give a config.json"):
        command.from_hugging_face(Path("nowhere"))


def sizes_of(optimizer: Any) -> Counter[str]:
    """Return the bytes of an optimizer's state by name, codes with their scales."""
    sizes: Counter[str] = Counter()
    for state in optimizer.state.values():
        for name, tensor in state.items():
            sizes[name.removesuffix("_codes").removesuffix("_scale_inv")] += tensor.nbytes
    return sizes


@pytest.mark.parametrize(
    ("algorithm", "moments", "master"),
    [
        ("muon", "fp8", "split24"),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("muon", "bf16", None), ("adamw", "fp32", "auto"))),
    ],
)
def test_the_bytes_of_an_optimizer_are_those_after_a_step(algorithm: str, moments: str, master: str | None) -> None:
    config = ModelConfig(width=32, layers=1, heads=2, context=16, experts=4)
    model, inputs = GPT(config).bfloat16(), command.tokens_of(16, 16)
    optimizer_class = command.optimizer_of(model, algorithm, moments, master)
    planned = estimate(model, inputs, recipes.dynamic(), H200, optimizer=optimizer_class)
    optimizer: Any = optimizer_class(model.parameters())
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
        products = sum(orthogonalising(param.shape, H200) for param in first)
    moved = 2 * (memory.weights + memory.masters + memory.moments) + memory.gradients
    assert planned.optimizer == pytest.approx(moved / H200.copy + products) and (products > 0) == (algorithm == "muon")


def test_what_checkpointed_layers_keep_in_fp8() -> None:
    x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    with watched() as bytes_of_layers:
        checkpoint_in_fp8(torch.sin, x)
    assert bytes_of_layers[""] == (1, 2 * x.numel(), command.in_pairs(96) * x.numel())


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
    size = ["--width", "64", "--layers", "1", "--heads", "2", "--context", "32", "--tokens", "128"]
    assert cli.main(["plan", *size]) == 2
    assert "octavo: error: the rates of this device" in capsys.readouterr().err
    rates_of_cpu = replace(H200, device=device_label(torch.device("cpu")))
    monkeypatch.setattr("octavo.cost.measure", lambda: rates_of_cpu)
    assert cli.main(["info", "--measure"]) == 0
    assert "at 16384 tokens from 1024 features on" in capsys.readouterr().out
    monkeypatch.setattr(command, "RECIPES", {name: command.RECIPES[name] for name in ("dynamic", "mx")})
    assert cli.main(["plan", *size, "--algorithm", "muon", "--moments", "fp8", "--master", "split24"]) == 0
    text = capsys.readouterr().out
    assert "4 sequences of 32 tokens" in text and "Don't" in text and "by muon, moments fp8, master split24" in text
    assert "dynamic, mx: no layer is faster than in bf16: 1 of 192 x 64 (blocks.0.attention.qkv.linear), 1 of" in text
    stored = ["--weight-storage", "fp8", "--moments", "fp8", "--master", "split16", "--update-in-backward", "1KB"]
    assert cli.main(["plan", *size, *stored]) == 0
    text = capsys.readouterr().out
    assert "master split16, weights in FP8 under the recipes, updates in backward by 1KB\n" in text
    assert "\ndynamic " in text and "\nmx " not in text  # whose weights can't be stored
    options = ["--device", "H100", "--attention", "cudnn", "--loss", "chunked"]
    assert cli.main(["plan", *size, *options]) == 2  # so small a head is not converted
    assert "a chunked loss: the gradients of head are no products in FP8" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path), "--device", "H200"]) == 2
    assert "no configuration of a causal language model" in capsys.readouterr().err


LLAMA = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 64, "use_cache": False}


def meta(model_class: type, config: object) -> torch.nn.Module:
    with torch.device("meta"):
        return model_class(config).bfloat16()  # type: ignore[no-any-return]


def test_shapes_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SOME", 1)
    model = meta(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA))
    short = command.shortened(model)
    shapes = command.shapes_of(model, work_of(short, command.tokens_of(64, 64)), 64, None)
    assert shapes.block[:4] == (
        Weight(64 + 2 * 32, 64, True, "out"), Weight(64, 64, True, "in"), Weight(2 * 176, 64, True, "out"),
        Weight(64, 176, True, "in"),
    )  # fmt: skip
    assert (shapes.layers, shapes.width, shapes.heads, shapes.attention) == (2, 64, (4, 2), 64)
    assert shapes.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), abs=64)
    assert len(short.model.layers) == 1 and len(model.model.layers) == 2  # type: ignore[union-attr,arg-type]
    ideal = 10 * 64 + 2 * (64 + 2 * 32) + 3 * 176  # read and written by kernels that are fused by hand
    assert ideal < shapes.elementwise < 2 * ideal
    whole = command.shapes_of(model, work_of(model, command.tokens_of(64, 64)), 64, {"norms": 6400})
    assert (
        whole.block == shapes.block and 20 < whole.launches < 150 and shapes.launches == 0
    )  # asking for a device is none
    assert whole.elementwise > 2 * shapes.elementwise and whole.saved == 6400 / 64 / 2


def test_shapes_of_the_trainers_models_with_and_without_experts() -> None:
    for experts, splits in ((0, ["out", "in", "out", "in"]), (4, ["out", "in", None, "experts", "experts"])):
        model = meta(GPT, ModelConfig(64, 2, 2, 32, experts=experts, top_k=2 if experts else 1))
        work = work_of(command.shortened(model), command.tokens_of(32, 32))
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


def test_the_command_for_a_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RECIPES", {"dynamic": command.RECIPES["dynamic"]})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | LLAMA | {"num_hidden_layers": 1}
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
    for mesh, says in (
        ("fsdp=4,tensor=2", "fsdp=8 or --gpus 8 would do"),
        ("data=16", "'data=16' is not KIND=RANKS; kinds are fsdp, replicate"),
    ):
        with pytest.raises(PlanError, match=says):
            command.mesh_of(mesh, 16)
