from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import octavo
from octavo import E4M3, PerBlock, PerRow, PerTensor, recipes
from octavo.errors import ExportError
from octavo.export import iterate_fp8, layouts, to_safetensors
from octavo.export.layouts import LAYOUTS, AnyLayout, FileLayout, entries, weight_scale_shape
from octavo.weights.operands import pair_reader
from tests.export.test_checkpoints import dequantized, seen_operands
from tests.support.combinations import in_full
from tests.support.helpers import stepped, to_fp8
from tests.support.pool import Pool
from tests.support.processes import ROOT
from tests.support.tiny_models import decoder

SIZES: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts_per_tok": 2}
GRANULARITIES = {"blockwise": PerBlock(128, 128), "rowwise": PerRow(), "dynamic": PerTensor(), "delayed": PerTensor()}
IN_HIGH_PRECISION = {"lm_head": None, "*.gate": None}
IN_PAGES = ("blockwise", "mx", "rowwise", "dynamic", "delayed")


def test_types_pages_and_configurations_are_of_the_layouts_of_the_table():
    of_files = {name: layout for name, layout in LAYOUTS.items() if layout.config is not None}
    assert [*get_args(AnyLayout)] == [*LAYOUTS] == re.findall(r"^    (\S+) +weight \[", layouts.__doc__, re.MULTILINE)
    assert [*get_args(FileLayout)] == [*of_files]
    rollout, export = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("rollout.md", "export.md"))
    assert re.findall(r'^\| `"(\S+)"` \|', rollout, re.MULTILINE) == [*LAYOUTS]
    in_rollout = dict(re.findall(r'^\| `"(\S+)"` \|.*\| `(\{.+?\})`', rollout, re.MULTILINE))
    (columns,) = re.findall(r"^\| recipe \(by the weight's cast\) (.+)$", export, re.MULTILINE)
    assert re.findall(r'`"(\S+)"`', columns) == [*of_files]
    first_config: dict[str, Any] = {}
    for name, layout in of_files.items():
        net = to_fp8(nn.Sequential(nn.Linear(128, 128)), getattr(recipes, layout.recipe)())
        net.append(nn.Linear(128, 128))
        config = layout.config(*entries(net, name)[1:])
        assert config["quant_method"] == layout.method, name
        if name in in_rollout:  # else the page says that to_safetensors writes it
            on_page = json.loads(in_rollout[name])
            assert on_page.items() <= config.items(), f"{name}: docs/rollout.md has other keys"
            first_config = first_config or config
            differ = {key for key, value in config.items() if first_config.get(key) != value}
            assert differ <= on_page.keys(), f"{name}: docs/rollout.md lacks what it has unlike the first layout"
        assert '["1"]' in json.dumps(config), "a server has to know which matrices are in high precision"


def test_pages_say_which_layouts_hold_which_recipes() -> None:
    rollout, export = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("rollout.md", "export.md"))

    def holds(layout: str, recipe: str) -> bool:
        try:
            entries(to_fp8(nn.Sequential(nn.Linear(128, 128)), getattr(recipes, recipe)()), layout)
        except ExportError:
            return False
        return True

    layouts_of_table = re.findall(r'`"(\S+)"`', re.findall(r"^\| recipe \(by the weight's cast\).+$", export, re.M)[0])
    in_table: dict[str, list[str]] = {name: [] for name in layouts_of_table}
    for row in re.findall(r"^\| (`\w+`.* \(.+\) \|.+) \|$", export, re.MULTILINE):
        first, *cells = row.split(" | ")
        for name, cell in zip(layouts_of_table, cells, strict=True):
            assert cell.partition(":")[0].partition(";")[0] in ("works", "refused"), row
            in_table[name] += re.findall(r"`(\w+)`", first) if cell.startswith("works") else []
    in_rollout = dict(re.findall(r'^\| `"(\S+)"` \| [^|]+\| [^|]+\| ([^|]+) \|', rollout, re.MULTILINE))
    methods = dict(re.findall(r'^\| `"(\S+)"` \|.*\| `\{"quant_method": "(\w+)"', rollout, re.MULTILINE))
    for name, layout in LAYOUTS.items():
        expected = {recipe for recipe in IN_PAGES if holds(name, recipe)}
        assert {*re.findall(r"`(\w+)`", in_rollout[name])} == expected, name
        assert name not in in_table or {*in_table[name]} == expected, name
        assert layout.method is None or methods.get(name, layout.method) == layout.method


def mixtral(intermediate: int = 256) -> nn.Module:
    return decoder("Mixtral", **SIZES, intermediate_size=intermediate, num_local_experts=4).bfloat16()


def qwen3() -> nn.Module:
    return decoder("Qwen3Moe", **SIZES, moe_intermediate_size=128, num_experts=4, head_dim=64).bfloat16()


def gpt_oss() -> nn.Module:
    return decoder("GptOss", **SIZES, intermediate_size=128, num_local_experts=4, head_dim=64).bfloat16()


def in_fp8(model: nn.Module, recipe: str) -> nn.Module:
    recipe_of_model = recipes.rowwise(power_of_two=True) if recipe == "rowwise" else getattr(recipes, recipe)()
    return octavo.convert(model, octavo.RecipeMap(recipe_of_model, IN_HIGH_PRECISION), lambda module, name: True)


def values(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the values of a pair, of any layout."""
    for dim, size in enumerate(codes.shape if scale_inv.ndim == 2 else ()):
        scale_inv = scale_inv.repeat_interleave(-(-size // scale_inv.shape[dim]), dim).narrow(dim, 0, size)
    return codes.float() * scale_inv


WRITTEN = [(mixtral, "blockwise", "fine-grained"), (qwen3, "rowwise", "compressed-tensors")]
WRITTEN += in_full((mixtral, "dynamic", "per-tensor"))


@pytest.mark.parametrize(("make", "recipe", "layout"), WRITTEN)
def test_each_expert_has_its_checkpoints_names_and_values(make: Any, recipe: str, layout: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain/model.safetensors")
    written = {name: pair for name, *pair in iterate_fp8(in_fp8(model, recipe).eval(), layout)}
    assert written.keys() == plain.keys()
    for name, (tensor, scale_inv) in written.items():
        if scale_inv is None:
            assert torch.equal(tensor, plain[name])
            continue
        # gate and up of a tensor's one scale have the larger one's; other scales are each matrix's own
        shared = layout != "fine-grained" and GRANULARITIES[recipe] == PerTensor() and "experts" in name
        powers = recipe in ("blockwise", "rowwise")
        alone = octavo.quantize(plain[name], E4M3, GRANULARITIES[recipe], power_of_two=powers)
        if not shared or ".w2." in name or "down" in name:
            assert torch.equal(tensor.float(), alone.qdata.float())
        assert (values(tensor, scale_inv) - plain[name].float()).norm() < 0.03 * plain[name].float().norm()
    experts = [name for name, (_, scale_inv) in written.items() if "experts" in name and scale_inv is not None]
    assert len(experts) == 4 * 3


@pytest.mark.parametrize("training", [True, False])
def test_the_codes_are_those_of_the_forward(training: bool) -> None:
    model = in_fp8(mixtral(), "delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = torch.randint(64, (2, 8))
    for _ in range(2):  # so that a delayed scale is an earlier weight's
        stepped(optimizer, model(input_ids=tokens, labels=tokens).loss)
    model.train(training)
    pairs = {name: codes_and_scales for name, *codes_and_scales in iterate_fp8(model, "per-tensor", fp8_only=True)}
    with seen_operands() as operands, torch.no_grad():
        model(input_ids=tokens)
    gate_up, down = (pair for pair in operands if pair[0].ndim == 3)
    prefix = "model.layers.0.block_sparse_moe.experts"
    for expert in range(4):
        gate, up, last = (pairs[f"{prefix}.{expert}.{name}.weight"] for name in ("w1", "w3", "w2"))
        assert torch.equal(torch.cat([gate[0], up[0]]).view(torch.uint8), gate_up[0][expert].view(torch.uint8))
        assert gate[1] == up[1] == gate_up[1][expert].squeeze()
        assert torch.equal(last[0].view(torch.uint8), down[0][expert].view(torch.uint8))
        assert last[1] == down[1][expert].squeeze()


def test_transformers_reads_the_file(tmp_path: Path) -> None:
    model = in_fp8(mixtral(), "blockwise").eval()
    to_safetensors(model, tmp_path / "served", max_shard_bytes=100_000)  # an expert's matrices in several files
    config = json.loads((tmp_path / "served/config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["model.layers.0.block_sparse_moe.gate", "lm_head"]
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.bfloat16)
    experts, weight = read.model.layers[0].mlp.experts, model.get_parameter("model.layers.0.mlp.experts.down_proj")
    for mine, plain in zip(experts.down_proj, weight, strict=True):
        assert torch.equal(mine, octavo.quantize(plain, E4M3, PerBlock(128, 128), power_of_two=True).dequantize())
    tokens = torch.randint(64, (1, 8))
    torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=0.2, atol=0.05)


def test_experts_that_keep_their_tensors() -> None:
    """octavo's experts, and those in high precision, keep their tensors, by state_dict's names."""
    experts = octavo.nn.Experts(3, 128, 256, recipe=recipes.blockwise())
    shapes = {name: (codes.shape, scale_inv.shape) for name, codes, scale_inv in iterate_fp8(experts)}  # type: ignore[union-attr]
    assert shapes == {"gate_up.weight": ((3, 512, 128), (3, 4, 1)), "down.weight": ((3, 128, 256), (3, 1, 2))}
    layers = octavo.RecipeMap(recipes.blockwise(), {**IN_HIGH_PRECISION, "*.experts": None})
    model = octavo.convert(mixtral(), layers, lambda module, name: True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in [name for name, *_ in iterate_fp8(model)]


@pytest.mark.parametrize(
    ("make", "exceptions", "says"),
    [
        (gpt_oss, {}, r"GptOssExperts stores it as \[E, K, N\], which no reader takes in FP8"),
        (mixtral, {"*.experts.down": None}, "other matrices of the same experts are not in FP8"),
        (lambda: mixtral(192), {}, "blocks of 128 rows reach from one of its 2 matrices of 192 rows into the next"),
    ],
)
def test_what_no_server_reads_is_refused(make: Any, exceptions: dict[str, None], says: str) -> None:
    layers = octavo.RecipeMap(recipes.blockwise(), {"lm_head": None, **exceptions})
    model = octavo.convert(make(), layers, lambda module, name: not name.endswith((".router", ".gate")))
    with pytest.raises(ExportError, match=says):
        iterate_fp8(model)


def tensors(model: nn.Module) -> list[tuple[str, list[int], float]]:
    """Return names, shapes and a few values of the iterated tensors."""
    sums = ((name, t, 0.0 if s is None else float(s.sum())) for name, t, s in iterate_fp8(model))
    return [(name, [*t.shape], float(t.float().sum()) + of_scales) for name, t, of_scales in sums]


def tensors_of_ranks(mesh: Any, how: str) -> list[tuple[str, list[int], float]]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = in_fp8(mixtral(), "blockwise")
    if how == "expert_parallel, stored":
        octavo.convert(model, recipes.blockwise(), lambda module, name: ".experts." in name, "fp8")
        assert sum(hasattr(parameter, "qdata") for parameter in model.parameters()) == 2
    if how == "fully_shard":
        fully_shard(model.model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        octavo.distributed.expert_parallel(model, mesh)
    return tensors(model)


@pytest.mark.full  # each rank imports transformers' models
@pytest.mark.parametrize("how", ["fully_shard", "expert_parallel", "expert_parallel, stored"])
def test_experts_on_several_ranks_are_gathered(pool: Pool, how: str) -> None:
    torch.manual_seed(0)
    alone = tensors(in_fp8(mixtral(), "blockwise"))
    assert pool.run(tensors_of_ranks, (2,), how) == [alone, alone]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_holds_what_its_recipe_casts(name):
    """Values, the scales' name and the server's method are those of the page."""
    layout, net = LAYOUTS[name], to_fp8(nn.Sequential(nn.Linear(192, 300)), getattr(recipes, LAYOUTS[name].recipe)())
    planned, layers, skipped = entries(net, name)
    assert [(entry.key, entry.layer) for entry in planned] == [("0.weight", net[0]), ("0.bias", None)]
    assert (layers, skipped) == ({"0": net[0]}, [])
    ((key, codes, scales),) = planned[0].read(True, pair_reader(net))
    shapes = {"blockwise": (3, 2), "rowwise": (300, 1), "mx": (300, 6)}
    assert scales.shape == weight_scale_shape(net[0]) == shapes.get(layout.recipe, (1,))
    assert (key, codes.dtype) == ("0.weight", torch.float8_e4m3fn)
    scales = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales
    assert torch.equal(values(codes, scales), dequantized(net[0]))
    lines = (ROOT / "docs/rollout.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith(f'| `"{name}"`')]
    assert f"`weight{layout.scale_ending}`" in row and f"`{layout.recipe}`" in row


def test_codes_that_no_product_reads_are_not_taken_for_values():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    octavo.convert(net, recipes.dynamic(), lambda module, name: True, "fp8")
    octavo.set_recipe(net, octavo.RecipeMap(recipes.dynamic(), {"1": None}))
    with pytest.raises(ExportError, match=r"1\.weight is stored in FP8, but its layer's recipe has no FP8 output"):
        entries(net, "per-tensor")


def test_a_wrapper_that_renames_tensors_is_refused():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = to_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), recipes.blockwise())
    net[1] = checkpoint_wrapper(net[1])
    with pytest.raises(ExportError, match=r"1._checkpoint_wrapped_module.weight is not in the model's state_dict"):
        entries(net, "fine-grained")
