"""Casts drawn at random, each called plainly and as its replay: on two streams and in a CUDA graph, with the same bits.

A replay is what octavo/kernels/triton/replay.py recorded at a call's second time. Tensors of each call are new, and lie
at addresses that are multiples of 16, or not. Without a GPU (--toy) kernels run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octavo.tune.timing import DEVICE, ON_GPU, Deadline
from tests.support import triton_kernels
from tests.support.casts import drawn

TAKES = "a GPU; half a minute"
MEASURES = ("octavo/kernels/triton/replay.py",)

CALLS, CAPTURED = 6, 4  # of a cast; the number of the one that is captured in a graph too
ENOUGH = 5  # faults, after which no more are looked for


class _Forgetful(dict[Any, Any]):
    """Keeps nothing: no call is replayed."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def moved(value: Any, offsets: random.Random) -> Any:
    """Return a copy of a tensor with its strides, in memory of its own that begins anywhere."""
    if not isinstance(value, Tensor):
        return value
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) if value.numel() else -1
    memory = torch.zeros((last + 25) * value.element_size(), dtype=torch.uint8, device=value.device)
    copy = memory.view(value.dtype).as_strided(value.shape, value.stride(), offsets.choice([0, 0, 16, 1]))
    return copy.copy_(value) if value.numel() else copy


def bits(results: Sequence[Tensor]) -> list[Tensor | torch.Size]:
    """Return each result's bytes on the host, or an empty one's shape."""
    return [x.reshape(-1).view(torch.uint8).cpu() if x.numel() else x.shape for x in results]


def same(one: Sequence[Tensor | torch.Size], other: Sequence[Tensor | torch.Size]) -> bool:
    """Whether two results have the same bits."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)


def captured(call: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return what a CUDA graph of the call writes, into memory that was overwritten after the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for result in results:
        if result.numel() and result.is_contiguous():
            result.reshape(-1).view(torch.uint8).fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    return results


def on_stream(number: int, call: Callable[[], Sequence[Tensor]]) -> list[Tensor | torch.Size]:
    """Return a call's bits, by one of two streams where there is a GPU."""
    if not ON_GPU:
        return bits(call())
    stream = STREAMS[number % 2]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = call()
    torch.cuda.synchronize()
    return bits(results)


STREAMS = [torch.cuda.Stream() for _ in range(2)] if ON_GPU else []


def faults(op: Callable[..., Sequence[Tensor]], replay: Any, deadline: Deadline, seed: int) -> tuple[list[str], int]:
    """Return a line for each call whose bits are not those of the plain call, and how many calls were compared."""
    offsets, wrong, calls = random.Random(seed), [], 0
    while deadline.left() > 0 and len(wrong) < ENOUGH:
        _, case = next(iter(drawn(1, offsets.randrange(1 << 30), DEVICE)))
        if case.op != "cast":  # the others change what they are given
            continue
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in case.args]
        for number in range(CALLS):
            args = [moved(x, offsets) for x in case.args]
            named = {name: moved(x, offsets) for name, x in case.named.items()}
            with mock.patch.object(replay, "REPLAYS", _Forgetful()):
                due = bits(op(*args, **named))
            calls += 1
            if not same(on_stream(number, lambda args=args, named=named: op(*args, **named)), due):
                wrong.append(f"call {number} of {shapes}, {[*case.named]}")
            if ON_GPU and number == CAPTURED:
                results = captured(lambda args=args, named=named: op(*args, **named))
                wrong += [f"in a graph, {shapes}, {[*case.named]}"] * (not same(bits(results), due))
    return wrong, calls


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks replays", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="Triton's interpreter takes the GPU's place")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    options = parser.parse_args(arguments)
    if not ON_GPU and not options.toy:
        parser.error("replays on streams and in graphs need an NVIDIA GPU; --toy runs the code without one")
    if ON_GPU:
        from octavo.kernels.triton import KERNELS, replay

        running: Any = nullcontext((KERNELS["cast"], replay))
    else:
        running = triton_kernels.running()
    with running as kernels:
        op, module = kernels if ON_GPU else (kernels.cast, kernels.module("replay"))
        wrong, calls = faults(op, module, Deadline(options.seconds / 60), options.seed)
        replays = sum(callable(entry) for entry in module.REPLAYS.values())
    for line in wrong:
        print(f"FAILED: {line}")
    print(f"{calls} casts and {replays} replays, {len(wrong)} with other bits than the plain call", flush=True)
    return int(bool(wrong) or not replays)
