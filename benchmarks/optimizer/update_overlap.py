"""Updates during backward beside a step after it: the time of a training step, and the bytes of gradients it holds.

A stack of linear layers that compute in FP8 (dynamic), weights in bf16 behind split32 or in FP8 behind split16, moments
in FP8. On a GPU updates run on a stream of their own; the last variant is the whole step as a captured CUDA graph. On a
CPU there is nothing to overlap: only the bytes count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import octavo
from benchmarks.common.measure import table, write_results
from octavo.tune.timing import DEVICE, ON_GPU, describe, timings

TAKES = "1 minute"
MEASURES = ("octavo/optim",)

AFTER = -1  # a threshold that stands for a step after backward


class Case(NamedTuple):
    """``threshold``: bytes of gradients that wait for a launch, or AFTER; ``graph``: captured."""

    storage: str | None
    threshold: int
    graph: bool = False


class Size(NamedTuple):
    """``layers`` layers of ``width`` features, and tokens a step."""

    width: int
    layers: int
    tokens: int


FULL, ON_CPU, TOY = Size(4096, 48, 8192), Size(512, 8, 64), Size(128, 4, 16)


def cases(gradient: int) -> list[Case]:
    """Return the cases, with thresholds in units of one layer's gradient."""
    variants = [Case(storage, AFTER) for storage in (None, "fp8")]
    variants += [Case(storage, many * gradient) for storage in (None, "fp8") for many in (0, 1, 4)]
    return variants + [Case("fp8", 4 * gradient, graph=True)] * ON_GPU


def measure(case: Case, size: Size, seconds: float) -> dict[str, object]:
    """Return one variant's row."""
    torch.manual_seed(0)
    layers = [nn.Linear(size.width, size.width, bias=False) for _ in range(size.layers)]
    model = nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
    octavo.convert(model, octavo.recipes.dynamic(), lambda module, name: True, weight_storage=case.storage)  # type: ignore[arg-type]
    master = "split32" if case.storage is None else "split16"
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-4, moments="fp8", master=master)
    handle = None if case.threshold == AFTER else octavo.optim.update_in_backward(optimizer, case.threshold)
    x = torch.randn(size.tokens, size.width, dtype=torch.bfloat16, device=DEVICE)
    held: list[int] = []

    def step() -> None:
        model(x).float().square().mean().backward()
        held.append(sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()

    call: Callable[[], object] = step
    if case.graph:
        call = _captured(step)
    times = timings({"step": call}, rounds=10, seconds_a_variant=seconds)
    for error in times.errors.values():
        raise RuntimeError(error)
    return {
        "weights": "bf16" if case.storage is None else case.storage,
        "updates": "after backward" if handle is None else "in backward",
        "threshold": "" if handle is None else case.threshold,
        "graph": case.graph,
        "parameters": size.layers * size.width**2,
        "step_ms": f"{1e3 * times.median('step'):.4g}",
        "most_gradient_bytes": max(held) if handle is None else handle.most_bytes,
        "launches_a_step": 1 if handle is None else round(handle.launches / len(held), 2),
    }


def _captured(step: Callable[[], None]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks update_overlap", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a tiny model; written to --output alone")
    parser.add_argument("--seconds", type=float, default=4.0, help="of readings a variant, at most")
    parser.add_argument("--output", type=Path, help="another file to write")
    options = parser.parse_args(arguments)
    size = TOY if options.toy else FULL if ON_GPU else ON_CPU
    gradient, rows, missed = 2 * size.width**2, [], []
    for case in cases(gradient):
        try:
            rows.append(measure(case, size, 0.1 if options.toy else options.seconds))
        except Exception as error:
            missed.append(f"{case}: {describe(error)}")
            continue
        most = int(str(rows[-1]["most_gradient_bytes"]))
        if case.threshold != AFTER and most > case.threshold + gradient:
            missed.append(f"{case}: {most} bytes of gradients, more than the threshold and one tensor's")
    print(table(rows))
    if not options.toy or options.output:
        print(f"written to {write_results('update_overlap', rows, options.output)}")
    print(*(f"MISSED: {line}" for line in missed), sep="\n")
    return int(bool(missed))
