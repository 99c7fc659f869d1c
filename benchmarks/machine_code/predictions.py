"""The share of a GPU's memory bandwidth that each kernel should reach, by machine code and grid, without a GPU.

The cases are those of ``kernels``. Each launch of one is compiled as at that shape. Of its code count the loops that
read tiles (all of it where none does): instructions for each byte read. Four bounds of its time are: its bytes by copy
bandwidth, its instructions by what the schedulers issue, its bytes by what resident programs keep in flight (Little:
bandwidth = bytes in flight / latency), its accesses by the first cache; the last three by the share of multiprocessors
that its grid keeps busy. A program waits for what it reads, then computes, then writes, and only other programs fill
that time: so a time is the largest bound, and the others divided by how many programs are resident. That law was found
on an H100, whose rows, the last ones, have its measured times, of kernels as they were. It takes a norm's gradient,
which loads ahead, for a third slower than it is. What a second loop reads again comes from memory as far as all that is
resident exceeds the second cache. Accesses are those that the emulator counted (``emulated``): a store moves its whole
sectors, for it goes through the first cache; of loads each byte is moved once, for what a warp reads of a sector in two
requests the first cache has; and that takes four sectors of requests a clock, or one wavefront of shared memory. What
reads less than a byte an element, the parts of a norm's sums, has its code alone. The share is that of a copy of the
case's least bytes. An aim that is missed is named with its limiter. A measurement that contradicts a prediction is a
fault of this model: mend it here.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.pages import Row, read
from benchmarks.machine_code.machine_code import instructions, loops, resources, tile_bytes
from benchmarks.machine_code.offline import MULTIPROCESSORS, SHARED_MEMORY, Launch, offline
from emulator.memory import SECTOR
from octavo.kernels.reference.optimizer_step import WeightUpdate
from octavo.kernels.triton import KERNELS as OPS
from octavo.kernels.triton import cases, optimizer_step

TAKES = "5 minutes"
MEASURES = ("octavo/kernels/triton", ":!octavo/kernels/triton/replay.py")  # a first call's

AIMS = {(1024, 1024): 0.0, (2048, 2048): 0.7, (4096, 4096): 0.8, (8192, 8192): 0.9, (16384, 8192): 0.9}
LARGE = (16384, 8192)  # of the shapes that were measured, the one whose times are the GPU's alone
STEP_AIMS = {(1024, 1024): 0.0, (4096, 4096): 0.0, (16384, 8192): 0.85, (32768, 32768): 0.85}  # of optimizers' steps


def _step(one: WeightUpdate, plans: dict[Any, Any]) -> tuple[Tensor, ...]:
    optimizer_step([one], [cases.ADAM], plans=plans)
    return cases.stored(one)


KERNELS = {**OPS, "step": _step}
_ALL = cases.CASES | cases.STEPS
CASES = {name: case for name, case in _ALL.items() if case.op in KERNELS}


class Device(NamedTuple):
    """A GPU's data in the model: copy bandwidth in bytes/s, and rates and caches of its multiprocessors."""

    name: str
    multiprocessors: int
    bandwidth: float
    clock: float
    second_cache: float = 50e6  # bytes
    latency: float = 0.7e-6  # seconds from a load to its use, memory busy
    launch: float = 1.0e-6  # seconds between the end of one launch's work and the first of the next

    @property
    def issued(self) -> float:
        """Instructions of threads a second: four schedulers a multiprocessor, each a warp a clock."""
        return self.multiprocessors * 4 * 32 * self.clock


DEVICES = {
    90: Device("H200", MULTIPROCESSORS[90], 4.3e12, 1.98e9),
    100: Device("B200", MULTIPROCESSORS[100], 6.9e12, 1.85e9, 126e6),
}
MEASURED = Device("H100", MULTIPROCESSORS[90], 3.0e12, 1.755e9)  # the copy of results/kernels-nvidia-h100-...


class Prediction(NamedTuple):
    """The prediction of a launch: its seconds, the bound that limits it, and the properties of its code."""

    seconds: float
    limiter: str
    instructions: float  # for each byte read
    registers: int
    programs: int  # that a multiprocessor holds
    waves: float  # of programs


@functools.cache
def counted() -> Mapping[tuple[str, str, str], Row]:
    """Return the emulator's counts, by architecture, case and kernel."""
    return {(row["architecture"], row["case"], row["kernel"]): row for row in read("emulated")}


@functools.cache
def measured() -> Mapping[tuple[str, tuple[int, int]], str]:
    """Return microseconds on an H100, by case and shape."""
    return {(row["op"], tuple(map(int, row["shape"].split("x")[:2]))): row["us"] for row in read("kernels")}  # type: ignore[misc]


@functools.lru_cache(maxsize=64)  # the shapes of a case share kernels
def _code_of(kernel: CompiledKernel) -> tuple[dict[str, int], list[tuple[int, float, float]]]:
    """Return a kernel's resources; of each loop that reads tiles, or of all: instructions, bytes read and written."""
    hot = [(len(loop), *tile_bytes(kernel.name, loop)) for loop in loops(kernel)]
    hot = [entry for entry in hot if entry[1]]
    code = instructions(kernel)
    return resources(kernel), hot or [(len(code), *tile_bytes(kernel.name, code))]


COUNTS = "instructions_an_element", "load_sectors_by_least", "store_sectors_by_least", "wavefronts_by_least"


def predict(launch: Launch, counts: Mapping[str, str], written: int, device: Device, elements: int) -> Prediction:
    """Return a launch's prediction; it writes ``written`` bytes if its code stores and nothing was counted."""
    kernel, read = launch.kernel, launch.read
    threads, (used, hot) = 32 * kernel.metadata.num_warps, _code_of(kernel)
    registers = -(-used["REG"] // 8) * 8
    shared = SHARED_MEMORY[kernel.metadata.target.arch] // (kernel.metadata.shared + 1024)
    programs = max(1, min(65536 // (registers * threads), 2048 // threads, shared, 32))
    grid = math.prod(launch.grid)
    waves = grid / (programs * device.multiprocessors)
    if not any(loaded for _, loaded, _ in hot):
        return Prediction(device.launch, "launch", 0.0, used["REG"], programs, waves)
    busy = waves / math.ceil(waves) if waves > 1 else min(1.0, grid / device.multiprocessors)
    resident = min(programs, grid / device.multiprocessors)
    per_byte = sum(count / loaded for count, loaded, _ in hot)
    again = sum(loaded for _, loaded, _ in hot) / max(loaded for _, loaded, _ in hot) - 1
    held = resident * device.multiprocessors * read / grid  # bytes, until a program has read them again
    again *= max(0.0, 1 - device.second_cache / held)
    stored = written if any(written_bytes for *_, written_bytes in hot) else 0.0
    if counts:
        stored = float(counts["stored_bytes_an_element"]) * elements
    clocks = elements * _first_cache_clocks(counts) / device.multiprocessors
    in_flight = resident * threads * max(loaded for _, loaded, _ in hot) * device.multiprocessors
    bounds = {
        "bandwidth": (read * (1 + again) + stored) / device.bandwidth,
        "instructions": read * per_byte / device.issued / busy,
        "bytes in flight": read * device.latency / in_flight,
        "first cache": clocks / device.clock / busy,
    }
    limiter = max(bounds, key=lambda name: bounds[name])
    others = [seconds for name, seconds in bounds.items() if name not in (limiter, "first cache")]
    seconds = bounds[limiter] + sum(others) / max(1.0, resident)
    return Prediction(seconds + device.launch, limiter, per_byte, used["REG"], programs, waves)


def _first_cache_clocks(counts: Mapping[str, str]) -> float:
    """Return clocks an element: four sectors of requests, or a wavefront of shared memory, take one each."""
    if not counts:
        return 0.0
    moved = float(counts["loaded_bytes_an_element"]) + float(counts["stored_bytes_an_element"])
    return moved / SECTOR / 4 + float(counts["wavefronts_an_element"])


def _empty(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return a tensor in place of numbers that nothing reads."""
    return torch.empty(shape, dtype=torch.bfloat16)


def row_of(name: str, shape: tuple[int, int], capability: int, device: Device) -> dict[str, object]:
    """Return the row of a case at a shape: its launches together."""
    case = CASES[name]
    unfilled = mock.patch.object(cases, "filled", lambda tensor, x=None: tensor)
    with offline(capability) as launches, mock.patch.object(cases, "normal", _empty), unfilled:
        inputs = case.inputs(shape)
        arguments = case.arguments(*inputs)
        launches.clear()  # making a state launches too
        result = cases.call(KERNELS[case.op], arguments)
        outputs = (result,) if isinstance(result, Tensor) else result
        read, written = sum(x.nbytes for x in inputs if isinstance(x, Tensor)), sum(x.nbytes for x in outputs)
        elements = math.prod(shape)
        is_step = case.op == "step"  # whose kernel finds what it reads by a table
        read_launches = [launch._replace(read=read) if is_step else launch for launch in launches]
        counts = [
            counted().get((f"sm_{capability}", name, launch.kernel.name), {}) if launch.read >= elements else {}
            for launch in read_launches
        ]
        predictions = [predict(*pair, written, device, elements) for pair in zip(read_launches, counts, strict=True)]
    seconds = sum(prediction.seconds for prediction in predictions)
    slowest, costs = max(zip(predictions, counts, strict=True), key=lambda pair: pair[0].seconds)
    return {
        "op": name,
        "shape": "x".join(map(str, shape)),
        "device": device.name,
        "us": f"{seconds * 1e6:.1f}",
        "measured_us": measured().get((name, shape), "") if device is MEASURED else "",
        "of_copy": f"{(case.reads * read + written) / device.bandwidth / seconds:.2f}",
        "limiter": slowest.limiter,
        "launches": len(predictions),
        "instructions_a_byte": f"{slowest.instructions:.1f}",
        "registers": slowest.registers,
        "programs": slowest.programs,
        "waves": f"{slowest.waves:.2f}",
        **{name: costs.get(name, "") for name in COUNTS},
    }


def _aims(name: str) -> dict[tuple[int, int], float]:
    """Return a case's shapes, and for each the share that is aimed at."""
    return STEP_AIMS if CASES[name].op == "step" else AIMS


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks predictions", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this; others' rows stay")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    every: list[dict[str, object]] = []
    for (capability, device), name in itertools.product([*DEVICES.items(), (90, MEASURED)], CASES):
        shapes = [*_aims(name)] if device is not MEASURED else [LARGE] if (name, LARGE) in measured() else []
        if options.only in name:
            rows += (new_rows := [row_of(name, shape, capability, device) for shape in shapes])
            every += new_rows
            print(device.name, name, flush=True)
        else:
            every += [{**row} for row in read("predictions") if (row["op"], row["device"]) == (name, device.name)]
    print(table(rows))
    if not options.no_write:
        origin = {"triton": triton.__version__, "commit": commit()}
        print(f"written to {write_results('predictions', every, origin=origin)}")
    aims = {(name, "x".join(map(str, shape))): aim for name in CASES for shape, aim in _aims(name).items()}
    missed = [row for row in rows if float(str(row["of_copy"])) < aims[str(row["op"]), str(row["shape"])]]
    for row in missed:
        aim = aims[str(row["op"]), str(row["shape"])]
        print(
            f"MISSED: {row['op']} {row['shape']} {row['device']}: {row['of_copy']} of copy, aim {aim}: {row['limiter']}"
        )
    print(f"{len(rows) - len(missed)} of {len(rows)} predictions meet their aim")
    return int(bool(missed))
