"""Muon with its momentum in FP8, beside AdamW and float32: losses, bytes, the time of a step by part.

A byte-level GPT in float32 with no product in FP8, so that the optimizer alone differs; one thread. A seed fixes the
initial weights and the data. ``sensitivity``: what rounding does to orthogonalised matrices: of the hidden matrices'
momentum at the end of the run without rounding, how far the result in bf16 is from that of exact arithmetic, in percent
of its Frobenius norm. Written to results/muon_training-<device>.csv, muon_sensitivity and, 50 steps alone, muon_step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import markdown, read, signed
from octavo.optim.state import bytes_of
from octavo.train import Batches, ModelConfig, OptimizerConfig, StateConfig, load_corpus
from octavo.train.model import GPT, next_byte_loss
from octavo.train.trainer import build_model, build_optimizer, learning_rate

TAKES = "20 minutes"
MEASURES = ("octavo/optim", "octavo/kernels/reference/optimizer_step.py", "octavo/kernels/reference/optimizer_state.py")

BASELINE = "AdamW, float32"
VARIANTS: dict[str, tuple[str, str, str]] = {  # algorithm, moments, directions
    BASELINE: ("adamw", "fp32", ""),
    "Muon, float32": ("muon", "fp32", "bf16"),
    "Muon, FP8": ("muon", "fp8", "bf16"),
    "Muon, FP8, directions in FP8": ("muon", "fp8", "fp8"),
}
MODEL = ModelConfig(width=64, layers=2, heads=2, context=64)
BATCH, STEPS, TIMED, WINDOWS = 8, 1000, 50, 512
RATES = {"adamw": 6e-3, "muon": 2e-2}  # the best of four each, of seed 7 after 300 steps without rounding
PARTS = {"_direction": "momentum", "_orthogonal": "orthogonalisation", "_move": "weights"}


def one_run(variant: str, seed: int, steps: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Train; a row of results, one of times, and the optimizer."""
    algorithm, moments, directions = VARIANTS[variant]
    options = OptimizerConfig(steps=steps, lr=RATES[algorithm])
    model, batches = build_model(MODEL, "bf16", seed), Batches(load_corpus(None), MODEL.context, BATCH, seed)
    optimizer: Any = build_optimizer(model, options, StateConfig(moments, algorithm=algorithm))  # type: ignore[arg-type]
    seconds = defaultdict[str, float](float)
    if directions:
        optimizer.directions = directions
        for name, part in PARTS.items():
            setattr(optimizer, name, timed(getattr(optimizer, name), part, seconds))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.zero_grad()
        loss_of(model, batches.training(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        start = time.perf_counter()
        optimizer.step()
        seconds["step"] += time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        loss = statistics.fmean(float(loss_of(model, windows)) for windows in batches.validation(WINDOWS))
    state = [value for of in optimizer.state.values() for name, value in of.items() if name != "step"]
    row = {"seed": seed, "variant": variant, "val_loss": f"{loss:.5f}"}
    row["state_bytes_a_parameter"] = f"{bytes_of(state) / MODEL.parameters:.2f}"
    times = {f"ms_{part}": f"{1e3 * seconds[part] / steps:.2f}" for part in ("step", *PARTS.values())}
    return row, {"variant": variant, **times}, optimizer


def loss_of(model: GPT, windows: tuple[Tensor, Tensor]) -> Tensor:
    """Nats a byte."""
    return next_byte_loss(model(windows[0]), windows[1])


def timed(function: Any, part: str, seconds: dict[str, float]) -> Any:
    """The function, which adds its time to a part's."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        start = time.perf_counter()
        found = function(*args, **named)
        seconds[part] += time.perf_counter() - start
        return found

    return call


def sensitivity(optimizer: Any) -> list[dict[str, Any]]:
    """Rows: what is rounded, and the mean and the largest error of orthogonalised matrices, percent."""
    errors = defaultdict[str, list[float]](list)
    moment = octavo.optim.Moment(octavo.E4M3, rounding="stochastic")
    for param in optimizer.param_groups[0]["params"]:
        exact = optimizer.state[param]["momentum_buffer"]
        stored = octavo.optim.state.converted(param, "m", octavo.optim.Moment("fp32"), moment, {"m": exact})
        rounded = {
            "nothing: bf16 alone": exact,
            "the momentum, E4M3 in blocks of 128": moment.read_codes(stored["m_codes"], stored["m_scale_inv"]),
            "the momentum, E4M3 with one scale": octavo.quantize(exact, octavo.E4M3, octavo.PerTensor()).dequantize(),
        }
        wanted = orthogonal(exact.double())
        found = {what: orthogonal(matrix.bfloat16()).double() for what, matrix in rounded.items()}
        found["operands of the iteration's products, E4M3 by rows"] = orthogonal(exact, in_fp8).double()
        for what, matrix in found.items():
            errors[what].append(100 * float((matrix - wanted).norm() / wanted.norm()))
    return [
        {
            "rounded": what,
            "mean_error_percent": f"{statistics.fmean(of):.3f}",
            "largest_error_percent": f"{max(of):.3f}",
        }
        for what, of in errors.items()
    ]


def in_fp8(a: Tensor, b: Tensor) -> Tensor:
    """The product of a's rows and b's columns, each rounded to E4M3 with a scale."""
    rows, columns = (octavo.quantize(x, octavo.E4M3, octavo.PerRow()).dequantize() for x in (a, b.mT))
    return rows @ columns.mT


def orthogonal(matrix: Tensor, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Tensor:
    """torch's iteration with its coefficients, in the matrix's dtype."""
    a, b, c = 3.4445, -4.775, 2.0315
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        square = product(wide, wide.mT)
        wide = a * wide + product(b * square + c * product(square, square), wide)
    return wide.mT if matrix.shape[0] > matrix.shape[1] else wide


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks muon_training", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, errors = [], []
    for seed in options.seeds:
        for variant in VARIANTS:
            row, _, optimizer = one_run(variant, seed, options.steps)
            rows.append(row)
            print(row, flush=True)
            if variant == "Muon, float32" and seed == options.seeds[0]:
                errors = sensitivity(optimizer)
    times = [one_run(variant, 0, TIMED)[1] for variant in VARIANTS]
    for name, found in {"muon_training": rows, "muon_sensitivity": errors, "muon_step": times}.items():
        print(table(found))
        if not options.no_write and found:
            print(f"written to {write_results(name, found)}")
    return 0


def losses_table() -> str:
    """Final validation losses, bytes of state and times by variant."""
    found, cells = read("muon_training"), []
    times = {row["variant"]: row for row in read("muon_step")}
    seeds = list(dict.fromkeys(row["seed"] for row in found))
    exact = [float(row["val_loss"]) for row in found if row["variant"] == "Muon, float32"]
    for variant in VARIANTS:
        own = [row for row in found if row["variant"] == variant]
        gap = statistics.fmean(100 * (float(row["val_loss"]) / of - 1) for row, of in zip(own, exact, strict=True))
        whole, *parts = (float(times[variant][f"ms_{part}"]) for part in ("step", *PARTS.values()))
        of_parts = f" ({', '.join(f'{part:.1f}' for part in parts)})" * (variant != BASELINE)
        losses = [f"{float(row['val_loss']):.4f}" for row in own]
        cells.append(
            [variant, *losses, f"{signed(gap)} %", own[0]["state_bytes_a_parameter"], f"{whole:.1f}{of_parts}"]
        )
    header = ["", *(f"seed {seed}" for seed in seeds), "of Muon in float32", "bytes of state a parameter", "ms a step"]
    return markdown(header, cells)


def sensitivity_table() -> str:
    """Errors of orthogonalised matrices by what is rounded."""
    cells = [
        [row["rounded"], f"{row['mean_error_percent']} %", f"{row['largest_error_percent']} %"]
        for row in read("muon_sensitivity")
    ]
    return markdown(["rounded", "mean error", "largest error"], cells)


TABLES = {"Muon's losses": losses_table, "Muon's sensitivity": sensitivity_table}
