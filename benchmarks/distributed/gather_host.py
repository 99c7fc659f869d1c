"""Host time of the hooks by which FSDP2 gathers weights, octavo's beside torchao's, sharded over two processes.

A step is what FSDP2 calls of them: for the gathers of forward and again of backward each weight's first hook (with the
inspect.signature that FSDP2 takes of it) and its second; and once a step, as the optimizer has moved the weights,
octavo's new scales, casts and collective, or torchao's precompute_float8_dynamic_scale_for_fsdp where that is called.
The gathers themselves are left out: both libraries send the same bytes.

Microseconds a weight and step, medians. On "gloo" two processes wait for each other in collectives; with "none" these
return at once, as on a GPU's own queue: what is left is the host's work. "attributes" is what FSDP2 takes to put
parameters on their modules, four times a step; it is no part of the hooks nor of the total.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import octavo
from benchmarks.common.measure import ratio, table, write_results
from benchmarks.common.pages import Row, listed
from benchmarks.distributed.communication_ranks import on_ranks
from octavo import recipes

TAKES = "1 minute"
MEASURES = (
    "octavo/weights/gathered.py",
    "octavo/weights/ways.py",
    "octavo/weights/shard_cast.py",
    "octavo/weights/fsdp2.py",
)

OCTAVO = ("dynamic", "delayed", "blockwise")
TORCHAO, PRECOMPUTED = "torchao", "torchao, precomputed"
RANKS = 2
PARTS = ("once", "forward_pre", "forward_post", "backward_pre", "backward_post", "attributes")

Times = dict[str, list[dict[str, float]]]  # by variant, of each round


def converted(model: nn.Module, name: str) -> nn.Module:
    """Return the model converted by octavo's recipe of this name, or by torchao to be gathered in FP8."""
    if name in OCTAVO:
        return octavo.convert(model, getattr(recipes, name)(), select=lambda module, name: True)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))


def weights_of(layer: Any) -> list[Any]:
    """Return FSDP2's objects for the layer's weights; biases are left out, they are gathered as they are."""
    state = layer._get_fsdp_state()
    return [
        parameter
        for group in state._fsdp_param_groups
        for parameter in group.fsdp_params
        if parameter._module_info.param_name == "weight"
    ]


class Variant:
    """A sharded stack of layers and the calls that FSDP2 makes for it.

    Args:
        mesh: of the processes.
        name: of octavo's recipe, or torchao's way.
        size: features of each layer.
        layers: how many.
    """

    def __init__(self, mesh: Any, name: str, size: int, layers: int) -> None:
        from torch.distributed.fsdp import fully_shard

        # with biases: gloo refuses to gather nothing but torchao's float8
        stack = [nn.Linear(size, size, dtype=torch.bfloat16) for _ in range(layers)]
        self.model: Any = converted(nn.Sequential(*stack), name)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.octavo, self.precompute = name in OCTAVO, None
        if name == PRECOMPUTED:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            self.precompute = lambda: precompute_float8_dynamic_scale_for_fsdp(self.model)
        # a real step, after which FSDP2 has what the second hook fills again
        self.model(torch.randn(32, size, dtype=torch.bfloat16)).sum().backward()
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.parameters = [weight for layer in self.model for weight in weights_of(layer)]
        assert len(self.parameters) == layers

    def times(self) -> dict[str, float]:
        """Return seconds in one step, by part."""
        self.optimizer.step()  # weights may have changed
        dist.barrier()
        seconds = dict.fromkeys(PARTS, 0.0)
        if self.precompute is not None:
            seconds["once"] = timed(self.precompute)
        self.gather("forward", seconds)
        in_backward(lambda: self.gather("backward", seconds))  # where octavo sends what forward cast
        seconds["attributes"] = timed(self.set_attributes)
        return seconds

    def gather(self, phase: str, seconds: dict[str, float]) -> None:
        """Call both hooks of every weight, and add their seconds."""
        for index, parameter in enumerate(self.parameters):
            taken = timed(lambda parameter=parameter: parameter.all_gather_inputs)
            refreshes = self.octavo and phase == "forward" and index == 0
            seconds["once" if refreshes else f"{phase}_pre"] += taken
            parameter.alloc_all_gather_outputs()
            seconds[f"{phase}_post"] += timed(parameter.init_unsharded_param)
            parameter.free_unsharded_param()

    def set_attributes(self) -> None:
        """Put all weights on their modules and back, twice."""
        for parameter in self.parameters * 2:
            parameter._setattr_on_modules(parameter._unsharded_param)
            parameter._setattr_on_modules(parameter.sharded_param)


def in_backward(call: Callable[[], None]) -> None:
    """Call something from within a backward pass, as FSDP2 does."""
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda gradient: call())
    x.sum().backward()


def timed(call: Callable[[], object]) -> float:
    """Return seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(mesh: Any, names: tuple[str, ...], size: int, layers: int, rounds: int) -> Times:
    """Return every variant's times, in turn."""
    variants = {name: Variant(mesh, name, size, layers) for name in names}
    times: Times = {name: [] for name in names}
    for turn in range(rounds + 5):
        for name, variant in variants.items():
            seconds = variant.times()
            if turn >= 5:
                times[name].append({part: value / layers for part, value in seconds.items()})
    return times


def rows_of(size: int, layers: int, collectives: str, times: Times) -> list[dict[str, object]]:
    """Return a row a variant: medians over rounds in microseconds; ratio to torchao's faster way in the same round."""
    totals = {
        name: [sum(value for part, value in seconds.items() if part != "attributes") for seconds in rounds]
        for name, rounds in times.items()
    }
    base = min((TORCHAO, PRECOMPUTED), key=lambda name: statistics.median(totals[name]))
    rows = []
    for name, rounds in times.items():
        parts = {f"{part}_us": statistics.median(seconds[part] for seconds in rounds) * 1e6 for part in PARTS}
        rows.append(
            {"size": size, "weights": layers, "collectives": collectives}
            | {"variant": f"octavo {name}" if name in OCTAVO else name}
            | {part: f"{value:.1f}" for part, value in parts.items()}
            | {"total_us": f"{statistics.median(totals[name]) * 1e6:.1f}"}
            | {"by_torchaos_faster": f"{ratio(totals, name, base):.3f}"}
        )
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gather_host", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024], help="features; multiples of 256")
    parser.add_argument("--weights", type=int, default=16, help="how many")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--toy", action="store_true", help="that all of it runs: few weights and rounds, no verdict")
    options = parser.parse_args(arguments)
    if options.toy:
        options.sizes, options.weights, options.rounds, options.no_write = [256], 2, 3, True

    torch.set_num_threads(1)  # as each process does
    names = (*OCTAVO, TORCHAO, PRECOMPUTED)
    rows: list[dict[str, object]] = []
    for size in options.sizes:
        for collectives in ("gloo", "none"):
            sizes = (names, size, options.weights, options.rounds)
            times = on_ranks(measure, RANKS, *sizes, waits=collectives == "gloo")[0]
            rows += rows_of(size, options.weights, collectives, times)
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('gather_host', rows)}")
    if options.toy:
        return 0
    missed = [
        row for row in rows if str(row["variant"]).startswith("octavo") and float(str(row["by_torchaos_faster"])) > 1
    ]
    for row in missed:
        where = f"{row['size']} features, collectives {row['collectives']}"
        print(f"MISSED: {row['variant']}, {where}: {row['by_torchaos_faster']} of torchao's faster way")
    if not missed:
        print("ok: octavo takes no longer than torchao's faster way")
    return int(bool(missed))


def host_table() -> str:
    """Return the table of docs/communication.md: octavo's microseconds a weight, and by torchao's faster way."""
    cells: dict[str, Callable[[Row], str]] = {
        "weight": lambda row: f"{row['size']} × {row['size']}",
        "collectives": lambda row: {"none": "return at once"}.get(row["collectives"], row["collectives"]),
        "recipe": lambda row: f"`{row['variant'].removeprefix('octavo ')}`",
        "us": lambda row: f"{float(row['total_us']):.0f}",
        "of torchao's": lambda row: f"{float(row['by_torchaos_faster']):.2f}",
    }
    return listed("gather_host", cells, lambda row: row["variant"].startswith("octavo"))


TABLES = {"host": host_table}
