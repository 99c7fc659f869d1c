"""CONTRIBUTING's list of what an addition touches is enough: one of each kind is added to a copy, and computes."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run_python

ROW = re.compile(r"^\| (an? [a-z ]+?)(?: \(.*?\))? \| (.*) \| (.*) \|$", re.MULTILINE)

# Of each addition the lines that are put before a text of a file ("<"), within its line ("<<"), or at its end.
ADDED = {
    "an activation": r"""
@ octavo/kernels/activations.py <<"relu", "squared_relu"
"square",
@ octavo/kernels/reference/activation.py <    "relu": Formulas(
    "square": Formulas(lambda h: h * h, lambda h: (h * h, 2 * h), torch.square, lambda dy, h: dy * h * 2),
@ octavo/kernels/triton/prologue.py <    elif NAME == "squared_relu":\n        result = tl
    elif NAME == "square":
        result = h * h
@ octavo/kernels/triton/prologue.py <    elif NAME == "squared_relu":\n        result = 2
    elif NAME == "square":
        result = 2 * h
""",
    "a recipe": r"""
@ octavo/recipes.py <<"dynamic", "dynamic_with_output_hp"
"squares",
@ octavo/recipes.py <def dynamic(
def squares() -> Recipe:
    cast = Cast(E4M3, PerBlock(32, 32), Dynamic(), True)
    return _linear("squares", cast, cast, cast)
""",
    "a scaling": r"""
@ octavo/granularity.py <def granularity_of(
@dataclass(frozen=True)
class PerSquare(Granularity):
    size: int

    @property
    def tile(self) -> Tile:
        return self.size, self.size

    def transposed(self) -> Granularity:
        return self
@ octavo/scaling/recipe.py <<PerBlock, PerRow, PerTensor, Tile
PerSquare,
@ octavo/scaling/recipe.py <<PerBlock, Dynamic
PerSquare,
@ octavo/tensor/scaled_tensor.py <<Tile,
PerSquare,
@ octavo/tensor/scaled_tensor.py <<PerBlock])
PerSquare,
@ octavo/__init__.py <<PerBlock, PerRow
PerSquare,
@ octavo/__init__.py <<"PerBlock", "Dynamic"
"PerSquare",
""",
    "an optimizer": r"""
@ octavo/optim/sgd.py
class Momentum(SGD):
    def __init__(self, params, lr=1e-3, momentum=0.9, **options):
        super().__init__(params, lr, momentum, **options)
@ octavo/optim/__init__.py <<SGD\n
Momentum,
@ octavo/optim/__init__.py <"SGD"
"Momentum",
""",
    "a master": r"""
@ octavo/kernels/reference/optimizer_state.py <}\n\n\n@dataclass(eq=False)  # launches
    "fp8_bf16": MasterKind("bf16", torch.bfloat16, True, "split32"),
@ octavo/kernels/reference/optimizer_state.py <        if low_bits.dtype == torch.float32:
        if low_bits.dtype == torch.bfloat16:
            return low_bits.float()
@ octavo/kernels/reference/optimizer_state.py <            else:\n                largest = finite_amax(wide) * scales
            elif self.low_bits.dtype == torch.bfloat16:
                assert random is not None
                wide = round_to_bf16(wide, random)
                largest = finite_amax(wide.float()) * scales
@ octavo/kernels/cpu/optimizer_step.cpp << };\n\n}  // namespace
, FP8_BF16
@ octavo/kernels/cpu/optimizer_step.cpp <    case FP8_FP32: std::memcpy(w,
    case FP8_BF16: for (int j = 0; j < width; j++) w[j] = from_bf16(uint16_t(low16[j])); break;
@ octavo/kernels/cpu/optimizer_step.cpp <    case FP8_STOCHASTIC:\n
    case FP8_BF16:
        for (int j = 0; j < width; j++) {
            codes[j] = encode_nearest(w[j] * scale, E4M3);
            low16[j] = int16_t(to_bf16_stochastic(w[j], random[j]));
            w[j] = from_bf16(uint16_t(low16[j]));
        }
        largest = finite_amax(w, width) * scale;
        break;
@ octavo/kernels/triton/optimizer_state.py <    elif MASTER.kind == "fp8_fp16":\n        result
    elif MASTER.kind == "fp8_bf16":
        result = load_float(row, LOW_BITS, place, MASTER.low_bits, EVEN)
@ octavo/kernels/triton/optimizer_state.py <        else:\n            store_at(low_bits_ptr, place, w)
        elif MASTER.kind == "fp8_bf16":
            half = round_to_bf16(w, drawn)
            store_at(low_bits_ptr, place, half)
            largest = largest_inside(finite_abs(half.to(tl.float32)), place) * scale
@ octavo/train/config.py <<"fp16_scaled", "none"
"bf16",
""",
    "an integration": r"""
@ octavo/integrations/NAME.py
from octavo.integrations.accelerate import TrainingState, convert_once

def begin(model, recipe):
    convert_once(model, recipe, lambda module, name: True)
    return TrainingState(model)
""",
    "a layout of files": r"""
@ octavo/export/layouts.py <<"compressed-tensors"]
"rows",
@ octavo/export/layouts.py <    "per-tensor": L
    "rows": Layout(
        "_scale_rows", (ROW,), "rowwise", config=_compressed_tensors_config, method="rows", matches_ends=False
    ),
""",
    "a column": r"""
@ octavo/nn/summary.py <@dataclass(frozen=True)\nclass SavedBytes
    @property
    def elements(self) -> int:
        return math.prod(self.shape)
@ octavo/nn/summary.py <            state += f", gathered
            state += f", {m.elements} elements"
""",
    "a column of a plan": r"""
@ octavo/cost/verdict.py <    Column("casts"
    Column("share of products", lambda step, bf16: step.products / step.total),
""",
    "a command": r"""
@ octavo_command.py <    "info": "show
    "NAME": "list the named recipes",
@ octavo/cli/NAME.py
from octavo.recipes import NAMED

EXAMPLES = ("octavo NAME",)

def add_options(parser):
    pass

def run(options, arguments):
    return len(NAMED)
""",
}

PROGRAMS = {
    "an activation": """
        import torch
        from tests.support.fused_cases import in_float64, in_parts, mlp, results
        from tests.support.helpers import sqnr
        for saved in (False, True):
            module = mlp("layer_norm", "rowwise", activation="square", saved=saved)
            x, grad = torch.randn(32, 64), torch.randn(32, 64)
            found, apart = results(module, x, grad), results(in_parts(module), x, grad)
            truth = results(in_float64(module), x.double(), grad.double())
            assert found.keys() == truth.keys() and all(sqnr(found[name], truth[name]) > 20 for name in found)
            assert all(sqnr(found[name], apart[name]) > 20 for name in found)
    """,
    "a recipe": """
        import octavo
        from octavo import cli
        from octavo.train import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, run
        assert cli.parser(["train"]).parse_args(["train", "--recipe", "squares"]).recipe == "squares"
        tiny = ModelConfig(width=16, layers=1, heads=2, context=16)
        result = run(TrainConfig(tiny, DataConfig(batch=2, eval_windows=2), OptimizerConfig(steps=2)), "squares")
        assert result.name == "squares" and result.final_validation < 6
    """,
    "a scaling": """
        import dataclasses, torch, octavo
        from octavo import Cast, PerBlock, PerSquare
        from tests.support.helpers import assert_equal, gradients
        text = str(Cast(octavo.E4M3, PerSquare(32)))
        assert Cast.of(text).granularity == PerSquare(32), text
        found = []
        for granularity in (PerSquare(32), PerBlock(32, 32)):
            cast = Cast(octavo.E4M3, granularity)
            torch.manual_seed(0)
            layer = octavo.nn.Linear(64, 48, recipe=octavo.Recipe(*3 * [(cast, cast)]))
            y = layer(torch.randn(16, 64))
            y.square().sum().backward()
            found.append({"y": y.detach(), **gradients(layer)})
        assert_equal(*found)
    """,
    "an optimizer": """
        import torch, octavo
        layer = octavo.nn.Linear(64, 48)
        optimizer = octavo.optim.Momentum(layer.parameters(), lr=0.1)
        before = layer.weight.detach().clone()
        layer(torch.randn(16, 64)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(layer.weight, before) and len(optimizer.state) == 2
    """,
    "a master": """
        from tests.kernels.cpu import test_optimizer_step as steps
        from tests.support.optimizer_both import IN_FP8
        steps.KINDS[:] = [kind for kind in IN_FP8 if "fp8_bf16" in str(kind)]
        assert steps.KINDS and steps.library("optimizer_step") is not None and steps.differences_of(0, 20) == []
    """,
    "an integration": """
        import torch, octavo
        from octavo.integrations.NAME import begin
        model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        state = begin(model, octavo.recipes.delayed())
        model(torch.randn(16, 64)).sum().backward()
        state.load_state_dict(state.state_dict())
        assert state.state_dict()["recipes"].popitem()[1] == ["0"]
    """,
    "a layout of files": """
        import tempfile, pathlib, safetensors.torch, torch, octavo
        from octavo.export import iterate_fp8, to_safetensors
        layers = torch.nn.Sequential(torch.nn.Linear(64, 48))
        model = octavo.convert(layers, octavo.recipes.rowwise(), lambda module, name: True)
        folder = pathlib.Path(tempfile.mkdtemp())
        to_safetensors(model, folder, "rows")
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        (codes, scales), *_ = [(codes, scales) for _, codes, scales in iterate_fp8(model, "rows") if scales is not None]
        assert torch.equal(tensors["0.weight"].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(tensors["0.weight_scale_rows"], scales)
    """,
    "a column": """
        import torch, octavo
        summary = octavo.summary(torch.nn.Linear(8, 8))
        assert summary.modules[0].elements == 64 and "64 elements" in str(summary)
    """,
    "a column of a plan": """
        from octavo.cost import Estimate
        from octavo.cost.verdict import tables
        from octavo.schedule import PhasePlan
        text = tables([Estimate("bf16", 1.0, 0.0, 3.0, 0.0, PhasePlan("", *[1] * 5), (), 1.0)])
        assert "share of products" in text and " 0.25 " in text, text
    """,
    "a command": """
        from octavo import cli
        from octavo.recipes import NAMED
        assert cli.main(["NAME"]) == len(NAMED)
    """,
}
ON_TRITON = """
    import torch
    from octavo.kernels.reference import KERNELS
    from tests.support.triton_kernels import running
    x, dy = torch.randn(2, 32, 64)
    scaling = None, 0, torch.float8_e4m3fn, (1, -1), True, 0, False, 1, False
    with running() as kernels:
        for tensors in ((x, *scaling, "square"), (dy, *scaling, "square", x)):
            ours, theirs = kernels.cast(*tensors)[0], KERNELS["cast"](*tensors)[0]
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
"""


def listed() -> dict[str, tuple[list[str], list[str]]]:
    """Return the files to touch and the tests to run that CONTRIBUTING names, by what is added."""
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    touched, run = ([re.findall(r"`([^`]+/?\w+\.\w+)`", row[column]) for row in rows] for column in (1, 2))
    return {row[0]: (files, tests) for row, files, tests in zip(rows, touched, run, strict=True)}


def changed(folder: Path) -> dict[str, str]:
    """The files of a folder with one of each."""
    texts: dict[str, str] = {}
    for part in "".join(ADDED.values()).split("\n@ ")[1:]:
        head, _, lines = part.partition("\n")
        file, _, before = head.partition(" <")
        before, within = before.lstrip("<").replace("\\n", "\n"), before.startswith("<")
        path = folder / file
        text = texts.get(file) or (path.read_text(encoding="utf-8") if path.exists() else "")
        assert not before or text.count(before) == 1, (file, before)
        added = lines.strip("\n") + (" " if within else "\n")
        texts[file] = text.replace(before, added + before) if before else text + added
    return texts


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, with one of each; of files that stay as they are Python's bytecode too."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "octavo", copy / "octavo", ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "octavo_command.py", copy)
    for file, text in changed(copy).items():
        (copy / file).write_text(text, encoding="utf-8")
    return copy


def run_in(copy: Path, program: str) -> None:
    code = f"if True:\n{program}\n    import octavo; assert octavo.__file__.startswith({str(copy)!r})"
    done = run_python("-c", code, path=os.pathsep.join([str(copy), str(ROOT)]), cwd=copy)
    assert done.returncode == 0, done.stderr


def test_the_list_is_short_and_names_what_is_there() -> None:
    files_of_additions = listed()
    assert ADDED.keys() <= files_of_additions.keys()
    for kind, (touched, run) in files_of_additions.items():
        assert [file for file in (*touched, *run) if "NAME" not in file and not (ROOT / file).is_file()] == [], kind
        assert len(touched) <= 7, kind
    for kind, text in ADDED.items():
        assert {*re.findall("^@ (\\S+)", text, re.MULTILINE)} <= {*files_of_additions[kind][0]}, kind
    for file, text in changed(ROOT).items():
        if file.endswith(".py"):
            compile(text, file, "exec")


@pytest.mark.full
def test_what_is_added_computes(copy: Path) -> None:
    """All in one process, which imports torch once."""
    run_in(copy, "".join(PROGRAMS.values()).replace("\n        ", "\n    "))


@pytest.mark.full
def test_an_added_activation_on_triton(copy: Path) -> None:
    pytest.importorskip("triton")
    run_in(copy, ON_TRITON)
