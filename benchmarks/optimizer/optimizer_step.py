"""How long an optimizer's step takes, and the bytes that it keeps and needs: octavo's beside others'.

On a GPU: 10^9 parameters in 300 uneven tensors, float32 or bf16, against the copy bandwidth of the same run; octavo's
step also as a captured CUDA graph. On a CPU: 2^23 parameters in 24 of them, one thread by default, beside torchao's
compiled steps. torch's and torchao's are as their users call them; flashoptim's and torchao's where they are installed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import markdown, read
from octavo import PerTensor
from octavo.tune.timing import DEVICE, ON_GPU, describe, synchronize, timings
from octavo.weights.stored import StoredWeight

TAKES = "2 minutes"
MEASURES = ("octavo/optim", "octavo/kernels/reference", "octavo/kernels/triton", ":!octavo/kernels/triton/replay.py")

SPEED_AIM, BANDWIDTH_AIM, BYTES_AIM = (
    2.0,
    0.85,
    2.1,
)  # times torchao's AdamWFp8 (CPU); of the roofline; of a moment pair
RIVAL = "torchao AdamWFp8"
ROUNDS = {True: 20, False: 15}  # by whether on a GPU


class Variant(NamedTuple):
    """An optimizer of bf16 or float32 weights; ``stored``: matrices live in FP8, with gradients of the dtype."""

    dtype: torch.dtype
    make: Callable[[Sequence[nn.Parameter]], Any]
    stored: bool = False


def _octavo(master: str | None, moments: str = "fp8") -> Callable[[Sequence[nn.Parameter]], Any]:
    return lambda params: octavo.optim.AdamW(params, lr=1e-4, moments=moments, master=master)


def _other(module: str, name: str, **options: Any) -> Callable[[Sequence[nn.Parameter]], Any]:
    return lambda params: getattr(importlib.import_module(module), name)(params, lr=1e-4, **options)


VARIANTS: dict[str, Variant] = {
    "octavo fp8, float32": Variant(torch.float32, _octavo("fp32")),
    "octavo fp8, split32": Variant(torch.bfloat16, _octavo("split32")),
    "octavo fp8, split24": Variant(torch.bfloat16, _octavo("split24")),
    "octavo fp8, no master": Variant(torch.bfloat16, _octavo(None)),
    "octavo fp8, FP8 weights": Variant(torch.bfloat16, _octavo("split16"), stored=True),
    "octavo fp32, float32": Variant(torch.float32, _octavo("fp32", "fp32")),
    "torch fused, float32": Variant(torch.float32, _other("torch.optim", "AdamW", fused=True)),
    "torch foreach, float32": Variant(torch.float32, _other("torch.optim", "AdamW", foreach=True)),
    RIVAL: Variant(torch.float32, _other("torchao.optim", "AdamWFp8")),
    "torchao AdamW8bit": Variant(torch.float32, _other("torchao.optim", "AdamW8bit")),
    "flashoptim": Variant(torch.bfloat16, _other("flashoptim", "FlashAdamW")),
}


def shapes(elements: int, tensors: int) -> list[tuple[int, ...]]:
    """Return uneven shapes: an embedding of a quarter, as many matrices as vectors, some sides odd; a fixed draw."""
    draw = random.Random(0)
    matrices = tensors // 2
    sizes = [math.exp(draw.uniform(0.0, 4.0)) for _ in range(matrices)]
    unit = 0.75 * elements / sum(sizes)
    drawn: list[tuple[int, ...]] = []
    for number, part in enumerate(sizes):
        side = max(int(math.sqrt(part * unit)), 16)
        step = 1 if number % 20 == 0 else 128 if side >= 512 else 16
        cols = max(side * 2 // 3 // step * step, step)
        drawn.append((max(int(part * unit / cols), 1), cols))
    drawn += [(draw.choice((768, 1000, 1024, 4096)),) for _ in range(tensors - matrices - 1)]
    width = 1024 if elements > 1 << 24 else 256
    return [(max((elements - sum(math.prod(shape) for shape in drawn)) // width, 1), width), *drawn]


def parameters(sizes: Sequence[tuple[int, ...]], kind: Variant) -> list[nn.Parameter]:
    """Return weights with gradients of their dtype."""
    params = []
    for size in sizes:
        values = torch.empty(size, dtype=kind.dtype, device=DEVICE).normal_()
        param = nn.Parameter(StoredWeight.cast(values, PerTensor()) if kind.stored and len(size) > 1 else values)
        param.grad = torch.empty_like(values).normal_()
        params.append(param)
    return params


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of a state, inside of tensor subclasses too."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            for name in flatten()[0]:
                yield from tensors_in(getattr(value, name))


def state_bytes(optimizer: Any) -> int:
    """Return the bytes that the optimizer keeps."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(dict(optimizer.state)))


def weight_bytes(weight: Tensor) -> int:
    """Return the bytes an element that a step reads and writes of a weight itself."""
    return 1 if isinstance(weight, StoredWeight) else weight.element_size()


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the most bytes that a step allocates beyond those allocated before it."""
    if ON_GPU:
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def graph_of(optimizer: Any) -> Callable[[], object]:
    """Return a captured step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def measure(name: str, sizes: Sequence[tuple[int, ...]], seconds: float) -> dict[str, object]:
    """Return one optimizer's row."""
    kind = VARIANTS[name]
    elements = sum(math.prod(size) for size in sizes)
    params = parameters(sizes, kind)
    optimizer = kind.make(params)
    optimizer.step()
    state_size = state_bytes(optimizer)
    moved = (
        2 * (state_size + sum(param.numel() * weight_bytes(param) for param in params)) + elements * kind.dtype.itemsize
    )
    calls: dict[str, Callable[[], object]] = {name: optimizer.step}
    if ON_GPU and name.startswith("octavo"):
        calls["graph"] = graph_of(optimizer)
    times = timings(calls, rounds=ROUNDS[ON_GPU], seconds_a_variant=seconds)
    for error in times.errors.values():
        raise RuntimeError(error)
    return {
        "optimizer": name,
        "dtype": str(kind.dtype).removeprefix("torch."),
        "parameters": elements,
        "tensors": len(sizes),
        "threads": "" if ON_GPU else torch.get_num_threads(),
        "step_ms": f"{1e3 * times.median(name):.4g}",
        "graph_ms": f"{1e3 * times.median('graph'):.4g}" if "graph" in calls else "",
        "ns_an_element": f"{1e9 * times.median(name) / elements:.4g}",
        "state_bytes_an_element": f"{state_size / elements:.4f}",
        "peak_bytes_an_element": f"{peak_bytes(optimizer.step) / elements:.4f}",
        "moved_bytes_an_element": f"{moved / elements:.3f}",
    }


def bandwidth() -> float:
    """Return bytes a second of a copy of 1 GiB, read and written."""
    source, target = (torch.zeros(1 << (30 if ON_GPU else 24), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    times = timings({"copy": lambda: target.copy_(source)}, rounds=20)
    return 2 * source.numel() / times.median("copy")


def judge(rows: list[dict[str, object]]) -> list[str]:
    """Return a line for each aim that is missed."""
    by_name = {str(row["optimizer"]): row for row in rows}
    missed = []
    for name, row in by_name.items():
        if not name.startswith("octavo fp8"):
            continue
        master = {"octavo fp8, split32": 2.0, "octavo fp8, split24": 1.0, "octavo fp8, FP8 weights": 1.0}.get(name, 0.0)
        moments = float(str(row["state_bytes_an_element"])) - master
        if moments > BYTES_AIM:
            missed.append(f"{name}: moments take {moments:.3f} bytes an element, more than {BYTES_AIM}")
        if ON_GPU and float(str(row["of_roofline"])) < BANDWIDTH_AIM:
            missed.append(f"{name}: {row['of_roofline']} of the roofline, less than {BANDWIDTH_AIM}")
    ours, theirs = by_name.get("octavo fp8, float32"), by_name.get(RIVAL)
    if not ON_GPU and ours and theirs:
        times = float(str(ours["step_ms"])) / float(str(theirs["step_ms"]))
        print(f"octavo fp8, float32: {times:.2f} of {RIVAL}'s time")
        if times > SPEED_AIM:
            missed.append(f"octavo fp8, float32: {times:.2f} times {RIVAL}'s, more than {SPEED_AIM}")
    return missed


def measured(
    variants: Iterable[str], sizes: Sequence[tuple[int, ...]], seconds: float, toy: bool
) -> list[dict[str, object]]:
    """Return a row for each optimizer that runs here."""
    rows: list[dict[str, object]] = []
    peak = bandwidth()
    for name in variants:
        if toy and name.startswith(("torchao", "flash")):
            continue
        try:
            row = measure(name, sizes, seconds)
        except Exception as error:
            print(f"{name}: {describe(error)}")
            continue
        fastest = float(str(row["moved_bytes_an_element"])) * float(str(row["parameters"])) / peak
        rows.append({**row, "of_roofline": f"{1e3 * fastest / float(str(row['step_ms'])):.3f}"})
        if ON_GPU:
            torch.cuda.empty_cache()
    return rows


def step_table() -> str:
    """Return the table of docs/optimizer.md: ns an element by threads."""
    runs_by_name: dict[str, list[dict[str, str]]] = {}
    for row in read("optimizer_step"):
        runs_by_name.setdefault(row["optimizer"], []).append(row)
    rows = [
        [
            name,
            f"{float(runs[0]['state_bytes_an_element']):.2f}",
            *(f"{float(row['ns_an_element']):.1f}" for row in runs),
        ]
        for name, runs in runs_by_name.items()
    ]
    threads = (row["threads"] for row in next(iter(runs_by_name.values())))
    return markdown(("", "state, bytes an element", *(f"threads: {count}" for count in threads)), rows)


TABLES = {"steps": step_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimizer_step", description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"of {', '.join(VARIANTS)}; all")
    parser.add_argument("--toy", action="store_true", help="small tensors, octavo's and torch's only; writes nothing")
    parser.add_argument("--threads", type=int, nargs="+", default=[1] if ON_GPU else [1, 2], help="of a CPU")
    parser.add_argument("--seconds", type=float, default=8.0, help="of readings a variant, at most")
    parser.add_argument("--output", type=Path, help="another file to write")
    options = parser.parse_args(arguments)
    sizes = shapes(1 << 16, 12) if options.toy else shapes(10**9, 300) if ON_GPU else shapes(1 << 23, 24)
    rows: list[dict[str, object]] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        rows += measured(options.variants or VARIANTS, sizes, 0.1 if options.toy else options.seconds, options.toy)
    print(table(rows))
    if not options.toy or options.output:
        print(f"written to {write_results('optimizer_step', rows, path=options.output)}")
    missed = judge(rows[: len(rows) // len(options.threads)])
    print(*(f"MISSED: {line}" for line in missed), sep="\n")
    return int(bool(missed) and not options.toy)
