"""Which faults in the Triton kernels the emulator of PTX finds: ``python -m tests.kernel_mutants``.

    barriers    every barrier of every compiled kernel left out of its PTX in turn
    orders      kernels whose last program ends the work, in random orders of programs and warps
    sources     small faults in the Triton source, which tests/kernel_mutants.csv lists; by Triton's interpreter too

Each fault meets the cases of tests/kernels/triton/test_compiled.py that reach it, in a fork of this process, first all
programs together, then in random orders. The outcomes go to tests/kernel_mutants.csv and its neighbours.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import importlib.machinery
import linecache
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton  # noqa: F401  a fork has it

from emulator import Fault, Options
from tests.mutate import ROOT, in_a_fork

torch.set_num_threads(1)  # a fork has no other threads, and would wait for them
SOURCES, BARRIERS = ROOT / "tests/kernel_mutants.csv", ROOT / "tests/kernel_barriers.csv"
KERNELS = ROOT / "octavo/kernels/triton"
LOG = Path("/tmp/octavo-kernel-mutants.log")
SEEDS, SEEDS_OF_KERNELS = 30, 20  # orders that a fault meets, and that a kernel as it is does
LIMIT = 120  # seconds
CRASH = "crash, or no end"
BARRIER = re.compile(
    r"(?:@!?%\w+\s+)?\b((?:bar|barrier)\.sync|(?:cp\.async|wgmma)\.wait_group|mbarrier\.try_wait)\b[^;]*;"
)
ELSEWHERE = ("cast+transpose dynamic", "cast 1x128 + 128x1", "tensor . tensor, Triton")  # what sm_89 and others run too
REASONS = {  # of barriers that the source asks for, by its file
    "cast_kernels.py": "a thread reads and clears its own elements",
    "grouped_cast.py": "a thread reads and clears its own elements",
    "tiles.py": "not found: needed, but in no order tried was a warp late enough",
    "delayed_update.py": "a thread reads and writes its own elements, or one warp has the history",
}
ACCESS = re.compile(r"\b(ld|st|atom|red|cp|bra|ldmatrix|stmatrix|mma|wgmma|tcgen05|mbarrier)\.|^\$\w+:|\bbra\b", re.M)
LINE = re.compile(r"\.loc[^\n]*// (\w+\.py:\d+)")


class Bursts(np.random.Generator):
    """Random numbers that often stay: the same program or warp goes on, and others are far behind."""

    latest = 0.5

    def integers(self, most: int) -> int:  # type: ignore[override]
        """A number below ``most``."""
        if self.random() < 0.15:
            self.latest = self.random()
        return int(self.latest * most)


def in_orders(seeds: int = SEEDS) -> Iterator[Options]:
    """All together, then random orders of warps."""
    yield Options()
    for seed in range(seeds):
        yield Options("warps", Bursts(np.random.PCG64(seed)))  # type: ignore[arg-type]


def outcome(
    name: str, capability: int | None, options: Options | None = None, change: Callable[[str], str] = str
) -> str:
    """Return the fault of a case in the emulator or, without a capability, Triton's interpreter; "" for none."""
    from tests.kernels.triton.test_compiled import check
    from tests.support import triton_kernels
    from tests.support.emulated import emulating
    from tests.support.triton_cases import assert_counters_are_zero

    torch.manual_seed(0)
    try:
        with triton_kernels.running() if capability is None else emulating(capability, options, change=change):
            kernels = triton_kernels.load(capability is None)
            check(name, kernels)
            assert_counters_are_zero(kernels)
    except Fault as fault:
        return re.split(r": line|, of the| by | of an alloc|: shared bytes|: \d", str(fault))[0]
    except AssertionError:
        return "wrong result"
    except Exception as error:  # what the interpreter raises; what Triton does not compile
        return f"{type(error).__name__}: {error}".partition("\n")[0][:80]
    return ""


def in_some_order(name: str, capability: int, change: Callable[[str], str] = str, seeds: int = SEEDS) -> str:
    """The first outcome in some orders."""
    for options in in_orders(seeds):
        if met := outcome(name, capability, options, change):
            return met + ("" if options.schedule == "together" else ", in an order")
    return ""


# --- barriers ---------------------------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """A kernel's PTX as a case launches it, and which of its barriers are reached, by number."""

    capability: int
    case: str
    kernel: str
    text: str
    reached: set[int]


def compiled_kernels(cases: Iterable[tuple[int, str]]) -> list[Compiled]:
    """Return the kernels that cases launch, each text once."""
    from tests.kernels.triton.test_compiled import check
    from tests.support import triton_kernels
    from tests.support.emulated import emulating

    kernels: dict[tuple[int, str], Compiled] = {}
    for capability, name in cases:
        torch.manual_seed(0)
        texts: list[str] = []
        with emulating(capability, change=lambda text, texts=texts: texts.append(text) or text) as launches:
            check(name, triton_kernels.load(False))
        for text, done in zip(texts, launches, strict=True):
            lines = done.launch.program.instructions
            ran = [done.launch.executed[n] for n, one in enumerate(lines) if BARRIER.match(f"{one.name} ;")]
            new = Compiled(capability, name, done.kernel, text, set())
            kernels.setdefault((capability, text), new).reached.update(n for n, lanes in enumerate(ran) if lanes)
    return list(kernels.values())


def without(text: str, left_out: set[int], changed: str) -> str:
    """PTX without the barriers of these numbers, if it is the kernel's ``text``; a loop around a wait ends at once."""
    if changed != text:
        return changed
    count = iter(range(10**6))

    def replace(one: re.Match[str]) -> str:
        nothing = "setp.eq.u32 complete, 0, 0;" if one[1] == "mbarrier.try_wait" else ""
        return nothing if next(count) in left_out else one[0]

    return BARRIER.sub(replace, text)


def leave_out_barriers() -> None:
    """Leave out each barrier alone; of barriers with no access between them, all."""
    from tests.kernels.triton.test_compiled import ALL_CASES

    rows = []
    for one in compiled_kernels(case for case in ALL_CASES if case[0] == 90 or case[1] in ELSEWHERE):
        for group in neighbours(one.text):
            numbers, site = {number for number, _ in group}, group[0][1]
            place, met = LINE.findall(one.text[: site.start()])[-1], ""
            if numbers & one.reached:
                change = functools.partial(without, one.text, numbers)
                seeds = SEEDS if is_asked_for(place) else 0
                work = functools.partial(in_some_order, one.case, one.capability, change, seeds)
                answer = in_a_fork(work, LIMIT, LOG)  # in a fork: a fault's memory reaches no other case
                met = CRASH if answer is None else answer
            why = "" if met else why_not_found(place, bool(numbers & one.reached))
            which = " ".join(map(str, sorted(numbers)))
            rows.append([one.capability, one.case, one.kernel, which, site[1], place, met, why])
            print(*rows[-1], sep=", ", flush=True)
    write(BARRIERS, ("capability", "case", "kernel", "numbers", "barrier", "line", "found", "why"), rows)


def is_asked_for(place: str) -> bool:
    """Whether a line of the source is a barrier; these order global memory too, which only some orders show."""
    file, line = place.split(":")
    path = KERNELS / file
    return path.exists() and "tl.debug_barrier()" in path.read_text().splitlines()[int(line) - 1]


def why_not_found(place: str, reached: bool) -> str:
    """The reason, where a barrier that is left out changes nothing."""
    if not reached:
        return "no case reaches it"
    if is_asked_for(place):
        return REASONS.get(place.partition(":")[0], "")
    return "Triton's own: on its two sides no two warps, or warpgroups, use the same shared memory"


def neighbours(text: str) -> list[list[tuple[int, re.Match[str]]]]:
    """Return PTX's barriers, each with its number, and with the later ones that no access or jump parts from it."""
    groups: list[list[tuple[int, re.Match[str]]]] = []
    for number, site in enumerate(BARRIER.finditer(text)):
        last = groups[-1][-1][1] if groups else site
        between = text[last.end() : site.start()]
        if groups and last[0] == site[0] == "bar.sync \t0;" and not ACCESS.search(between):
            groups[-1].append((number, site))
        else:
            groups.append([(number, site)])
    return groups


# --- orders -----------------------------------------------------------------------------------------------------------

ORDERS = ROOT / "tests/kernel_orders.csv"
LAST = [  # cases of kernels whose last program ends the work, or whose programs add to the same sums
    *("cast+transpose dynamic", "cast rows + columns", "cast+transpose+sum+commit", "five weights at once"),
    *("grouped cast columns, transposed", "grouped cast+transpose delayed", "rmsnorm + cast+transpose dynamic"),
    *("layernorm gradient + residual", "statistics", "statistics of groups", "optimizer", "optimizer, SGD", "faults"),
]


def results_in_orders(name: str, seeds: int) -> tuple[str, int]:
    """Return the fault that an order shows, and how many different results a case has beside the reference's."""
    from octavo.kernels.triton import cases

    seen: set[bytes] = set()

    def difference(results: Any, *others: Any) -> str:
        seen.add(b"".join(result.contiguous().view(torch.uint8).numpy().tobytes() for result in results))
        return real(results, *others)

    real = cases.difference
    with mock.patch.object(cases, "difference", difference):
        return in_some_order(name, 90, seeds=seeds), len(seen)


def run_in_orders() -> None:
    """Run each case in so many orders."""
    rows = []
    for name in LAST:
        met = in_a_fork(functools.partial(results_in_orders, name, SEEDS_OF_KERNELS), 20 * LIMIT, LOG)
        rows.append([name, 1 + SEEDS_OF_KERNELS, *met])
        print(*rows[-1], sep=" | ", flush=True)
    write(ORDERS, ("case", "orders", "found", "different"), rows)


# --- sources ----------------------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """A small fault in the source of a kernel's file, the case that reaches it, and who finds it."""

    source: str
    before: str
    after: str
    case: str
    emulator: str
    interpreter: str

    def put(self) -> None:
        """Let importing the file, and Triton's reading of it, find the fault; before anything has imported it."""
        path, text = str(KERNELS / f"{self.source}.py"), (KERNELS / f"{self.source}.py").read_text()
        assert text.count(self.before) == 1, self
        text, real = text.replace(self.before, self.after), importlib.machinery.SourceFileLoader.get_code
        importlib.machinery.SourceFileLoader.get_code = (  # type: ignore[method-assign]
            lambda loader, name: compile(text, path, "exec") if loader.path == path else real(loader, name)
        )
        linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path

    def met(self, interpreted: bool = False, seeds: int = SEEDS) -> str:
        """Return what the emulator finds, for sm_90 or a case of Blackwell alone for sm_100, or the interpreter."""

        def work() -> str:
            self.put()
            from tests.kernels.triton.test_compiled import ALL_CASES

            capability = 90 if (90, self.case) in ALL_CASES else 100
            return outcome(self.case, None) if interpreted else in_some_order(self.case, capability, seeds=seeds)

        answer = in_a_fork(work, LIMIT, LOG)
        return CRASH if answer is None else answer


def all_mutants() -> list[Mutant]:
    """Return the table's mutants."""
    with SOURCES.open(newline="") as file:
        return [Mutant(**row) for row in csv.DictReader(file)]


def mutate_sources(sample: int | None = None) -> None:
    """Run mutants without an outcome, by the emulator and the interpreter; of a sample, by the former."""
    if sample is not None:
        drawn = sorted(all_mutants(), key=lambda one: hashlib.sha256(f"{one.source} {one.after}".encode()).digest())
        missed = [mutant for mutant in drawn[:sample] if not mutant.met()]
        raise SystemExit("\n".join(map(str, missed)) or 0)
    for mutant in (rows := all_mutants()):
        if not mutant.emulator:
            met = mutant._replace(emulator=mutant.met(), interpreter=mutant.met(interpreted=True))
            rows[rows.index(mutant)] = met
            print(*met[:1], *met[2:], sep=" | ", flush=True)
            write(SOURCES, Mutant._fields, rows)


def write(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", choices=("barriers", "orders", "sources"))
    parser.add_argument("--sample", type=int, help="only so many sources, whose outcomes are not written")
    args = parser.parse_args()
    if args.faults == "sources":
        mutate_sources(args.sample)
    else:
        {"barriers": leave_out_barriers, "orders": run_in_orders}[args.faults]()


if __name__ == "__main__":
    main()
