"""A whole training step of a Llama of 1.53 billion parameters on a GPU: rows by name, each beside bf16.

The model is transformers', without weights of anyone's; its head is not tied, and in bf16 but for "head". bf16 as it
comes stays on the GPU and takes turns with each row, except that there is no memory for both a CUDA graph and a step of
bf16, which is read before and after. A reading is of STEPS steps in a row; beside it stand the GPU's clock, power and
temperature. Rows come in the order of what they decide, and each is written as it comes, so that a run may be cut at
any point. "profile" is one step of bf16 and of delayed+fuse, kernel by kernel.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common.measure import LiveTable, write_results
from benchmarks.common.pages import markdown, read
from benchmarks.training.llama_profile import account, kernels_of
from benchmarks.training.llama_rows import ORDER, OTHERS, WORDS, Variant, make_step
from octavo.tune.timing import ON_GPU, Deadline, describe, synchronize

TAKES = "a GPU; 6 minutes"
MEASURES = ("octavo/kernels/triton", "octavo/autograd", "octavo/nn", "octavo/optim")

STEPS, ROUNDS = 4, 4  # of a reading, which begins with an idle GPU; readings of a row, and of bf16
PROFILE = "profile"
PROFILED = ("bf16", "delayed+fuse")
COLUMNS = {"variant": 26, "mode": 9, "ms": 9, "bf16_ms": 9, "by_bf16": 8, "peak_gib": 9, "mhz": 24, "watts": 20}
Step = Callable[[], Tensor]


class Reading(NamedTuple):
    """Seconds of a step, and the GPU's clock (MHz), power (W) and temperature (degrees Celsius); None: not known."""

    seconds: float
    clock: float | None = None
    power: float | None = None
    temperature: float | None = None


def state_of_gpu() -> tuple[float | None, float | None, float | None]:
    """Return (MHz, W, degrees Celsius) of the GPU now; None without one, or without nvidia-ml-py, which reads them."""
    try:
        return torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3, torch.cuda.temperature()
    except Exception:  # an import, NVML's own or a driver's
        return None, None, None


def reading(step: Step, steps: int) -> Reading:
    """Time so many steps in a row, which begin with an idle GPU, and read its state while it is at work."""
    synchronize()
    start = time.perf_counter()
    losses = [step() for _ in range(steps)]  # what results take is not given back meanwhile
    state = state_of_gpu()
    synchronize()
    return Reading((time.perf_counter() - start) / len(losses), *state)


def readings(step: Step, count: int, deadline: Deadline, toy: bool) -> list[Reading]:
    """Return so many readings; at least one, and no more after the deadline."""
    results: list[Reading] = []
    while not results or (len(results) < count and deadline.left() > 0):
        results.append(reading(step, 1 if toy else STEPS))
    return results


def pair(step: Step, base: Step, deadline: Deadline, toy: bool) -> tuple[list[Reading], list[Reading]]:
    """Return readings of a step and of bf16's in turns: at least one of each, and no more after the deadline."""
    mine: list[Reading] = []
    bases: list[Reading] = []
    while not mine or (len(mine) < (2 if toy else ROUNDS) and deadline.left() > 0):
        bases += readings(base, 1, deadline, toy)
        mine += bases[-1:] if step is base else readings(step, 1, deadline, toy)
    return mine, bases


def listed(values: Sequence[float | None]) -> str:
    """Return numbers as a cell; "" if none is known."""
    return " ".join(f"{value:.0f}" for value in values if value is not None)


def row_of(
    variant: Variant, mine: Sequence[Reading], bases: Sequence[Reading], peak: float, toy: bool
) -> dict[str, str]:
    """Return the row of a variant's readings beside those of bf16 in the same rounds."""
    seconds = statistics.median(each.seconds for each in mine)
    sizes = variant.sizes(toy)
    ratio = statistics.median(a.seconds / b.seconds for a, b in zip(bases, mine, strict=False))  # in one round
    states = {"": mine, "bf16_": bases}
    cells = {
        f"{whose}{name}": listed([getattr(each, field) for each in readings])
        for whose, readings in states.items()
        for name, field in (("mhz", "clock"), ("watts", "power"), ("celsius", "temperature"))
    }
    return {
        "variant": variant.name,
        "mode": variant.mode,
        "ms": f"{1e3 * seconds:.2f}",
        "tokens_s": f"{sizes.batch * sizes.context / seconds:.0f}",
        "peak_gib": f"{peak:.2f}",
        "by_bf16": f"{ratio:.3f}",
        "bf16_ms": f"{1e3 * statistics.median(each.seconds for each in bases):.2f}",
        "readings_ms": " ".join(f"{1e3 * each.seconds:.2f}" for each in mine),
        "bf16_readings_ms": " ".join(f"{1e3 * each.seconds:.2f}" for each in bases),
        **cells,
        "note": "",
    }


class Steps:
    """Steps that were made: bf16's stay on the GPU, one of each size, and all others go before the next is made."""

    def __init__(self, toy: bool) -> None:
        self.toy = toy
        self.bases: dict[str, Step] = {}
        self.peaks: dict[str, float] = {}

    def made(self, name: str) -> Step:
        """Return a step whose loss does not grow; ``peaks`` has the GiB that it took beside what was there before."""
        if name in self.bases:
            return self.bases[name]
        variant = Variant.of(name)
        if name == variant.base:
            self.bases.clear()  # of the other size
        free()
        resident = 0
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            resident = torch.cuda.memory_allocated()
        step = make_step(variant, self.toy)
        first, last = (float(step()) for _ in range(2))
        if not (math.isfinite(last) and last < first + 0.5):
            raise ArithmeticError(f"the loss goes from {first:.3f} to {last:.3f}")
        self.peaks[name] = (torch.cuda.max_memory_allocated() - resident) / 2**30 if ON_GPU else 0.0
        if name == variant.base:
            self.bases[name] = step
        return step


def measure(name: str, steps: Steps, deadline: Deadline) -> dict[str, str]:
    """Return a row. ImportError says which library is not there."""
    variant = Variant.of(name)
    base = steps.made(variant.base)
    if variant.mode == "captured":
        bases = readings(base, ROUNDS // 2, deadline, steps.toy)
        mine = readings(steps.made(name), ROUNDS, deadline, steps.toy)
        free()
        bases += readings(base, ROUNDS // 2, deadline, steps.toy)
    else:
        mine, bases = pair(steps.made(name), base, deadline, steps.toy)
    return row_of(variant, mine, bases, steps.peaks[name], steps.toy)


def free() -> None:
    """Return to the GPU the memory that a deleted step has left to the allocator."""
    gc.collect()  # a graph and what it keeps refer to each other
    if ON_GPU:
        torch.cuda.empty_cache()


def profiled(steps: Steps, output: Path | None) -> list[str]:
    """Write and return the account of one step of each of PROFILED."""
    rows = []
    for name in PROFILED:
        rows += [{"variant": name, **row} for row in account(kernels_of(steps.made(name)))]
    write_results("llama_profile", rows, output and output.with_name("llama_profile.csv"))
    return [
        f"  {row['variant']}: {row['kind']} {row['ms']} ms, {row['launches']} launches, {row['share']}" for row in rows
    ]


def missing(name: str, why: str) -> dict[str, str]:
    """Return the row of a variant that can't be measured here, with the reason."""
    empty = dict.fromkeys(row_of(Variant.of(name), [Reading(1.0)], [Reading(1.0)], 0.0, True), "")
    return empty | {"variant": name, "mode": Variant.of(name).mode, "note": why}


def run(names: Sequence[str], steps: Steps, minutes: float, output: Path | None) -> bool:
    """Measure rows until the minutes are over, each written as it comes; return whether one of ours failed."""
    whole, rows, live, failed = Deadline(minutes), [], LiveTable(COLUMNS), False
    for name in names:
        seconds = ORDER.get(name, OTHERS)
        if whole.left() < (0 if steps.toy else min(seconds, 15)):
            print(f"{name}: left out, no time", flush=True)
            continue
        try:
            if name == PROFILE:
                print(*profiled(steps, output), sep="\n", flush=True)
                continue
            row = measure(name, steps, Deadline(min(seconds, whole.left()) / 60))
        except ImportError as error:  # Liger and torchao are not everywhere
            row = missing(name, describe(error))
        except Exception as error:
            print(f"FAILED: {name}: {describe(error)}", flush=True)
            failed |= name == PROFILE or not name.startswith("torchao")
            continue
        rows.append(row)
        live.add(row)
        write_results("llama_step", rows, output)
        torch._dynamo.reset()
    return failed


def llama_table() -> str:
    """Return the table of docs/kernels.md: steps, and their memory."""
    keys = ("variant", "mode", "ms", "by_bf16", "peak_gib")
    return markdown(
        ("step", "mode", "ms", "times bf16's speed", "peak GiB"), ([row[k] for k in keys] for row in read("llama_step"))
    )


TABLES: Mapping[str, Callable[[], str]] = {"llama": llama_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks llama_step", description=__doc__)
    words = "; ".join(f"{word}: {about}" for word, about in WORDS.items())
    about = f'names, or "{PROFILE}": a recipe, bf16 or torchao_tensorwise, then words joined by +: {words}'
    parser.add_argument("--rows", nargs="+", default=list(ORDER), metavar="NAME", help=about)
    parser.add_argument("--toy", action="store_true", help="a tiny model, with or without a GPU")
    parser.add_argument("--minutes", type=float, default=6.0, help="what would not fit is left out")
    parser.add_argument("--output", type=Path, help="the CSV, instead of results/llama_step-<device>.csv")
    options = parser.parse_args(arguments)
    if not ON_GPU and not options.toy:
        parser.error("a step of this model needs an NVIDIA GPU; --toy runs the code without one")
    for name in options.rows:
        if name != PROFILE:
            try:
                Variant.of(name)
            except ValueError as error:
                parser.error(str(error))
    return int(run(options.rows, Steps(options.toy), options.minutes, options.output))
