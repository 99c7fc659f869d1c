"""The emulator finds faults in the real kernels: some of those of ``python -m tests.kernel_mutants``, which has all."""

import csv
import functools
import subprocess
import sys

import pytest
import torch

from tests import kernel_mutants
from tests.kernel_mutants import BARRIERS, KERNELS, ORDERS
from tests.kernels.triton.test_compiled import ALL_CASES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels themselves run")


def test_every_fault_of_the_tables_is_found() -> None:
    mutants = kernel_mutants.all_mutants()
    sources = {path.stem: path.read_text() for path in KERNELS.glob("*.py")}
    for mutant in mutants:
        assert sources[mutant.source].count(mutant.before) == 1, mutant
        assert {(90, mutant.case), (100, mutant.case)} & {*ALL_CASES}
        assert mutant.emulator not in ("", kernel_mutants.CRASH), mutant
    assert len(mutants) >= 40
    assert {name for name, text in sources.items() if "@triton.jit\n" in text} <= {mutant.source for mutant in mutants}
    with BARRIERS.open(newline="") as file:
        assert all(row["found"] or row["why"] for row in csv.DictReader(file))
    with ORDERS.open(newline="") as file:
        assert not any(row["found"] for row in csv.DictReader(file))


@pytest.mark.parametrize(
    ("case", "kernel", "message"),
    [
        ("cast rows", "cast_rows_kernel", "race"),
        pytest.param("tensor . tensor, Triton", "matmul_kernel", "a copy under way", marks=pytest.mark.full),
    ],
)
def test_a_barrier_that_is_left_out(case: str, kernel: str, message: str) -> None:
    """A case shows that one of a kernel's barriers is missing; which one is needed depends on the release of Triton."""
    (one,) = (one for one in kernel_mutants.compiled_kernels([(90, case)]) if one.kernel == kernel)
    count = len(kernel_mutants.BARRIER.findall(one.text))
    changes = (functools.partial(kernel_mutants.without, one.text, {number}) for number in range(count))
    assert any(message in kernel_mutants.outcome(case, 90, change=change) for change in changes)


@pytest.mark.full
@pytest.mark.parametrize("name", ["cast+transpose dynamic", "layernorm gradient + residual"])
def test_orders(name: str) -> None:
    assert kernel_mutants.results_in_orders(name, 3) == ("", 1)


@pytest.mark.full
def test_faults_in_sources() -> None:
    """Faults in sources are found, each in a process that has not imported the kernels."""
    command = [sys.executable, "-m", "tests.kernel_mutants", "sources", "--sample", "3"]
    process = subprocess.run(command, cwd=kernel_mutants.ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
