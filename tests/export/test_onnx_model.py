"""Exported files are standard ONNX, hold FP8 weights, and have octavo's results in onnxruntime."""

import copy
import functools
import importlib
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import octavo
from octavo import recipes
from octavo.errors import ExportError, MissingExtraError
from octavo.export import onnx_model, run_onnx, sqnr_in_onnxruntime, to_onnx
from octavo.export.onnx_model import in_float32, is_delayed_cast, program_of
from tests.support.helpers import FP8_RECIPES, sqnr, stepped

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

K = 96  # not a multiple of blocks of 128
MODULES = {
    "Linear": lambda **options: octavo.nn.Linear(K, {"a": 24, "b": 16}, **options),
    "LayerNormLinear": lambda **options: octavo.nn.LayerNormLinear(K, {"a": 32, "b": 16}, **options),
    "RMSNormLinear": lambda **options: octavo.nn.RMSNormLinear(K, 40, zero_centered_gamma=True, **options),
    "LayerNormMLP": lambda **options: octavo.nn.LayerNormMLP(K, 160, "gelu", zero_centered_gamma=True, **options),
    "RMSNormMLP": lambda **options: octavo.nn.RMSNormMLP(K, 160, "geglu_tanh", bias=False, **options),
    "TransformerBlock": lambda **options: octavo.nn.TransformerBlock(K, 160, 6, 2, **options),
}
ALL_RECIPES = {
    **FP8_RECIPES,
    "high_precision": recipes.high_precision,
    "rowwise and blockwise": lambda: octavo.RecipeMap(recipes.rowwise(), {"fc2": recipes.blockwise()}),
}


def trained_a_little(module: nn.Module, *shape: int) -> nn.Module:
    """Give a module a history, and gains that are not all 1."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        outputs = module(torch.randn(shape, dtype=next(module.parameters()).dtype))
        stepped(optimizer, sum(y.square().mean() for y in torch.utils._pytree.tree_leaves(outputs)))
    return module


@pytest.fixture(scope="module", autouse=True)
def _one_table_of_translations():
    """torch.onnx makes its table of functions anew for each file: a second on a slow CPU."""
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    with mock.patch.object(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib))):
        yield


def assert_standard(path: Path, module: nn.Module, opset: int = 21, most: int = K * 40) -> None:
    """Check that a file has only ONNX's own operators, and FP8 codes for the weights of FP8 products."""
    file = onnx.load(path)
    assert [(opset.domain, opset.version) for opset in file.opset_import] == [("", opset)]
    assert not file.functions and {node.domain for node in file.graph.node} == {""}
    codes = {t.name: tuple(t.dims) for t in file.graph.initializer if t.data_type == onnx.TensorProto.FLOAT8E4M3FN}
    linears = [m for m in module.modules() if isinstance(m, octavo.nn.Linear) and not m.recipe.is_high_precision]
    assert sorted(map(sorted, codes.values())) == sorted(sorted(layer.weight.shape) for layer in linears)
    assert codes.keys() <= {node.input[0] for node in file.graph.node if node.op_type == "DequantizeLinear"}
    assert sum(node.op_type == "QuantizeLinear" for node in file.graph.node) == len(linears)  # the inputs
    if linears:
        others = [onnx.numpy_helper.to_array(t) for t in file.graph.initializer if t.name not in codes]
        assert max(tensor.size for tensor in others) < most


@pytest.mark.full  # a file is seconds of tracing: one is made by default, below
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
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
        assert min(sqnr(*pair) for pair in zip(run_onnx(path, x), expected, strict=True)) >= 40


@pytest.fixture(scope="module")
def small_bf16(tmp_path_factory):
    """A model of three recipes in bf16, and its file with weights beside it, as for too large models."""
    torch.manual_seed(0)  # a module's fixture is made before the test's seed is set
    layer = trained_a_little(octavo.nn.Linear(K, 256, recipe=recipes.delayed()), 8, K)
    recipe = ALL_RECIPES["rowwise and blockwise"]()
    mlp = octavo.nn.LayerNormMLP(256, 160, "gelu", zero_centered_gamma=True, recipe=recipe)
    norm = octavo.nn.RMSNormLinear(256, 64, zero_centered_gamma=True, recipe=recipes.mx())
    net = nn.Sequential(layer, mlp, norm, nn.Linear(64, 128)).bfloat16()  # the last weight is stored as it is
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    with mock.patch.object(onnx_model, "LARGEST_FILE", 1000):
        to_onnx(net, torch.randn(2, 5, K, dtype=torch.bfloat16), path, opset=22)
    return net, path


def test_modules_are_standard_operators_in_any_shape(small_bf16):
    net, path = small_bf16
    assert net.training and {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert_standard(path, net, opset=22, most=10_000)
    for shape in ((2, 5, K), (1, 1, K), (4, 33, K)):
        assert sqnr_in_onnxruntime(net, torch.randn(shape), path) >= 40


def test_y_scale_is_scale_inv_and_codes_are_octavos_beside_the_file(small_bf16):
    net, path = small_bf16
    assert {written.name for written in path.parent.iterdir()} == {"m.onnx", "m.onnx.data"}
    assert path.stat().st_size < 40_000 < path.with_name("m.onnx.data").stat().st_size
    file = onnx.load(path)
    values = {t.name: t for t in file.graph.initializer}
    first = next(node for node in file.graph.node if node.op_type == "QuantizeLinear")
    assert float(onnx.numpy_helper.to_array(values[first.input[1]])) == float(1.0 / net[0].delayed_scale[0])
    reading = [n for n in file.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in values]
    (read,) = (n for n in reading if [*values[n.input[0]].dims] == [256, K])
    expected = octavo.quantize(net[0].weight.detach(), octavo.E4M3, octavo.PerTensor())  # as in evaluation
    assert float(onnx.numpy_helper.to_array(values[read.input[1]])) == float(expected.scale_inv)
    assert values[read.input[0]].raw_data == expected.qdata.view(torch.uint8).numpy().tobytes()


def test_a_half_precision_model_computes_in_float32_and_keeps_its_bytes(small_bf16, tmp_path, monkeypatch):
    net, path = small_bf16
    x = torch.randn(5, 1, K, dtype=torch.bfloat16)
    (y,) = run_onnx(path, x)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[-1].weight *= 1.125
        expected = copy.deepcopy(other).float().eval()(x.float())
    assert math.isclose(sqnr_in_onnxruntime(other, x, path), sqnr(y, expected), rel_tol=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(onnx_model, "run_onnx", lambda path, *inputs: [expected])
        assert sqnr_in_onnxruntime(other, x, path) == math.inf
    for wrong in ((tmp_path / "none.onnx", x), (path, torch.randn(2, 1, K + 1))):
        with pytest.raises(ExportError, match="can't run"):
            run_onnx(*wrong)
    stored = {(t.data_type, *t.dims) for t in onnx.load(path).graph.initializer}
    assert (onnx.TensorProto.BFLOAT16, 64, 128) in stored  # transposed, as a MatMul takes it


@pytest.mark.full
@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("recipe", ["dynamic", "rowwise"])
def test_opsets_and_bytes(recipe, opset, tmp_path):
    """The file has at most three fifths of the bytes of the weights in float16."""
    layer = octavo.nn.LayerNormLinear(512, 1024, recipe=FP8_RECIPES[recipe](), dtype=torch.float16)
    path = to_onnx(layer, torch.randn(2, 512, dtype=torch.float16), tmp_path / "m.onnx", opset=opset)
    assert onnx.load(path).opset_import[0].version == opset
    assert sqnr_in_onnxruntime(layer, torch.randn(9, 512), path) >= 40
    assert path.stat().st_size <= 0.6 * layer.linear.weight.nbytes


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def with_a_lock(module: nn.Module) -> nn.Module:
    module.lock = threading.Lock()
    return module


class OfExperts(octavo.nn.GroupedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[0], torch.tensor([1, 4], dtype=torch.int32))


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (Branches(), {}, "torch.export can't trace Branches: "),
        (nn.Linear(K, 4, device="meta"), {}, "meta device"),
        (with_a_lock(nn.Linear(K, 4)), {}, "Linear can't be copied: .*lock"),
        (nn.Linear(K, 4), {"opset": 20}, "opset=20: use 21 to 24"),
        (nn.Linear(K, 4), {"weights": torch.int8}, "weights=torch.int8"),
        (OfExperts(2, K, 16), {}, "no ONNX for octavo.grouped_matmul.default: experts have none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_exported(model, options, says, tmp_path):
    with pytest.raises(ExportError, match=says) as caught:
        to_onnx(model, torch.randn(2, 4, K), tmp_path / "m.onnx", **options)
    assert len(str(caught.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def model_of(tensors: dict[str, Tensor]):
    """Return an onnx_ir.Model that gives out these tensors."""
    initializers = [onnx.numpy_helper.from_array(x.numpy(), name) for name, x in tensors.items()]
    nodes = [onnx.helper.make_node("Identity", [name], [f"{name} out"]) for name in tensors]
    value, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    outputs = [value(f"{name} out", kind, x.shape) for name, x in tensors.items()]
    graph = onnx.helper.make_graph(nodes, "graph", [], outputs, initializers)
    return importlib.import_module("onnx_ir").from_proto(onnx.helper.make_model(graph))


def test_paths_that_can_not_be_written_and_a_failure_that_keeps_what_was_there(small_bf16, tmp_path, monkeypatch):
    for path, says in ((tmp_path, "is a folder"), (tmp_path / "no" / "m.onnx", "does not exist")):
        with pytest.raises(ExportError, match=says):
            to_onnx(nn.Linear(4, 4), torch.randn(2, 4), path)
    path = tmp_path / "m.onnx"
    path.write_text("before")
    monkeypatch.setattr(onnx_model, "_translate", lambda *_: importlib.import_module("onnx_ir").load(small_bf16[1]))
    monkeypatch.setattr(onnx.checker, "check_model", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        to_onnx(nn.Linear(4, 4), torch.randn(2, 4), path)
    assert [written.name for written in tmp_path.iterdir()] == ["m.onnx"] and path.read_text() == "before"
    monkeypatch.setattr(onnx.checker, "check_model", lambda *args, **options: None)
    with monkeypatch.context() as patch, pytest.raises(ExportError, match=r"m\.onnx can't be written: No space left"):
        patch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        to_onnx(nn.Linear(4, 4), torch.randn(2, 4), path)
    with monkeypatch.context() as patch, pytest.raises(ExportError, match=r"the folder .* can't be written"):
        patch.setattr("os.access", lambda folder, mode: False)  # root may write anywhere
        to_onnx(nn.Linear(4, 4), torch.randn(2, 4), path)
    assert [written.name for written in tmp_path.iterdir()] == ["m.onnx"] and path.read_text() == "before"
    monkeypatch.setattr(onnx_model, "_translate", lambda *_: model_of({"x": torch.arange(4.0)}))
    assert to_onnx(nn.Linear(4, 4), torch.randn(2, 4), path) == path
    assert [written.name for written in tmp_path.iterdir()] == ["m.onnx"]  # small enough to hold its weights
    assert onnx.numpy_helper.to_array(onnx.load(path).graph.initializer[0]).tolist() == [0, 1, 2, 3]


class Failing:
    """A program whose translation raises an error."""

    graph = SimpleNamespace(nodes=())

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run_decompositions(self, table: object) -> None:
        raise self.error


def test_what_torch_can_not_translate_is_said_in_a_line(monkeypatch, tmp_path):
    """Of torch's errors the first cause; of octavo's own what it says, without the place in the graph."""
    cause = RuntimeError("the translation failed")
    cause.__cause__ = NotImplementedError("no function for aten.foo\nin a graph of a thousand lines")
    for error, says in (
        (cause, "torch.onnx can't translate the model: no function for aten.foo"),
        (ExportError("ONNX has no E2M1\nWhile executing %cast"), "ONNX has no E2M1"),
    ):
        monkeypatch.setattr(onnx_model, "program_of", lambda *arguments, error=error: Failing(error))
        with pytest.raises(ExportError) as caught:
            to_onnx(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx")
        assert str(caught.value) == says and not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_which_weights_are_stored_in_another_dtype(dtype):
    """Parameters, and what bfloat16 holds exactly."""
    weight = nn.Parameter(torch.randn(32, 64))
    tensors = {"transposed": weight.detach().t(), "random": torch.randn(32, 64), "small": torch.ones(4)}
    tensors["powers"] = 2.0 ** torch.randint(-9, 9, (32, 64))
    model = model_of(tensors)
    onnx_model._store(model, {"weight": weight}, dtype)
    dtypes = {name: value.dtype.name for name, value in model.graph.initializers.items()}
    of_weight = "FLOAT16" if dtype == torch.float16 else "FLOAT"
    assert dtypes == {"transposed": of_weight, "random": "FLOAT", "powers": "BFLOAT16", "small": "FLOAT"}
    for name, x in tensors.items():
        expected = x.to(torch.float16).float() if dtypes[name] == "FLOAT16" else x
        stored = model.graph.initializers[name].const_value.numpy()
        assert torch.equal(torch.from_numpy(stored.astype("float32")), expected), name


def test_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"pip install '.*\[onnx\]'"):
        to_onnx(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install '.*\[onnx\]'"):
        run_onnx(tmp_path / "m.onnx", torch.randn(2, 4))


# --- the traced program -----------------------------------------------------------------------------------------------

X = torch.randn(3, 4, 32)


def ops_of(program: torch.export.ExportedProgram) -> list[str]:
    return [n.target._opname for n in program.graph.nodes if getattr(n.target, "namespace", "") == "octavo"]


def test_weights_are_folded_and_the_rest_computes_the_same():
    """A delayed cast without a history is a dynamic one."""
    module = octavo.nn.LayerNormMLP(32, 48, recipe=recipes.delayed())
    assert not any(map(is_delayed_cast, program_of(module, (X,), None).graph.nodes))
    module.train()(X).sum().backward()
    program = program_of(module, (X,), None)
    assert any(map(is_delayed_cast, program.graph.nodes))
    assert ops_of(program) == ["cast", "matmul", "cast", "matmul"]
    folded = [t for t in program.state_dict.values() if t.dtype == torch.float8_e4m3fn]
    assert sorted(t.numel() for t in folded) == [48 * 32, 96 * 32]
    module.eval()
    for shape in ((3, 4, 32), (5, 2, 32)):
        x = torch.randn(shape)
        with torch.no_grad():
            assert torch.equal(program.module()(x), module(x))


class Scaled(nn.Module):
    """A model that calls an op on its weight which has one result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 48))

    def forward(self, x: Tensor) -> Tensor:
        return x / octavo.kernels.amax(self.weight, (1, -1)).view(-1)


def test_an_op_of_one_result_is_folded_too():
    module = Scaled()
    program = program_of(module, (X,), None)
    assert ops_of(program) == [] and torch.equal(program.module()(X), module(X))


class Negated(nn.Module):
    def forward(self, x, is_negated):
        return -x if is_negated else x


def test_half_precision_becomes_float32_and_arguments_that_are_no_tensors_stay(tmp_path):
    path = to_onnx(Negated(), (X.bfloat16(), True), tmp_path / "m.onnx")
    assert torch.equal(run_onnx(path, X)[0], -X)
    assert sqnr_in_onnxruntime(Negated(), (X.bfloat16(), True), path) == math.inf
    assert in_float32(X.bfloat16()).dtype == torch.float32 and in_float32(X.long()).dtype == torch.int64


def test_given_shapes_are_kept():
    program = program_of(octavo.nn.Linear(32, 16), (X,), ({0: torch.export.Dim("batch", max=8)},))
    inputs = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    (x,) = (inputs[name] for name in program.graph_signature.user_inputs)
    assert isinstance(x.shape[0], torch.SymInt) and x.shape[1:] == (4, 32)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["dynamic", "rowwise", "blockwise", "mx"])
@pytest.mark.parametrize("build", [octavo.nn.Linear, octavo.nn.RMSNormMLP])
def test_any_number_of_rows(name, build):
    """A model exported by torch.export itself takes any number of rows; no weight is cast for a backward."""
    model = build(256, 256, recipe=getattr(recipes, name)()).eval()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(model, (torch.randn(16, 256),), dynamic_shapes=({0: rows},))
    assert not any("two_scalings" in op for op in ops_of(program) if build is octavo.nn.Linear)
    for count in (2, 130, 1000):
        x = torch.randn(count, 256)
        with torch.no_grad():
            assert torch.equal(program.module()(x), model(x))


def test_models_on_several_ranks_are_refused(tmp_path):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Sequential(octavo.nn.Linear(32, {"q": 32, "k": 32}, recipe=recipes.blockwise()))
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": octavo.distributed.ColwiseParallel()})
        with pytest.raises(ExportError, match=r"0\.q\.weight is sharded: gather the model first"):
            program_of(model, (X,), None)
        with pytest.raises(ExportError, match=r"0\.q\.weight is sharded: gather the model first"):
            octavo.export.to_safetensors(model, tmp_path)
    finally:
        dist.destroy_process_group()
