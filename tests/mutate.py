"""Which small faults in the arithmetic the default set of tests finds: ``python -m tests.mutate --sample 200``.

A mutant is a source file with one fault: an operator exchanged, a number off, a condition turned, a call left out. It
is compiled in a fork of a process that has imported torch, and meets the tests that reach its line, the cheapest of
every test function first, until one fails. Which tests reach what is measured once, by coverage. That and the outcomes
are kept in --state, so an interrupted run goes on. tests/mutants.csv lists mutants that no test can or should find, and
why.
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import hashlib
import importlib
import importlib.machinery
import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parents[1]
WARM = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "gfloat", "ml_dtypes")
APART = ("__init__", "activation", "norm")  # held by tolerances, or only put together
ROOMS = [path for room in ("reference", "cpu") for path in sorted((ROOT / "octavo/kernels" / room).glob("*.py"))]
BESIDE = ("layouts", "moment_codes", "step_numbers")
SOURCES = [
    *("octavo/numerics.py", "octavo/formats.py", "octavo/granularity.py", "octavo/scaling/delayed.py"),
    *(str(path.relative_to(ROOT)) for path in ROOMS if path.stem not in APART),
    *(f"octavo/kernels/{name}.py" for name in BESIDE),
    *(f"octavo/autograd/{name}.py" for name in ("casts", "chain", "products")),
    *(f"octavo/weights/{name}.py" for name in ("operands", "kept", "writes")),
]
TESTS = [
    *("tests/test_numerics.py", "tests/test_formats.py", "tests/test_granularity.py", "tests/scaling/test_delayed.py"),
    *("tests/kernels/reference", "tests/kernels/cpu", "tests/autograd"),
    *(
        f"tests/kernels/test_{n}.py"
        for n in ("cast", "cast_statistics", "codes", "dequantize", "matmul", "nvfp4", "nvfp4_cpu", *BESIDE)
    ),
    *(f"tests/kernels/test_{n}.py" for n in ("multi_tensor_cast", "note_faults", "norm")),
    *("tests/weights/test_operands.py", "tests/weights/test_kept.py", "tests/weights/test_gathered.py"),
    *("tests/nn/test_freed_weights.py", "tests/integration/test_seams.py"),
    *("tests/optim/test_adam.py", "tests/optim/test_sgd.py", "tests/kernels/triton/test_optimizer_step.py"),
]
OPERATORS = """Add Sub, Mult Div, FloorDiv Mult, Mod FloorDiv, Pow Mult, LShift RShift, BitAnd BitOr, And Or, Lt LtE,
    Gt GtE, Eq NotEq, Is IsNot, In NotIn"""
METHODS = "add sub, add_ sub_, mul div, mul_ div_, min max, amin amax, any all, minimum maximum, zeros_like ones_like"
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arg, ast.Import, ast.ImportFrom)
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")


def other(pairs: str, name: str) -> str:
    """Return the name that ``name`` is paired with, or ""."""
    twos = [pair.split() for pair in pairs.split(",")]
    return next((b for a, b in [*twos, *(two[::-1] for two in twos)] if a == name), "")


def faults(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may stand in a node's place."""
    match node:
        case ast.operator() | ast.cmpop() | ast.boolop() if name := other(OPERATORS, type(node).__name__):
            yield getattr(ast, name)()
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, ast.UnaryOp | ast.Compare):
            yield type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
        case ast.Constant(value=float()):
            yield ast.Constant(node.value * 2 or 1.0)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Call(func=ast.Attribute(attr=attr)) if name := other(METHODS, attr):
            yield ast.Call(ast.Attribute(node.func.value, name, ast.Load()), node.args, node.keywords)


def mutants(tree: ast.AST, function: str = "", line: int = 0) -> Iterator[tuple[str, int]]:
    """The name and the line of each mutant; while one is held, it is what ``tree`` is."""
    for field, value in ast.iter_fields(tree):
        nodes = value if isinstance(value, list) else [value]
        for index, node in enumerate(nodes):
            if field in SKIPPED_FIELDS or not isinstance(node, ast.AST) or isinstance(node, SKIPPED):
                continue
            shown = node if hasattr(node, "lineno") else tree  # an operator has no text of its own
            line_of_node, before = getattr(node, "lineno", line), ast.unparse(shown).partition("\n")[0]
            for fault in faults(node):
                nodes[index] = fault
                setattr(tree, field, value if isinstance(value, list) else fault)
                after = ast.unparse(fault if shown is node else tree).partition("\n")[0]
                yield f"{function}: {before} -> {after}", line_of_node
                nodes[index] = node
                setattr(tree, field, value if isinstance(value, list) else node)
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            yield from mutants(node, f"{function}.{node.name}".strip(".") if named else function, line_of_node)


def of_file(source: str, wanted: set[str] | None = None) -> Iterator[tuple[str, int, Any]]:
    """``mutants`` of a file with their code, under names of their own: of like ones the second ends in #2."""
    tree, seen = ast.parse((ROOT / source).read_text()), Counter[str]()
    for name, line in mutants(tree):
        seen[name] += 1
        full = f"{source}::{name}" + (f" #{seen[name]}" if seen[name] > 1 else "")
        if wanted is None or full in wanted:
            yield full, line, wanted and compile(ast.fix_missing_locations(tree), ROOT / source, "exec")


class Chosen:
    """A pytest plugin that runs only these tests, in this order, and keeps what each took and which failed."""

    def __init__(self, order: list[str]) -> None:
        self.order = {test: place for place, test in enumerate(order)}
        self.seconds, self.failed = Counter[str](), ""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Any:
        yield
        if self.order:
            items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        self.failed = report.nodeid if report.failed else self.failed

    def pytest_collectreport(self, report: Any) -> None:
        self.failed = report.nodeid if report.failed else self.failed


def run(tests: list[str], order: list[str], *options: str) -> dict[str, Any]:
    """Return what pytest finds, in a fork."""
    chosen = Chosen(order)
    answer = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options, *tests], [chosen])
    killed = bool(chosen.failed) or answer not in (0, 1, 5)  # 1 alone: a test took too long; 5: there is none
    return {"killed": killed, "by": chosen.failed or f"exit {answer}", "seconds": chosen.seconds}


def meet(source: str, code: Any, order: list[str]) -> dict[str, Any]:
    """Return what tests find where importing ``source`` executes ``code``, in a fork: its own file's tests first."""
    real, path = importlib.machinery.SourceFileLoader.get_code, str(ROOT / source)
    importlib.machinery.SourceFileLoader.get_code = (  # type: ignore[method-assign]
        lambda self, name: code if self.path == path else real(self, name)
    )
    outcome: dict[str, Any] = {"killed": False}
    own_tests = [test for test in order if f"/test_{Path(source).stem}.py::" in test]
    for stage in (own_tests, [test for test in order if test not in own_tests]):
        if stage and not outcome["killed"]:
            outcome = run([*dict.fromkeys(test.partition("::")[0] for test in stage)], stage, "-x", "-p", "no:cov")
    return outcome


def in_a_fork(work: Callable[[], Any], limit: float, log: Path) -> Any:
    """Return what ``work`` returns in a fork of this process; None if it does not within so many seconds."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with log.open("w") as output, os.fdopen(writer, "w") as answer:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(int(limit))
            try:
                json.dump(work(), answer)
                answer.flush()
            finally:
                os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def survey(state: Path) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
    """The tests that reach each line of each source, and each test's seconds."""
    seconds_file, data = state / "seconds.json", state / "coverage"
    if not seconds_file.exists():
        os.environ["COVERAGE_FILE"] = str(data)
        options = ["--cov=octavo", "--cov-context=test", "--cov-report="]
        outcome = in_a_fork(lambda: run(TESTS, [], *options), 3600, state / "survey.log")
        if outcome is None or outcome["killed"]:
            raise SystemExit(f"the tests must pass before mutants meet them: see {state / 'survey.log'}")
        seconds_file.write_text(json.dumps(outcome["seconds"]))
    lines = coverage.CoverageData(str(data))
    lines.read()
    reached = {source: lines.contexts_by_lineno(str(ROOT / source)) for source in SOURCES}
    tests = {s: {n: [c.partition("|")[0] for c in t if c] for n, t in r.items()} for s, r in reached.items()}
    return tests, json.loads(seconds_file.read_text())


def cheapest(tests: list[str], seconds: dict[str, float], budget: float) -> list[str]:
    """The cheapest test of each function, then the second ones, as far as the budget of seconds goes."""
    cells, order = Counter[str](), list[tuple[int, float, str]]()
    for test in sorted(seconds.keys() & tests, key=seconds.__getitem__):
        cells[test.partition("[")[0]] += 1
        order.append((cells[test.partition("[")[0]], seconds[test], test))
    taken = itertools.accumulate(cost for _, cost, _ in sorted(order))
    return [test for (_, _, test), spent in zip(sorted(order), taken, strict=True) if spent < budget]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=SOURCES, help="files to put faults into")
    parser.add_argument("--sample", type=int, help="only so many of all mutants, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests that a mutant meets at most")
    parser.add_argument("--again", action="store_true", help="those that survived before meet the tests again")
    parser.add_argument("--state", type=Path, default=Path("/tmp/octavo-mutants"))
    args = parser.parse_args()
    args.state.mkdir(parents=True, exist_ok=True)
    for name in WARM:
        importlib.import_module(name)
    tests, seconds = survey(args.state)

    names = [name for source in args.sources for name, _, _ in of_file(source)]
    # by a hash: a mutant that is new or gone leaves the rest of the sample as it was
    drawn = {*sorted(names, key=lambda name: hashlib.sha256(f"{args.seed} {name}".encode()).digest())[: args.sample]}
    path = args.state / "outcomes.json"
    outcomes: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    finished = {name for name, by in outcomes.items() if by or not args.again}
    for source in args.sources:
        anywhere = list({test for reaching in tests[source].values() for test in reaching})
        for name, line, code in of_file(source, drawn - finished):
            direct = [test for test in anywhere if f"/test_{Path(source).stem}.py::" in test]  # a value may be cached
            order = cheapest([*(tests[source].get(line) or anywhere), *direct], seconds, args.budget)
            work = functools.partial(meet, source, code, order)
            met = in_a_fork(work, 60 + 5 * args.budget, args.state / "mutant.log")
            outcomes[name] = "no answer" if met is None else met["by"] if met["killed"] else ""
            path.write_text(json.dumps(outcomes, indent=0))
            print("killed  " if outcomes[name] else "SURVIVES", name, flush=True)

    with (ROOT / "tests" / "mutants.csv").open(newline="") as file:
        excused = {row["mutant"] for row in csv.DictReader(file)}
    alive = {name for name in drawn if not outcomes[name]}
    killed, counted = len(drawn - alive), len(drawn - (alive & excused))
    print(f"{killed} of {counted} mutants found, {100 * killed / max(counted, 1):.1f} %; what found each: {path}")
    print(f"{len(alive & excused)} more are in tests/mutants.csv; without a reason survive {len(alive - excused)}:")
    print(*sorted(alive - excused), sep="\n")


if __name__ == "__main__":
    main()
