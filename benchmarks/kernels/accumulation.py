"""Errors of tensor cores in sums of FP8 products, by architecture, K and the signs of the terms.

By the emulator's rules, which no GPU ran here: emulator/tensor_cores.py names their sources. Both operands are E4M3
codes of one scale, of N(0, 1) or of its absolute values; each result is compared with the exact sum of its codes'
products, so that casts lose nothing here. An instruction adds 32 terms to the accumulator; in two levels, the sum of
128 terms is added to a float32 sum, rounded to nearest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.pages import markdown, read, signed
from emulator.tensor_cores import multiply_add, rule_of
from octavo.kernels.triton.agreement import sqnr

TAKES = "1 minute"
MEASURES = ("emulator/tensor_cores.py", "benchmarks/kernels/accumulation.py")

TERMS = (256, 1024, 4096, 16384)
SIGNS = ("mixed", "positive")
STEP = 128  # of two levels, as the Triton kernels sum
SOURCE = "emulator/tensor_cores.py, equal to mmasim 2.1.1 on tests' operands"


class Way(NamedTuple):
    """A way to sum a product: the instruction, and whether in two levels."""

    target: str
    instruction: str
    two_levels: bool = False


WAYS = (
    Way("sm_89", "mma"),
    Way("sm_89", "mma", True),
    Way("sm_90a", "wgmma"),
    Way("sm_90a", "wgmma", True),
    Way("sm_100a", "tcgen05"),
    Way("sm_120a", "mma"),
)
ROUNDED = {"exact, rounded to bfloat16": torch.bfloat16, "exact, rounded to float32": torch.float32}


def operand(signs: str, rows: int, terms: int, seed: int) -> np.ndarray:
    """Return [1, rows, terms], exact values of E4M3 codes, whose largest is 448."""
    values = torch.randn(rows, terms, generator=torch.Generator().manual_seed(seed))
    values = values.abs() if signs == "positive" else values
    return (values * (448 / values.abs().max())).to(torch.float8_e4m3fn).double().numpy()[None]


def partial_sums(way: Way, a: np.ndarray, b: np.ndarray, terms: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield the result's sum [1, M, N] after each of these numbers of terms."""
    rule = rule_of(way.target, way.instruction, "e4m3", "e4m3")
    nothing = np.zeros((1, a.shape[1], b.shape[1]), np.float32)
    total = nothing
    for before, after in pairwise((0, *terms)):
        for k in range(before, after, STEP):
            now = np.s_[:, :, k : k + STEP]
            part = multiply_add(a[now], b[now], nothing if way.two_levels else total, rule)
            total = total + part if way.two_levels else part
        yield total


def error(result: np.ndarray, exact: np.ndarray) -> dict[str, object]:
    """Return SQNR in dB, and how much larger results are on average, relative to their size."""
    bias = ((result - exact) * np.sign(exact)).sum() / np.abs(exact).sum()
    return {
        "sqnr_db": f"{sqnr(torch.from_numpy(result), torch.from_numpy(exact)):.1f}",
        "bias_percent": f"{100 * bias:.3g}",
    }


def rows(size: int, terms: tuple[int, ...] = TERMS) -> Iterator[dict[str, object]]:
    """Yield the table's rows, of size x size results each."""
    for signs in SIGNS:
        a, b = (operand(signs, size, terms[-1], seed) for seed in (0, 1))
        exact = [a[0, :, :k] @ b[0, :, :k].T for k in terms]  # codes' products are multiples of 2^-18: no bit is lost
        for way in WAYS:
            names = {"architecture": way.target.rstrip("a"), "instruction": way.instruction}
            names["levels"] = "2" if way.two_levels else "1"
            for k, truth, sums in zip(terms, exact, partial_sums(way, a, b, terms), strict=True):
                yield names | {"signs": signs, "k": k} | error(sums[0].astype(np.float64), truth)
        for name, dtype in ROUNDED.items():
            for k, truth in zip(terms, exact, strict=True):
                rounded = torch.from_numpy(truth).float().to(dtype).double().numpy()
                yield {"architecture": name, "instruction": "", "levels": "", "signs": signs, "k": k} | error(
                    rounded, truth
                )


def accumulation_table() -> str:
    """Return the table of docs/kernels.md: SQNR by K, and the bias of positive terms."""
    cells: dict[str, list[str]] = {}
    for row in read("accumulation"):
        name = row["architecture"]
        if row["instruction"]:
            name += f", `{row['instruction']}`" + (f", float32 sum every {STEP}" if row["levels"] == "2" else "")
        bias = f" ({signed(float(row['bias_percent']), 1)} %)" if abs(float(row["bias_percent"])) >= 0.05 else ""
        cells.setdefault(name, []).append(f"{float(row['sqnr_db']):.0f}{bias}")
    header = ("", *(f"{signs}, K = {k}" for signs in SIGNS for k in TERMS))
    return markdown(header, ([name, *values] for name, values in cells.items()))


TABLES = {"accumulation": accumulation_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks accumulation", description=__doc__)
    parser.add_argument("--size", type=int, default=128, help="rows and columns of the product")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    new_rows = list(rows(options.size))
    print(table(new_rows))
    if not options.no_write:
        origin = {"source": SOURCE, "numpy": np.__version__, "torch": torch.__version__, "commit": commit()}
        print(f"written to {write_results('accumulation', new_rows, origin=origin)}")
    return 0
