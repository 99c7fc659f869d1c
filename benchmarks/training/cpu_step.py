"""A whole training step on a CPU, eager and compiled, beside high precision and torchao: AdamW, 8 x 256 tokens.

The trainer's GPT, 256 wide with 4 layers, and 1,024 wide with 2: what casts cost of a product falls with the width.
All compute in the dtype that the CPU multiplies fastest, bf16 or float32 (column ``base``): what one would train there.
``first_step_s`` is the first step of a compiled model, without caches. Rows of another width or mode stay.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.common.measure import device_name, interleaved, provenance, ratio, table, write_results
from benchmarks.common.models import OCTAVO, with_octavo, with_torchao
from benchmarks.common.pages import markdown, read
from octavo.kernels.capability import fast_dtype
from octavo.train.config import VOCABULARY, ModelConfig
from octavo.train.model import GPT, next_byte_loss

TAKES = "25 minutes"
MEASURES = ("octavo/kernels/cpu", "octavo/kernels/reference", "octavo/autograd", "octavo/nn/linear.py")


class Size(NamedTuple):
    """``steps``: in a row in each of the rounds, as in training."""

    model: ModelConfig
    rounds: int
    steps: int


SIZES = {
    "256": Size(ModelConfig(width=256, layers=4, heads=4, context=256), 6, 3),
    "1024": Size(ModelConfig(width=1024, layers=2, heads=4, context=256), 3, 1),
}
BATCH = 8
MODES = ("eager", "compiled")
AIMS = {"dynamic": 1.3, "delayed": 1.3, "rowwise": 1.6, "blockwise": 1.5, "mx": 1.5}  # of the base, 256 wide
THEIRS = ("tensorwise", "rowwise_with_gw_hp")  # torchao's recipes: the default, and the fastest here
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "bf16", "sve")  # torch.cpu's and Linux's names


def instructions() -> str:
    """Return the names in INSTRUCTIONS that /proc/cpuinfo has, or torch where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^(?:flags|Features)\s*:(.*)", cpuinfo.read_text(), re.MULTILINE)
        names = set(named.group(1).split() if named else ())
    else:
        names = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    return " ".join(name for name in INSTRUCTIONS if name in names)


def step_of(convert: Callable[[nn.Module], nn.Module], width: str, mode: str, dtype: torch.dtype) -> Callable[[], None]:
    """Return one training step of a converted model."""
    torch.manual_seed(0)
    config = SIZES[width].model
    model = convert(GPT(config).to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, targets = torch.randint(0, VOCABULARY, (2, BATCH, config.context))
    if mode == "compiled":
        model.compile(dynamic=False)

    def step() -> None:
        next_byte_loss(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(width: str, mode: str, rounds: int | None = None) -> list[dict[str, object]]:
    """Return a row for each variant."""
    dtype = fast_dtype(torch.device("cpu"))
    base = str(dtype).removeprefix("torch.")
    kinds: dict[str, Callable[[nn.Module], nn.Module]] = {base: lambda model: model}
    kinds |= {f"octavo {name}": functools.partial(with_octavo, recipe=name) for name in OCTAVO}
    kinds |= {f"torchao {name}": functools.partial(with_torchao, recipe=name) for name in THEIRS}
    torch.compiler.reset()
    variants = {name: step_of(convert, width, mode, dtype) for name, convert in kinds.items()}
    first = {}
    with torch._inductor.config.patch(force_disable_caches=True):
        for name, step in variants.items():
            begin = time.perf_counter()
            step()
            first[name] = time.perf_counter() - begin
    seconds = interleaved(variants, rounds or SIZES[width].rounds, SIZES[width].steps)
    return [
        {"width": width, "mode": mode, "variant": name}
        | {"step_ms": f"{statistics.median(seconds[name]) * 1e3:.1f}", "by_base": f"{ratio(seconds, name, base):.3f}"}
        | {"first_step_s": f"{first[name]:.1f}" if mode == "compiled" else "", "base": base}
        | {"instructions": instructions()}
        for name in variants
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu_step", description=__doc__)
    parser.add_argument("--widths", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, help="instead of a width's")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    missed = []
    for group in itertools.product(options.widths, options.modes):
        rows = measured(*group, options.rounds)
        print(table(rows), flush=True)
        if not options.no_write:
            rows_here = [row for row in read("cpu_step") if row["device"] == device_name()]
            others = [row for row in rows_here if (row["width"], row["mode"]) != group]
            every = sorted([*others, *(row | provenance() for row in rows)], key=_place)
            print(f"written to {write_results('cpu_step', every)}", flush=True)
        by_base = {str(row["variant"]): float(str(row["by_base"])) for row in rows}
        for name, aim in AIMS.items() if group[0] == "256" else ():
            share, least = by_base[f"octavo {name}"], min(by_base[f"torchao {theirs}"] for theirs in THEIRS)
            if share > min(aim, least):
                missed.append(f"MISSED: {group[1]}, octavo {name} {share}, aim {aim}, torchao {least}")
    print(*missed, sep="\n")
    return int(bool(missed))


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return list(SIZES).index(row["width"]), MODES.index(row["mode"])


def compiled_table() -> str:
    """Return docs/compile.md's table: a compiled step by the base's compiled and by eager's, and the first step."""
    rows_by_variant = {(row["width"], row["mode"], row["variant"]): row for row in read("cpu_step")}
    rows = []
    for (width, mode, variant), row in rows_by_variant.items():
        if mode == "compiled":
            eager = rows_by_variant.get((width, "eager", variant), {})
            alike = eager.get("commit") == row["commit"]
            by_eager = f"{float(row['step_ms']) / float(eager['step_ms']):.2f}" if alike else ""
            rows.append([width, f"`{variant}`", f"{float(row['by_base']):.2f}", by_eager, row["first_step_s"]])
    return markdown(("width", "variant", "step, by high precision's", "by its own eager step", "first step, s"), rows)


TABLES = {"compiled steps": compiled_table}
