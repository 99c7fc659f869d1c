from __future__ import annotations

import fcntl
import gc
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.support import sets

if TYPE_CHECKING:
    from tests.support import triton_kernels
    from tests.support.pool import Pool

if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # torch's attention would pack bfloat16 for oneDNN's products with AMX, which its kernels without AVX512 refuse
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

ROOT = Path(__file__).parents[1]
# What a test of the default set may take: in seconds, or on a slow machine as a share of all tests' seconds. Three
# times as much, which noise does not explain, fails the run.
LIMIT, SHARE, FAILS = 5.0, 0.01, 3
# Tests that may take longer, and why.
LONG = {
    "tests/compile/test_around.py::test_a_fused_llama_equals_eager_in_one_graph[delayed]": "traces a whole Llama",
    "tests/distributed/test_compile.py::test_graphs_and_bits[in_blocks-delayed]": "compiles on two ranks",
    "tests/integration/test_compiled_bytes.py::test_each_known_forward_moves_no_more_than_eager_or_inductors_own": (
        "Inductor schedules a decoder layer, forward and backward"
    ),
}


LAST_ON_RANKS = pytest.StashKey[pytest.Item]()
COMPILING = pytest.StashKey[threading.Thread]()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without a traceback, which torch.manual_seed formats for each kind of device: milliseconds a test
        torch.default_generator.manual_seed(0)


@pytest.fixture
def kernels() -> Iterator[triton_kernels.TritonKernels]:
    """The Triton kernels, each by its op's name; for tests marked ``gpu``. No test replays what another recorded."""
    from tests.support import triton_kernels

    with triton_kernels.running() as kernels, mock.patch.object(kernels.module("replay"), "REPLAYS", {}):
        yield kernels


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks; see tests/support/pool.py."""
    from tests.support.pool import Pool

    pool = Pool()
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture
def lone_mesh() -> Iterator[Any]:
    """A mesh of one dimension whose one rank is this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# --- which tests run, and their seconds -------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("octavo")
    group.addoption("--full", action="store_true", help="all tests, not the default set")
    group.addoption("--part", metavar="K/N", help="only the Kth of N parts that take equally long")
    group.addoption("--order-seed", type=int, metavar="N", help="files, and the tests of each, in an order drawn by N")
    group.addoption("--compiled", metavar="SM", help="tests marked gpu, compiled for sm_89, sm_90, ... and emulated")
    group.addoption("--write-seconds", action="store_true", help="write what files took to tests/seconds.csv")


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests or config.option.collectonly:  # who only hands tests to workers need not wait for torch
        prepare_process()
    if runs_tests and not config.option.collectonly:
        config.stash[COMPILING] = threading.Thread(target=compile_library, daemon=True)
        config.stash[COMPILING].start()
    if config.getoption("--part"):
        try:
            sets.parse_part(config.getoption("--part"))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    if config.getoption("--write-seconds") and not config.getoption("--full"):
        raise pytest.UsageError("--write-seconds writes what files take in the full set: add --full")
    if compiled := config.getoption("--compiled"):
        from tests.support import emulated, triton_kernels

        if compiled.removeprefix("sm_") not in map(str, emulated.DEVICES):
            raise pytest.UsageError(
                f"--compiled {compiled}: choose one of sm_{', sm_'.join(map(str, emulated.DEVICES))}"
            )
        triton_kernels.compiled_for = int(compiled.removeprefix("sm_"))
        config.option.markexpr = "gpu"
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Seconds(config), "octavo-seconds")


def prepare_process() -> None:
    """Import torch and octavo, outside the filters that make their warnings errors; one thread, a worker a core."""
    import torch

    from tests.support.pool import guard_together

    guard_together()
    torch.set_num_threads(1)  # small tensors gain nothing by two


def compile_library() -> None:
    """Compile octavo's C++, in an environment's first run; of several workers each compiles one file first."""
    from octavo.kernels.cpu.library import library

    for name in ("cast", "optimizer_step")[:: -1 if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else 1]:
        with (ROOT / f"octavo/kernels/cpu/{name}.cpp").open() as source:
            fcntl.flock(source, fcntl.LOCK_EX)
            library(name)


def starts_ranks(item: pytest.Item) -> bool:
    """Whether a test runs on ranks of the pool; doctests have no fixtures."""
    return "pool" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_group_items(items: list[pytest.Item]) -> None:
    """Have one worker run each file, with its imports and caches, and one run all tests that start ranks."""
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        # it would read all sources for their constants, seconds in each worker, and draw others after each change
        providers._get_local_constants = lambda: providers._local_constants  # type: ignore[attr-defined]
    for item in items:
        item.add_marker(pytest.mark.xdist_group("pool" if starts_ranks(item) else sets.file_of(item)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The default set, unless --full, or a test was given by its name; of several workers one begins with the ranks."""
    full = config.getoption("--full") or any("::" in argument for argument in config.args)
    part, order_seed = config.getoption("--part"), config.getoption("--order-seed")
    sets.choose(items, full, part, order_seed, lambda others: config.hook.pytest_deselected(items=others))
    if hasattr(config, "workerinput"):
        files = [*dict.fromkeys(map(sets.file_of, items))]
        last = {*files[: len(files) // 4 : 2]}  # cheap ones: at the end nobody waits for another's long file
        items.sort(key=lambda item: 0 if starts_ranks(item) else 1 + (sets.file_of(item) in last))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what takes seconds: the imports of the processes that ranks are forked from.

    Octavo's C++ has been compiled while tests were collected: no test is to wait for it, and be too long.
    """
    from tests.support.pool import prepare

    one_worker = not hasattr(session.config, "workerinput")  # of several only that imports which runs those tests
    if one_worker and any(map(starts_ranks, session.items)) and not session.config.option.collectonly:
        prepare()
    if session.items and (thread := session.config.stash.get(COMPILING, None)):
        thread.join()
    if hasattr(session.config, "workerinput") and session.items:
        import torch._dynamo  # noqa: F401  # takes seconds, for which no test is to be too long
    if needing := [*filter(starts_ranks, session.items)]:
        session.config.stash[LAST_ON_RANKS] = needing[-1]
    gc.collect()
    gc.freeze()  # collected tests stay: no later garbage collection looks at them
    gc.set_threshold(10_000, 20, 20)  # and few are needed: a test leaves little


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze a file's objects: no later collection looks at them, nor does whoever asks for all objects.

    Ranks end with the last test that needs them: a thread for each group that they made wakes up 100 times a second.
    """
    if item is item.config.stash.get(LAST_ON_RANKS, None) and (ranks := item.funcargs.get("pool")):  # type: ignore[attr-defined]
        ranks.stop()
    if nextitem is None or sets.file_of(nextitem) != sets.file_of(item):
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()  # torch compiles a function eight times, and no more, whichever files ask for it
        gc.collect()
        gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    if not config.getoption("--full"):
        return f"default set: covering arrays of seed {sets.SEED}; --full runs all tests"
    workers = config.getoption("numprocesses", None) or 1
    seconds = sets.seconds_of_part(config.getoption("--part")) / workers
    return f"full set: about {seconds / 60:.0f} min with {workers} workers (tests/seconds.csv)"


class _Seconds:
    """The seconds of tests: shown, written when asked for, and far too many of them a failure."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: dict[str, float] = defaultdict(float)
        self.calls: dict[str, float] = {}  # without setups: there the first test that needs the pool waits for it

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = re.sub(r"@(pool|[\w/]+\.py)$", "", report.nodeid)  # without its group
        self.tests[test] += report.duration
        if report.when == "call":
            self.calls[test] = report.duration

    def too_long(self, times: int = 1) -> dict[str, float]:
        if self.config.getoption("--full") or any("::" in argument for argument in self.config.args):
            return {}
        limit = times * max(LIMIT, SHARE * sum(self.tests.values()))
        return {test: seconds for test, seconds in self.calls.items() if seconds > limit and test not in LONG}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.too_long(FAILS) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.config.getoption("--write-seconds"):
            sets.write_seconds(self.by_file())

    def by_file(self) -> dict[str, float]:
        files: dict[str, float] = defaultdict(float)
        for test, seconds in self.tests.items():
            files[test.partition("::")[0]] += seconds
        return files

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("seconds")
        for table in (self.by_file(), self.tests):
            for name, seconds in sorted(table.items(), key=lambda pair: -pair[1])[:10]:
                if seconds > 1:
                    write(f"{seconds:7.1f}  {name}")
        write(f"{sum(self.tests.values()):7.1f}  all {len(self.tests)} tests, on all workers together")
        for name, seconds in self.too_long().items():
            write(f"TOO LONG: {name} took {seconds:.1f} s: make it cheaper, mark it full, or give the reason in LONG")
