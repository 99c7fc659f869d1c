"""Exported files are standard ONNX, hold FP8 weights, and compute in onnxruntime what octavo computes."""

import copy
import functools
import importlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.errors import ExportError, MissingExtraError
from octavo.export import onnx_model, run_onnx, sqnr_in_onnxruntime, to_onnx
from octavo.train.config import ModelConfig
from octavo.train.mixture import Mixture
from octavo.train.trainer import build_model
from tests.support.helpers import FP8_RECIPES, sqnr

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

K = 96  # not a multiple of blocks of 128
MODULES = {
    "Linear": lambda **options: octavo.nn.Linear(K, 40, **options),
    "LayerNormLinear": lambda **options: octavo.nn.LayerNormLinear(K, {"a": 32, "b": 16}, **options),
    "RMSNormLinear": lambda **options: octavo.nn.RMSNormLinear(K, 40, zero_centered_gamma=True, **options),
    "LayerNormMLP": lambda **options: octavo.nn.LayerNormMLP(K, 160, "gelu", **options),
    "RMSNormMLP": lambda **options: octavo.nn.RMSNormMLP(K, 160, "geglu_tanh", bias=False, **options),
    "TransformerBlock": lambda **options: octavo.nn.TransformerBlock(K, 160, 6, 2, **options),
}
ALL_RECIPES = {**FP8_RECIPES, "high_precision": recipes.high_precision}


def trained_a_little(module: nn.Module, *shape: int) -> nn.Module:
    """With a history, and gains that are not all 1."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        outputs = module(torch.randn(shape, dtype=next(module.parameters()).dtype))
        sum(y.square().mean() for y in torch.utils._pytree.tree_leaves(outputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


@pytest.fixture(scope="module", autouse=True)
def _one_table_of_translations():
    """torch.onnx makes its table of functions anew for each file: a second on a slow CPU."""
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    with mock.patch.object(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib))):
        yield


def assert_standard(path: Path, module: nn.Module) -> None:
    """Only ONNX's own operators; and the weights of FP8 products, the larger tensors, are FP8's codes."""
    file = onnx.load(path)
    assert [(opset.domain, opset.version) for opset in file.opset_import] == [("", 21)]
    assert not file.functions and {node.domain for node in file.graph.node} == {""}
    codes = {t.name: tuple(t.dims) for t in file.graph.initializer if t.data_type == onnx.TensorProto.FLOAT8E4M3FN}
    linears = [m for m in module.modules() if isinstance(m, octavo.nn.Linear) and not m.recipe.is_high_precision]
    assert sorted(map(sorted, codes.values())) == sorted(sorted(layer.weight.shape) for layer in linears)
    assert codes.keys() <= {node.input[0] for node in file.graph.node if node.op_type == "DequantizeLinear"}
    assert sum(node.op_type == "QuantizeLinear" for node in file.graph.node) == len(linears)  # the inputs
    if linears:
        rest = [onnx.numpy_helper.to_array(t) for t in file.graph.initializer if t.name not in codes]
        assert max(tensor.size for tensor in rest) < K * 40


@pytest.mark.covering(1)  # a file is seconds of tracing; attention's three times as many
@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full if kind == "TransformerBlock" else []) for kind in MODULES]
)
def test_every_module(kind, recipe, tmp_path):
    module = trained_a_little(MODULES[kind](recipe=ALL_RECIPES[recipe]()), 3, 7, K)
    state = copy.deepcopy(module.state_dict())
    path = to_onnx(module, torch.randn(2, 5, K), tmp_path / "m.onnx")
    assert module.training and all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    assert_standard(path, module)
    module.eval()
    for shape in ((2, 5, K), (1, 1, K), (4, 33, K)):
        x = torch.randn(shape)
        with torch.no_grad():
            expected = torch.utils._pytree.tree_leaves(module(x))
        found = run_onnx(path, x)
        assert min(sqnr(*pair) for pair in zip(found, expected, strict=True)) >= 40


def test_y_scale_is_scale_inv_and_codes_are_octavos(tmp_path):
    layer = trained_a_little(octavo.nn.Linear(K, 40, recipe=recipes.delayed()), 8, K)
    file = onnx.load(to_onnx(layer, torch.randn(2, K), tmp_path / "m.onnx"))
    values = {t.name: t for t in file.graph.initializer}
    (quantize,) = (node for node in file.graph.node if node.op_type == "QuantizeLinear")
    scale = layer.delayed_scale[0]
    assert float(onnx.numpy_helper.to_array(values[quantize.input[1]])) == float(1.0 / scale)
    (read,) = (n for n in file.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in values)
    expected = octavo.quantize(layer.weight.detach(), octavo.E4M3, octavo.PerTensor())  # as in evaluation
    assert float(onnx.numpy_helper.to_array(values[read.input[1]])) == float(expected.scale_inv)
    assert values[read.input[0]].raw_data == expected.qdata.view(torch.uint8).numpy().tobytes()


def test_delayed_without_a_history_takes_its_own_amax(tmp_path):
    layer = octavo.nn.Linear(K, 40, recipe=recipes.delayed())
    path = to_onnx(layer, torch.randn(2, K), tmp_path / "m.onnx")
    for factor in (1e-3, 1.0, 1e3):
        assert sqnr_in_onnxruntime(layer, factor * torch.randn(5, K), path) >= 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_a_half_precision_model_computes_in_float32_and_keeps_its_bytes(dtype, tmp_path):
    net = nn.Sequential(octavo.nn.Linear(K, 64, recipe=recipes.rowwise()), nn.Linear(64, 128)).to(dtype)
    path = to_onnx(net, torch.randn(3, K, dtype=dtype), tmp_path / "m.onnx")
    assert sqnr_in_onnxruntime(net, torch.randn(5, K, dtype=dtype), path) >= 40
    stored = {t.data_type: t.dims for t in onnx.load(path).graph.initializer if len(t.dims) == 2 and t.dims[0] > 1}
    half = onnx.TensorProto.BFLOAT16 if dtype == torch.bfloat16 else onnx.TensorProto.FLOAT16
    assert list(stored[half]) == [128, 64] and onnx.TensorProto.FLOAT8E4M3FN in stored
    assert all(p.dtype == dtype for p in net.parameters())


@pytest.mark.covering(1)
@pytest.mark.parametrize("opset", [*(pytest.param(o, marks=pytest.mark.full) for o in (20, 24)), 19])
@pytest.mark.parametrize("recipe", [pytest.param("dynamic", marks=pytest.mark.full), "rowwise"])
def test_opsets(recipe, opset, tmp_path):
    layer = octavo.nn.Linear(K, 40, recipe=FP8_RECIPES[recipe]())
    path = to_onnx(layer, torch.randn(2, K), tmp_path / "m.onnx", opset=opset)
    assert onnx.load(path).opset_import[0].version == opset
    assert sqnr_in_onnxruntime(layer, torch.randn(9, K), path) >= 40


def test_a_recipe_map_and_other_casts(tmp_path):
    cast = octavo.Cast(octavo.E5M2, octavo.PerBlock(2, 32))
    other = octavo.Recipe(output=(cast, octavo.Cast(octavo.E4M3, octavo.PerBlock(64, 32))))
    net = nn.Sequential(nn.Linear(K, 64), nn.ReLU(), nn.Linear(64, 32))
    octavo.convert(net, octavo.RecipeMap(other, {"2": recipes.high_precision()}), select=lambda module, name: True)
    path = to_onnx(net, torch.randn(6, K), tmp_path / "m.onnx")
    for rows in (1, 6, 7):
        assert sqnr_in_onnxruntime(net, torch.randn(rows, K), path) >= 40


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=[] if r == "mx" else pytest.mark.full) for r in FP8_RECIPES],  # it has most scales
)
def test_the_file_is_at_most_three_fifths_of_the_weights_in_bf16(recipe, tmp_path):
    module = octavo.nn.LayerNormLinear(512, 1024, recipe=FP8_RECIPES[recipe](), dtype=torch.bfloat16)
    path = to_onnx(module, torch.randn(2, 512, dtype=torch.bfloat16), tmp_path / "m.onnx")
    assert path.stat().st_size <= 0.6 * module.linear.weight.nbytes


@pytest.mark.full
def test_the_demos_file_too(tmp_path):
    tokens, model = torch.zeros(2, 16, dtype=torch.int32), build_model(ModelConfig(), "mx", 0)
    path = to_onnx(model, tokens, tmp_path / "m.onnx", weights=torch.bfloat16)
    assert path.stat().st_size <= 0.6 * 2 * sum(p.numel() for p in model.parameters())


def test_weights_lie_beside_a_file_that_would_be_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_model, "LARGEST_FILE", 1000)
    module = octavo.nn.Linear(K, 256, recipe=recipes.blockwise())
    path = to_onnx(module, torch.randn(2, K), tmp_path / "m.onnx")
    assert {found.name for found in tmp_path.iterdir()} == {"m.onnx", "m.onnx.data"}
    assert path.stat().st_size < 20_000 < (tmp_path / "m.onnx.data").stat().st_size
    assert sqnr_in_onnxruntime(module, torch.randn(3, K), path) >= 40


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (Branches(), {}, "torch.export can't trace Branches: "),
        (nn.Linear(K, 4, device="meta"), {}, "meta device"),
        (nn.Linear(K, 4), {"opset": 18}, "opset=18: use 19 to 24"),
        (nn.Linear(K, 4), {"weights": torch.int8}, "weights=torch.int8"),
        (Mixture(ModelConfig(K, heads=1, experts=2)), {}, "no ONNX for octavo.grouped_mm.default: experts have none"),
        (octavo.nn.Linear(K, 16, recipe=recipes.blockwise()), {"opset": 20}, r"block_size.*opset=21, or .*rowwise\(\)"),
        (octavo.nn.Linear(K, 16, recipe=recipes.delayed()), {"opset": 19}, r"Delayed.*opset=21, or .*dynamic\(\)"),
    ],
    ids=str,
)
def test_what_can_not_be_exported(model, options, says, tmp_path):
    if "Delayed" in says:
        trained_a_little(model, 2, 4, K)
    with pytest.raises(ExportError, match=says) as found:
        to_onnx(model, torch.randn(2, 4, K), tmp_path / "m.onnx", **options)
    assert len(str(found.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_paths_that_can_not_be_written(tmp_path):
    for path, says in ((tmp_path, "is a folder"), (tmp_path / "no" / "m.onnx", "does not exist")):
        with pytest.raises(ExportError, match=says):
            to_onnx(nn.Linear(4, 4), torch.randn(2, 4), path)


def test_a_failure_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_text("before")
    monkeypatch.setattr(onnx.checker, "check_model", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        to_onnx(nn.Linear(4, 4), torch.randn(2, 4), path)
    assert [found.name for found in tmp_path.iterdir()] == ["m.onnx"] and path.read_text() == "before"


def test_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"pip install octavo\[onnx\]"):
        to_onnx(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install octavo\[onnx\]"):
        run_onnx(tmp_path / "m.onnx", torch.randn(2, 4))
