"""Host time of one eager cast, norm and Linear on a GPU's path, without a GPU.

Measured is all that Python runs when an op is replayed, Triton's launcher included, on 16 x 16 bf16 CPU tensors that
stand for a GPU's; kernels are compiled for Hopper and not launched. Left out is what happens in C beyond that: the
driver's launch, and the library's product, of which only the output is allocated. On a GPU the path also asks for the
current device and stream, some tenths of a us.

A weight that one cast serves is kept, as in a micro-batch that isn't the first. torchao's times are of its whole work
on the CPU, where arithmetic of this size costs next to nothing. Aims are held against the least of all readings, which
is what the code itself takes: whatever else runs on the machine only adds to it.
"no product" is the floor: a layer whose autograd function computes nothing. "compiled" is a layer of LAYERS that
Inductor compiled as one graph.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import octavo
import octavo.kernels.triton
from benchmarks.common.measure import interleaved, ratio, table, write_results
from benchmarks.common.models import OCTAVO, with_torchao
from benchmarks.common.pages import markdown, read
from benchmarks.machine_code.offline import Launch, offline
from octavo import kernels, recipes
from octavo.autograd import casts as operands
from octavo.kernels import capability, devices, layouts
from octavo.scaling.delayed import State, state_of

TAKES = "4 minutes"
MEASURES = ("octavo/kernels/triton", "octavo/autograd", "octavo/nn/recipe_module.py")

# by its path: the function of the same name hides the module
library_matmul = importlib.import_module("octavo.kernels.triton.library_matmul")
replay = importlib.import_module("octavo.kernels.triton.replay")

SIZE, LAYERS = 16, 8
CAST_AIM, FORWARD_AIM, BOTH_AIM = 25.0, 80.0, 200.0  # us
TORCHAO = "torchao tensorwise"
TENSOR, ROW = (-1, -1), (1, -1)
KEPT = ("dynamic", "delayed", "blockwise")  # recipes whose weight one cast serves
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def steps(layer: nn.Module) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return (forward, forward + backward) of a layer whose gradients accumulate."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    layer(x).backward(grad)

    return lambda: layer(x), lambda: layer(x).backward(grad)


def _scaled_mm(a: Tensor, b: Tensor, *args: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=args[7])


@contextmanager
def on_gpu_path(record: bool = False) -> Iterator[list[Launch]]:
    """Give CPU tensors a Hopper GPU's path through octavo, up to the launches, which are listed if ``record``."""
    transposed = functools.cache(lambda device: True)
    with ExitStack() as stack:
        launches = stack.enter_context(offline(90, record))
        stack.enter_context(
            mock.patch.object(devices, "kernels_of", functools.cache(lambda index: octavo.kernels.triton.KERNELS))
        )
        # as fast as what a replay calls on a GPU
        stack.enter_context(mock.patch.object(replay, "_empty_cpu", torch._C._dynamo.guards._empty_strided_cpu))
        stack.enter_context(mock.patch.object(library_matmul, "_known", {}))
        stack.enter_context(mock.patch.object(library_matmul, "_agrees", lambda *kind: True))
        triton_kernels = octavo.kernels.triton.KERNELS
        stack.enter_context(mock.patch.object(kernels, "KERNELS", triton_kernels))  # what entries give CPU tensors to
        for name in triton_kernels.keys() - {"multi_tensor_cast"}:  # which is called by its op
            stack.enter_context(mock.patch.object(kernels, name, kernels._entry(name)))
        for module in (layouts, operands):
            stack.enter_context(mock.patch.object(module, "needs_transposed_codes", transposed))
        stack.enter_context(mock.patch.object(capability, "runs_natively", lambda device: True))
        direct = SimpleNamespace(**{name: getattr(kernels, name) for name in triton_kernels})
        stack.enter_context(mock.patch.object(torch.ops.octavo, "direct", direct))  # what compiled graphs call
        stack.enter_context(mock.patch.object(torch, "_scaled_mm_v2", _scaled_mm))
        yield launches


def casts() -> dict[str, Callable[[], object]]:
    """Return a call for each kind of cast as a layer makes it on Hopper."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    gate_up = torch.randn(SIZE, 2 * SIZE, dtype=torch.bfloat16)
    *state, amax = _state()
    scale = state[0]
    update = recipes.delayed().delayed_update
    tensor = E4M3, TENSOR, False, 0
    both = True, 16, False
    vectors = None, 0, E4M3, (1, 128), True, 0, True, 16, True
    second = {"second_dtype": E4M3, "second_tile": (128, 1), "second_power_of_two": True}
    commit = *state, amax, amax, E5M2, False, 0, *update, True, 16, True
    return {
        "cast delayed": lambda: kernels.cast(x, scale, 0, *tensor, False, 16, False),
        "cast_transpose delayed": lambda: kernels.cast(x, scale, 0, *tensor, *both),
        "cast_transpose dynamic": lambda: kernels.cast(x, None, 0, *tensor, *both),
        "cast rows": lambda: kernels.cast(x, None, 0, E4M3, ROW, False, 0, False, 16, False),
        "cast_transpose 128x128": lambda: kernels.cast(x, None, 0, E4M3, (128, 128), True, 0, *both),
        "cast_two_scalings 1x128": lambda: kernels.cast(x, *vectors, **second),
        "cast_and_commit": lambda: kernels.cast_and_commit(x, *commit),
        "swiglu, cast_transpose delayed": lambda: kernels.cast(gate_up, scale, 0, *tensor, *both, "swiglu"),
        "swiglu gradient, cast_and_commit": lambda: kernels.cast_and_commit(x, *commit, "swiglu", gate_up),
    }


def norms() -> dict[str, Callable[[], object]]:
    """Return calls of RMSNorm with its delayed cast, and of its gradient."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    gamma, rows = torch.ones(SIZE, dtype=torch.bfloat16), torch.ones(SIZE)
    scale, *_ = _state()
    norm = {"gamma": gamma, "kind": "rms_norm", "eps": 1e-5}
    delayed = scale, 0, E4M3, TENSOR, False, 0, True, 16
    gradient = x, x, gamma, rows.new_empty(0), rows, "rms_norm", False, False, x
    return {
        "norm_cast delayed": lambda: kernels.cast(x, *delayed, **norm),
        "norm_backward": lambda: kernels.norm_backward(*gradient),
    }


def _state() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (a delayed state, whose scales are known to exist, an amax)."""
    state, amax = State.empty(16), torch.ones(1, 1)
    fill(state)
    kernels.delayed_update(*state, amax, amax, amax, *recipes.delayed().delayed_update)
    return *state, amax


def fill(state: State | None) -> None:
    """Set a state's scales to 1, those before the last commit too, as if kernels had run."""
    if state is not None:
        state.scale.fill_(1.0)
        state.before[1] = state.scale.view(torch.int32)


def linear(recipe: str) -> octavo.nn.Linear:
    """Return a layer whose weight is kept if it can be, and whose delayed scales exist from its first step on."""
    layer = octavo.nn.Linear(SIZE, SIZE, recipe=getattr(recipes, recipe)(), dtype=torch.bfloat16)
    if recipe in KEPT:
        octavo.nn.KeptWeights(layer).cast()
    fill(state_of(layer))
    return layer


class _Nothing(torch.autograd.Function):
    """A layer's autograd node, with its inputs and as many saved tensors, that computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *unused: None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, x, weight)
        return x.new_empty((x.shape[0], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *_ = ctx.saved_tensors
        return x, weight, bias, None, None, None


class Floor(nn.Linear):
    """A layer with an autograd function in Python that computes nothing: torch's own share of the time."""

    def forward(self, input: Tensor) -> Tensor:
        return _Nothing.apply(input, self.weight, self.bias, None, None, None)


class Subject(NamedTuple):
    """A call to time, the most us that it should take, and the number of layers in it."""

    call: Callable[[], object]
    aim: float | None
    layers: int = 1


def subjects() -> dict[str, Subject]:
    subjects_by_name = {name: Subject(call, CAST_AIM) for name, call in (casts() | norms()).items()}
    layers: dict[str, nn.Module] = {f"Linear {name}": linear(name) for name in OCTAVO}
    layers["no product"] = Floor(SIZE, SIZE, dtype=torch.bfloat16)
    layers["nn.Linear"] = nn.Linear(SIZE, SIZE, dtype=torch.bfloat16)
    layers[TORCHAO] = with_torchao(nn.Linear(SIZE, SIZE, dtype=torch.bfloat16), "tensorwise")
    for name, layer in layers.items():
        forward, both = steps(layer)
        aims = (FORWARD_AIM, BOTH_AIM) if isinstance(layer, octavo.nn.Linear) else (None, None)
        subjects_by_name[f"{name}, forward"] = Subject(forward, aims[0])
        subjects_by_name[f"{name}, forward + backward"] = Subject(both, aims[1])
    for name in OCTAVO:
        forward, both = steps(torch.compile(nn.Sequential(*(linear(name) for _ in range(LAYERS)))))
        subjects_by_name[f"compiled Linear {name}, forward"] = Subject(forward, None, LAYERS)
        subjects_by_name[f"compiled Linear {name}, forward + backward"] = Subject(both, None, LAYERS)
    return subjects_by_name


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with on_gpu_path(), torch.compiler.config.patch(force_disable_caches=True):
        subjects_by_name = subjects()
        for subject in subjects_by_name.values():
            for _ in range(3):  # compiles, and learns which scales exist
                subject.call()
        times = interleaved({name: s.call for name, s in subjects_by_name.items()}, options.rounds, options.calls)
    seconds = {name: [time / subjects_by_name[name].layers for time in of_one] for name, of_one in times.items()}
    rows, missed = [], []
    for name, (_, aim, _) in subjects_by_name.items():
        us, least = statistics.median(seconds[name]) * 1e6, min(seconds[name]) * 1e6
        torchao = name.replace(name.partition(",")[0], TORCHAO)
        rows.append(
            {
                "what": name,
                "us": f"{us:.1f}",
                "least_us": f"{least:.1f}",
                "aim_us": "" if aim is None else f"{aim:g}",
                "by_torchao_tensorwise": f"{ratio(seconds, name, torchao):.3f}" if torchao in seconds else "",
            }
        )
        if aim is not None and least > aim:
            missed.append(f"MISSED: {name} {least:.1f} us, aim {aim:g} us")
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('gpu_host', rows)}")
    print(*missed, f"{len(missed)} aims missed", sep="\n")
    return int(bool(missed))


def host_table() -> str:
    """Return the table of docs/kernels.md: microseconds of a layer, and by torchao's."""
    rows_by_pass = {tuple(row["what"].rsplit(", ", 1)): row for row in read("gpu_host") if "," in row["what"]}
    rows = []
    for name in (what for what, pass_ in rows_by_pass if pass_ == "forward"):
        rows_here = [rows_by_pass[name, pass_] for pass_ in ("forward", "forward + backward")]
        rows.append(
            [name, *(f"{float(row['us']):.0f} ({float(row['by_torchao_tensorwise']):.2f})" for row in rows_here)]
        )
    return markdown(("us (of torchao's)", "forward", "forward + backward"), rows)


TABLES = {"host": host_table}
