"""The repository is symmetrical: tests mirror sources, files and functions stay small, the import stays light."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo
from octavo import private
from tests.support.private_attributes import ANYWHERE, IN_PRIVATE_FILE
from tests.support.processes import ROOT, run_python

SOURCES = sorted((ROOT / "octavo").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

OF_STEPS = ("optimizer_state", "step_kernel", "table")
# Modules without a test file of their own, and why.
NO_MIRROR = {
    "octavo/__main__.py": "two lines; the test of the light import below starts it",
    "octavo/autograd/rows.py": "values without methods",
    **{
        f"octavo/compat/torchao/{name}.py": "test_config.py compares their names with torchao's"
        for name in ("float8_linear", "fsdp_utils", "types")
    },
    "octavo/cli/tune.py": "tests/tune/test_command.py runs the command",
    **{
        f"octavo/kernels/triton/{name}.py": "test_cast.py casts by each of their tiles"
        for name in ("cast_blocks", "cast_kernels")
    },
    **{f"octavo/kernels/triton/{name}.py": "test_optimizer_step.py compares whole steps" for name in OF_STEPS},
}

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 59  # without its docstring
MAX_EXAMPLE_LINES = 79

# torch's own requirements, and a module that torch.distributed generates: parts of torch import them when first needed.
OF_TORCH = {"filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing_extensions"}
OF_TORCH |= {"torch", "_remote_module_non_scriptable"}


@functools.cache
def nodes(code: str) -> list[ast.AST]:
    """Return the nodes of a module, itself first."""
    return [*ast.walk(ast.parse(code))]


@functools.cache
def text_of(source: Path) -> str:
    return source.read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """Trees of all sources, which each collection of garbage in later tests would look at."""
    yield
    nodes.cache_clear()


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def mirrors(source: str) -> list[str]:
    """Return where a module's tests may lie. A kernel and its reference may share one file, which compares them."""
    folder, _, file = source.removeprefix("octavo").lstrip("/").rpartition("/")
    folders = [folder]
    if folder in {"kernels/reference", "kernels/cpu", "kernels/triton"}:
        folders.append("kernels")
    return [f"tests/{f}/test_{file}".replace("//", "/") for f in folders]


def long_functions(code: str) -> list[str]:
    """The functions of a module that are too long, a function's own docstring and decorators not counted."""
    too_long = []
    for node in nodes(code):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > MAX_FUNCTION_LINES:
                too_long.append(f"{node.name}, line {node.lineno}: {lines} lines")
    return too_long


def code_lines(code: str) -> list[str]:
    """A module's lines without their indentation, docstrings, comments, imports and blank lines."""
    lines = code.splitlines()
    for node in nodes(code):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def copied_runs(modules: dict[str, list[str]], length: int) -> list[str]:
    """The runs of this many lines that stand a second time: the files, and the first line."""
    seen: dict[tuple[str, ...], str] = {}
    copies = []
    for module, lines in modules.items():
        for run in zip(*(lines[start:] for start in range(length)), strict=False):
            if run in seen:
                copies.append(f"{seen[run]} and {module}: {run[0]}")
            seen[run] = module
    return copies


def test_tests_mirror_sources() -> None:
    """Every source has its test file, but for those in NO_MIRROR, which exist and have none."""
    sources = [name(source) for source in SOURCES if source.name != "__init__.py"]
    assert {s for s in sources if not any((ROOT / mirror).is_file() for mirror in mirrors(s))} == NO_MIRROR.keys()


def test_files_and_functions_are_short() -> None:
    codes = {name(source): text_of(source) for source in SOURCES}
    assert [source for source, code in codes.items() if len(code.splitlines()) > MAX_FILE_LINES] == []
    assert {source: functions for source, code in codes.items() if (functions := long_functions(code))} == {}


def test_a_class_has_a_name_of_its_own() -> None:
    """Classes and aliases of types, an underscore in front not counted: one word means one thing in all rooms."""
    files_of_word: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in nodes(text_of(source))[0].body:  # type: ignore[attr-defined]
            target = node.targets[0] if isinstance(node, ast.Assign) else node
            word = getattr(target, "name", getattr(target, "id", ""))
            if isinstance(node, ast.ClassDef) or (word.lstrip("_")[:1].isupper() and not word.isupper()):
                files_of_word.setdefault(word.lstrip("_"), []).append(name(source))
    assert {word: files for word, files in files_of_word.items() if len(files) > 1} == {}


COPIED_LINES = 10


def test_nothing_is_copied() -> None:
    sources = [source for room in ("nn", "autograd") for source in (ROOT / "octavo" / room).glob("*.py")]
    assert copied_runs({name(s): code_lines(text_of(s)) for s in sources}, COPIED_LINES) == []


def test_import_needs_torch_only_says_nothing_and_leaves_triton_alone() -> None:
    """An import needs torch only and prints nothing; then the command starts as ``python -m octavo`` does."""
    code = """if True:
        import sys
        import torch

        class NoTriton:
            def find_spec(self, name, path=None, target=None):
                assert name.partition(".")[0] != "triton", "octavo imports triton"

        sys.meta_path.insert(0, NoTriton())
        before = set(sys.modules)
        import octavo
        brought = {module.partition(".")[0] for module in set(sys.modules) - before}
        print(*sorted(brought - sys.stdlib_module_names))
        assert not torch.cuda.is_initialized(), "importing octavo initialises CUDA"
        later = {f"octavo.{room}" for room in ("cli", "distributed", "export", "optim", "schedule", "train")}
        later |= {"sympy", "torch.distributed.tensor"}  # as much as torch itself takes, for DTensors alone
        assert not later & set(sys.modules), f"importing octavo imports {later & set(sys.modules)}"
        sys.meta_path.pop(0)
        import runpy
        sys.argv = ["octavo", "--version"]
        runpy.run_module("octavo", run_name="__main__")
        """
    result = run_python("-W", "error", "-c", code)
    assert (result.returncode, result.stderr) == (0, "")
    brought, shown = result.stdout.splitlines()
    assert set(brought.split()) - OF_TORCH == {"octavo"} and shown == f"octavo {octavo.__version__}"


def unsafe_reads(code: str) -> list[str]:
    """Return what could run code from a file: pickles, eval, exec, and torch.load without weights_only."""
    reads = []
    for node in nodes(code):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
            reads += [f"line {node.lineno}: {module}" for module in sorted(names & {"pickle", "marshal", "shelve"})]
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", "")
            called = ast.unparse(node.func) if getattr(node.func, "attr", "") == "load" else called
            arguments = {k.arg: ast.unparse(k.value) for k in node.keywords} if called == "torch.load" else {}
            if called in {"eval", "exec"} or (called == "torch.load" and arguments.get("weights_only") != "True"):
                reads.append(f"line {node.lineno}: {called}")
    return reads


# The one unpickler, which refuses unknown classes; and the functions that run text made by octavo itself.
RUNS_CODE = {"octavo/distributed/checkpoint.py": 1, "octavo/kernels/triton/replay.py": 1}


def test_no_file_that_is_read_can_run_code() -> None:
    reads_of_file = {name(source): unsafe_reads(text_of(source)) for source in SOURCES}
    assert {source: len(reads) for source, reads in reads_of_file.items() if reads} == RUNS_CODE, reads_of_file


def of_defaults(code: str) -> list[int]:
    """The lines that make a tensor of torch's default dtype or device, which are a user's to set."""
    makers = {"empty", "zeros", "ones", "rand", "randn", "linspace", "logspace", "eye"}
    calls = [node for node in nodes(code) if getattr(getattr(node, "func", None), "attr", None) in makers]
    calls = [call for call in calls if ast.unparse(call.func) in {f"torch.{maker}" for maker in makers}]
    options = [(call.lineno, {key.arg: ast.unparse(key.value) for key in call.keywords}) for call in calls]
    return [line for line, of in options if of.get("device") != "'meta'" and not {"dtype", "device"} <= {*of}]


def test_every_tensor_has_a_dtype_and_a_device_of_its_own() -> None:
    assert of_defaults("import torch\na = torch.zeros(3)\nb = torch.ones(2, dtype=torch.float32, device='cpu')") == [2]
    may = {"octavo/train/model.py", "octavo/kernels/triton/cases.py"}  # a model is built where its user says; cases
    lines_of = {name(path): of_defaults(text_of(path)) for path in SOURCES}
    assert {file for file, lines in lines_of.items() if lines} <= may, lines_of


def test_examples_are_short() -> None:
    lines = {name(example): len(example.read_text(encoding="utf-8").splitlines()) for example in EXAMPLES}
    assert {example: count for example, count in lines.items() if count > MAX_EXAMPLE_LINES} == {}


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    result = run_python(str(example), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def of_torch(path: str) -> bool:
    return path.split(".")[0] in ("torch", "aten", "triton")


def private_names(code: str) -> set[str]:
    """The private names of torch and Triton that a file writes out."""
    written_names = set()
    for node in nodes(code):
        if isinstance(node, ast.ImportFrom) and of_torch(node.module or ""):
            written_names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            written_names |= {alias.name for alias in node.names if of_torch(alias.name)}
        elif isinstance(node, ast.Attribute):
            names, owner = [node.attr], node.value
            while isinstance(owner, ast.Attribute):
                names, owner = [*names, owner.attr], owner.value
            path = ".".join([owner.id if isinstance(owner, ast.Name) else "of an expression", *reversed(names)])
            if of_torch(path) or node.attr in IN_PRIVATE_FILE:
                written_names.add(path)
    return {path for path in written_names if is_private(path)}


def is_private(path: str) -> bool:
    names = [name for name in path.split(".") if name.startswith("_") and not name.startswith(("__", "_foreach_"))]
    is_dotted = all(name.isidentifier() for name in path.split("."))
    return is_dotted and any(name not in ANYWHERE for name in names) and not path.startswith("aten.")


def test_private_names_of_torch_stand_in_one_file_and_are_used() -> None:
    """Private names of torch, and the attributes among them in functions, stand in one file and are used."""
    texts = {name(source): text_of(source) for source in SOURCES}
    used_names = texts.pop("octavo/private.py").partition("def __getattr__")[2]
    assert {source: names for source, code in texts.items() if (names := private_names(code))} == {}
    whole = "".join(texts.values())
    assert [word for word in (*private.NAMES, *ANYWHERE) if word not in whole] == []
    assert [word for word in IN_PRIVATE_FILE if word not in used_names] == []


# The checks themselves: each finds its own kind of fault.


def test_private_names() -> None:
    assert private_names("import torch\ntorch._C._x()") == {"torch._C._x", "torch._C"}
    assert private_names("from torch._ops import OpOverload") == {"torch._ops.OpOverload"}
    assert private_names("param._unsharded_param") == {"param._unsharded_param"}


def test_mirrors() -> None:
    assert mirrors("octavo/formats.py") == ["tests/test_formats.py"]
    assert mirrors("octavo/nn/linear.py") == ["tests/nn/test_linear.py"]
    assert mirrors("octavo/kernels/triton/cast.py") == [f"tests/kernels/{room}test_cast.py" for room in ("triton/", "")]


def test_unsafe_reads() -> None:
    code = "import pickle\ntorch.load(x)\ntorch.load(x, weights_only=False)\neval(x)\nmodel.eval()\n"
    assert unsafe_reads(code) == ["line 1: pickle", "line 2: torch.load", "line 3: torch.load", "line 4: eval"]
    assert unsafe_reads("torch.load(x, weights_only=True)\nast.literal_eval(x)") == []


def test_long_functions() -> None:
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    docstring = '    """One.\n\n    Two.\n    """\n'
    assert long_functions(f"def f():\n{docstring}{body}") == []
    assert long_functions(f"def f():\n{body}    x = 2\n") == [f"f, line 1: {MAX_FUNCTION_LINES + 1} lines"]


def test_copied_runs() -> None:
    text = '    """One.\n\n    Two.\n    """\n'
    lines = code_lines(f"import x\n\ndef f():\n{text}    # why\n    a = 1\n    b = (\n        2\n    )\n")
    assert lines == ["def f():", "a = 1", "b = (", "2", ")"]
    assert copied_runs({"a": lines, "b": ["x = 0", *lines[1:], "y"]}, 4) == ["a and b: a = 1"]
    assert copied_runs({"a": lines, "b": lines[1:]}, 5) == copied_runs({"a": lines}, 4) == []
    assert copied_runs({"a": lines + lines}, 5) == ["a and a: def f():"]
