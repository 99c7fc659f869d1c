"""A Linear's forward and backward (dx and dW) in bf16, octavo and torchao, at the shapes of a 4096-wide transformer.

"4 layers" is the sum over the shapes, as in a block of attention and MLP. Variants cast their weight in each step but
the "kept" ones, which have it from the step before, as in gradient accumulation. "products only" is the three
products on operands already cast: what a cast that costs nothing would give. Times are of whole steps in a row, host
included.
Speed-ups are over bf16 in the same run; a layer whose results are far from bf16's has none, but FAILED.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.common.measure import LiveTable, write_results
from benchmarks.common.models import with_torchao
from benchmarks.common.pages import markdown, read
from octavo import kernels, recipes
from octavo.kernels.triton.agreement import sqnr
from octavo.tune.timing import DEVICE, ON_GPU, Deadline, Timings, describe, precompile, timings

TAKES = "a GPU; 1 minute"
MEASURES = ("octavo/kernels/triton", "octavo/autograd", "octavo/nn/recipe_module.py")

Shape = tuple[int, int, int]  # T, K, N
Step = Callable[[], tuple[Tensor, ...]]  # (y, dx, dW, and db where there is a bias)
Row = dict[str, str]

SHAPES: tuple[Shape, ...] = ((15872, 4096, 4096), (15872, 4096, 12288), (15872, 4096, 16384), (15872, 16384, 4096))
TOY_SHAPES: tuple[Shape, ...] = ((64, 32, 48), (64, 48, 32))
AIMS = {"octavo delayed": 1.69, "octavo dynamic": 1.58}  # of bf16 eager, 4 layers
LEAST_SQNR = 15.0  # dB against bf16: E5M2's own rounding is at about 25
ALL = "4 layers"
COLUMNS = {"variant": 27, "shape": 17, "ms": 8, "by_eager": 8, "by_compiled": 11}
EAGER, COMPILED = "bf16", "bf16 compiled"

Make = Callable[["Data"], Step]


class Data:
    """One shape's input, weight, bias and gradient."""

    def __init__(self, shape: Shape) -> None:
        T, K, N = self.shape = shape
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(rows: int, cols: int, std: float) -> Tensor:
            return torch.randn(rows, cols, dtype=torch.bfloat16, device=DEVICE, generator=generator) * std

        self.x_TK = normal(T, K, 1.0).requires_grad_()
        self.weight_NK = normal(N, K, K**-0.5)
        self.bias_N = normal(1, N, 1.0)[0]
        self.grad_TN = normal(T, N, 1e-3)

    def linear(self, bias: bool) -> nn.Linear:
        """Return torch's layer with this weight."""
        _, K, N = self.shape
        layer = nn.Linear(K, N, bias=bias, device=DEVICE, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(self.weight_NK)
            if bias:
                layer.bias.copy_(self.bias_N)
        return layer

    def step(self, forward: Callable[[Tensor], Tensor], layer: nn.Module) -> Step:
        """Return forward and backward as a step; gradients are returned, not accumulated."""
        inputs = [self.x_TK, *layer.parameters()]

        def step() -> tuple[Tensor, ...]:
            y = forward(self.x_TK)
            return y.detach(), *torch.autograd.grad(y, inputs, self.grad_TN)

        return step


def _compiled(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return layer(x)

    return torch.compile(forward, fullgraph=True, dynamic=False, backend="inductor" if ON_GPU else "aot_eager")


def _make(convert: Callable[[nn.Linear], nn.Module], compiled: bool = False, **options: bool) -> Make:
    """Return the function that makes a variant's step from torch's layer; options are bias and kept."""

    def make(data: Data) -> Step:
        layer = convert(data.linear(options.get("bias", False)))
        if options.get("kept", False):
            octavo.nn.KeptWeights(layer).cast()
        return data.step(_compiled(layer) if compiled else layer, layer)

    return make


def _octavo(name: str) -> Callable[[nn.Linear], nn.Module]:
    return lambda layer: octavo.convert(nn.Sequential(layer), getattr(recipes, name)(), select=lambda *_: True)[0]


def _torchao(name: str) -> Callable[[nn.Linear], nn.Module]:
    return lambda layer: with_torchao(nn.Sequential(layer), name)[0]


def _products_only(x_tile: tuple[int, int], w_tile: tuple[int, int], grad_dtype: torch.dtype) -> Make:
    """Return the function that makes a step of the three products alone, on operands cast beforehand."""

    def pair(x: Tensor, tile: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Any, ...]:
        q, _, scale_inv, *_ = kernels.cast(x, None, 0, dtype, tile, tile[1] > 0, 0)
        return q, scale_inv, tile

    def make(data: Data) -> Step:
        x_TK, weight_NK = data.x_TK.detach(), data.weight_NK
        x, xt = pair(x_TK, x_tile), pair(x_TK.t(), x_tile)
        w, wt = pair(weight_NK, w_tile), pair(weight_NK.t(), w_tile)
        g, gt = pair(data.grad_TN, x_tile, grad_dtype), pair(data.grad_TN.t(), x_tile, grad_dtype)

        def step() -> tuple[Tensor, ...]:
            return (
                kernels.matmul(*x, *w, None, torch.bfloat16, True),
                kernels.matmul(*g, *wt, None, torch.bfloat16, False),
                kernels.matmul(*gt, *xt, None, torch.bfloat16, False),
            )

        return step

    return make


def _bf16_products(data: Data) -> Step:
    x, w, g = data.x_TK.detach(), data.weight_NK, data.grad_TN
    return lambda: (torch.mm(x, w.t()), torch.mm(g, w), torch.mm(g.t(), x))


VARIANTS: dict[str, Make] = {
    EAGER: _make(lambda layer: layer),
    "octavo delayed": _make(_octavo("delayed")),
    "octavo dynamic": _make(_octavo("dynamic")),
    COMPILED: _make(lambda layer: layer, compiled=True),
    "octavo delayed kept": _make(_octavo("delayed"), kept=True),
    "octavo dynamic kept": _make(_octavo("dynamic"), kept=True),
    "octavo rowwise": _make(_octavo("rowwise")),
    "octavo blockwise": _make(_octavo("blockwise")),
    "bf16 products only": _bf16_products,
    "tensor products only": _products_only((-1, -1), (-1, -1), torch.float8_e5m2),
    "rowwise products only": _products_only((1, -1), (1, -1), torch.float8_e4m3fn),
    "blockwise products only": _products_only((1, 128), (128, 128), torch.float8_e4m3fn),
    "octavo delayed compiled": _make(_octavo("delayed"), compiled=True),
    "octavo dynamic compiled": _make(_octavo("dynamic"), compiled=True),
    "torchao tensorwise compiled": _make(_torchao("tensorwise"), compiled=True),
    "torchao rowwise compiled": _make(_torchao("rowwise"), compiled=True),
    "torchao tensorwise": _make(_torchao("tensorwise")),
}
WITH_BIAS: dict[str, Make] = {  # at the first shape only
    "bf16 bias": _make(lambda layer: layer, bias=True),
    "octavo delayed bias": _make(_octavo("delayed"), bias=True),
    "octavo dynamic bias": _make(_octavo("dynamic"), bias=True),
}


def run_one(name: str, shape: Shape) -> None:
    """Run a few steps of one variant to fill the compilers' caches: a worker's task."""
    step = (VARIANTS | WITH_BIAS)[name](Data(shape))
    for _ in range(3):
        step()


def _base(name: str) -> tuple[str, str]:
    """Return the bf16 variants that a variant is compared with: (eager, compiled)."""
    if name.endswith("bias"):
        return "bf16 bias", COMPILED
    return ("bf16 products only",) * 2 if name.endswith("products only") else (EAGER, COMPILED)


def _wrong(results: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> str:
    """Return the first result that is far from bf16's, in words; "" if none is."""
    for what, result, true in zip(("y", "dx", "dW", "db"), results, truth, strict=False):
        if result.shape != true.shape or not (quality := sqnr(result.float(), true.float())) > LEAST_SQNR:
            return f"{what} {tuple(result.shape)} {quality if result.shape == true.shape else math.nan:.1f} dB"
    return ""


def measure_shape(
    shape: Shape, variants: dict[str, Make], toy: bool, deadline: Deadline
) -> tuple[Timings, dict[str, str]]:
    """Time the variants that are right at one shape; return times, and why others have none."""
    data = Data(shape)
    truth = VARIANTS[EAGER](data)()
    truth_with_bias = WITH_BIAS["bf16 bias"](data)()
    ready: dict[str, Step] = {}
    problems = {}
    for name, make in variants.items():
        if deadline.left() < 3:
            problems[name] = "left out: no time"
            continue
        try:
            step = make(data)
            problem = _wrong(step(), truth_with_bias if name.endswith("bias") else truth)
            for _ in range(2):  # delayed scales settle, and the host learns that they exist
                step()
        except Exception as error:
            problem = describe(error)
        if problem:
            problems[name] = f"FAILED: {problem}"
        else:
            ready[name] = step
    times = timings(ready, rounds=2 if toy else 8, seconds_a_variant=1.5, hide_host=False)
    return times, {**problems, **{name: f"FAILED: {error}" for name, error in times.errors.items()}}


def _rows(seconds: dict[str, float], problems: dict[str, str], shape: str) -> Iterator[Row]:
    """Yield a row for each variant, those without a time included."""
    for name in (name for name in VARIANTS | WITH_BIAS if name in seconds or name in problems):
        time = seconds.get(name, math.nan)
        eager, compiled = (seconds.get(base, math.nan) / time for base in _base(name))
        ms, by_eager, by_compiled = ("" if math.isnan(v) else f"{v:.3f}" for v in (time * 1e3, eager, compiled))
        note = problems.get(name, "")
        yield {
            "variant": name,
            "shape": shape,
            "ms": ms or ("FAILED" if note.startswith("FAILED") else ""),
            "by_eager": by_eager,
            "by_compiled": by_compiled,
            "note": note,
        }


def _verdicts(rows: list[Row]) -> int:
    """Print ok or MISSED for each aim; return 1 if one was missed."""
    speedups = {row["variant"]: row["by_eager"] for row in rows if row["shape"] == ALL}
    missed = False
    for name, aim in AIMS.items():
        value = float(speedups.get(name) or "nan")
        missed |= not value >= aim
        print(f"{'ok' if value >= aim else 'MISSED'}: {name}, {ALL}: {value:.3f} x bf16 eager, aim {aim}")
    return int(missed)


def layers_table() -> str:
    """Return the table of docs/kernels.md: the four layers of a block, and the first of them."""
    rows = {(row["variant"], row["shape"]): row for row in read("layer")}
    first = "x".join(map(str, SHAPES[0]))
    lines = []
    for name in VARIANTS:
        ms, by_eager = (rows[name, ALL][key] for key in ("ms", "by_eager"))
        lines.append([name, ms, by_eager, rows[name, first]["by_eager"]])
    return markdown(
        ("forward and backward", "ms, 4 layers", "times bf16's speed", "the 4096 x 4096 layer alone"), lines
    )


TABLES = {"layers": layers_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks layer", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny shapes, with or without a GPU; no aim counts")
    parser.add_argument("--minutes", type=float, default=3.0, help="what is not timed by then is left out")
    parser.add_argument("--output", type=Path, help="the CSV, instead of results/layer-<device>.csv")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if not ON_GPU and not options.toy:
        parser.error("times of layers need an NVIDIA GPU; --toy runs the code without one")
    deadline = Deadline(options.minutes)
    shapes = TOY_SHAPES if options.toy else SHAPES
    if ON_GPU and not options.toy:
        tasks = [(name, shape) for name in VARIANTS for shape in shapes] + [(name, shapes[0]) for name in WITH_BIAS]
        failures = precompile(run_one, tasks, options.minutes / 2)
        print(f"compiled ahead, {deadline.left():.0f} s left; failed: {failures[:3] or 'none'}", flush=True)
    rows: list[Row] = []
    live = LiveTable(COLUMNS)
    totals: dict[str, float] = dict.fromkeys(VARIANTS, 0.0)
    for shape in shapes:
        variants = VARIANTS | WITH_BIAS if shape == shapes[0] else VARIANTS
        try:
            times, problems = measure_shape(shape, variants, options.toy, deadline)
        except Exception as error:
            times, problems = Timings({}, {}), dict.fromkeys(variants, f"FAILED: {describe(error)}")
        seconds = {name: times.median(name) for name in times.seconds}
        totals = {name: total + seconds.get(name, math.nan) for name, total in totals.items()}
        _report(list(_rows(seconds, problems, "x".join(map(str, shape)))), rows, live, options)
        torch._dynamo.reset()
        if ON_GPU:
            torch.cuda.empty_cache()
    whole = {name: total for name, total in totals.items() if not math.isnan(total)}
    _report(list(_rows(whole, {}, ALL)), rows, live, options)
    return 0 if options.toy else _verdicts(rows)


def _report(new: list[Row], rows: list[Row], live: LiveTable, options: argparse.Namespace) -> None:
    """Print rows, and write all rows so far."""
    rows += new
    for row in new:
        live.add(row)
    if not options.no_write and rows:
        write_results("layer", rows, options.output)
