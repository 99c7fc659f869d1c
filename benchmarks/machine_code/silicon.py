"""Launches recorded on a GPU, run again by the emulator: the same PTX on the same memory should leave the same bits.

``--record FILE`` runs on a GPU every kernel of tests/kernels/triton/test_compiled.py, two products whose sums are long,
and single instructions on 65,536 operands each. A record has each launch's PTX, grid, arguments and memory, before and
after. ``--replay FILE`` needs no GPU: a row says how many elements of which dtype a launch wrote otherwise there.
Without a GPU a record is the emulator's own.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import lzma
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

import emulator
from benchmarks.common.measure import commit, device_name, table, write_results
from benchmarks.common.pages import markdown, read
from emulator.memory import GlobalMemory
from octavo.kernels.triton import cases
from octavo.kernels.triton.launch import launch
from octavo.tune.timing import DEVICE, describe, synchronize
from tests.kernels.triton import test_compiled
from tests.support import emulated, triton_kernels
from tests.support.on_gpu import as_bytes, relocated, touched

TAKES = "a GPU; 2 minutes. Without one 5, from its record"
MEASURES = ("emulator", "octavo/kernels/triton")

CASES = [name for capability, name in test_compiled.ALL_CASES if capability == 90]
LONG = {"tensor . tensor, Triton": (64, 128, 4096), "1x128 . 128x128, Triton": (128, 128, 2048)}
OPERANDS = 1 << 16

# Instructions of 32-bit registers, $1 and $2 their operands and $0 their result.
INSTRUCTIONS = {
    "ex2": "ex2.approx.ftz.f32 $0, $1;",
    "rcp": "rcp.approx.ftz.f32 $0, $1;",
    "sqrt, rounded": "sqrt.rn.f32 $0, $1;",
    "div, rounded": "div.rn.f32 $0, $1, $2;",
    "add": "add.f32 $0, $1, $2;",
    "mul": "mul.f32 $0, $1, $2;",
    "fma": "fma.rn.f32 $0, $1, $2, $1;",
    "min": "min.f32 $0, $1, $2;",
    "max": "max.f32 $0, $1, $2;",
    "max of NaN": "max.NaN.f32 $0, $1, $2;",
    "to bf16x2": "cvt.rn.bf16x2.f32 $0, $1, $2;",
    "to f16x2": "cvt.rn.f16x2.f32 $0, $1, $2;",
    "to f32 from bf16": "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.bf16 $0, a; }",
    "to f32 from f16": "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }",
    "to e4m3x2": "{ .reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, $1, $2; cvt.u32.u16 $0, a; }",
    "to e5m2x2": "{ .reg .b16 a; cvt.rn.satfinite.e5m2x2.f32 a, $1, $2; cvt.u32.u16 $0, a; }",
    # which ptxas before 13.1 compiles wrongly: half of the result is what a register held that nobody wrote
    "e4m3x2 with itself": "{ .reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, $1, $2; mov.b32 $0, {a, a}; }",
    "to f16x2 from e4m3x2": "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, a; }",
    "to f16x2 from e5m2x2": "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e5m2x2 $0, a; }",
    "from s32": "cvt.rn.f32.s32 $0, $1;",
}


@triton.jit
def instruction_kernel(out_ptr, a_ptr, b_ptr, ASM: tl.constexpr, SIZE: tl.constexpr):
    """Write the instruction's results for a and b to out, all as 32 bits."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    result = tl.inline_asm_elementwise(
        ASM, "=r,r,r", [tl.load(a_ptr + at), tl.load(b_ptr + at)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out_ptr + at, result)


def operands(seed: int) -> Tensor:
    """Return bits of float32: of any exponent, a quarter near one, some of them special."""
    draw = np.random.default_rng(seed)
    bits = draw.integers(0, 1 << 32, OPERANDS, dtype=np.uint32)
    near = draw.normal(size=OPERANDS // 4).astype(np.float32)
    bits[: near.size] = near.view(np.uint32)
    special = np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x007FFFFF, 0x00800000], np.uint32)
    both = np.concatenate((special, special | np.uint32(1 << 31)))
    bits[-both.size * 16 :] = np.repeat(both, 16) if seed == 0 else np.tile(both, 16)
    return torch.from_numpy(bits.view(np.int32)).to(DEVICE)


Grid = tuple[int, int, int]


class Memory(NamedTuple):
    """An allocation that a launch may touch; its contents by their hashes."""

    address: int
    dtype: str
    before: str
    after: str
    is_table: bool  # of addresses


class Recorded(NamedTuple):
    """A launch; an argument is its bytes, or (the number of an allocation, an offset) or None."""

    case: str
    kernel: str
    ptx: str
    shared: int
    grid: Grid
    arguments: list[bytes | tuple[int, int] | None]
    memories: list[Memory]


class Recorder:
    """Notes launches while ``recording`` lasts."""

    def __init__(self) -> None:
        self.case = ""
        self.launches: list[Recorded] = []
        self.problems: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}

    def keep(self, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()[:20]
        self.blobs.setdefault(name, content)
        return name

    def content(self, tensor: Tensor) -> str:
        return self.keep(as_bytes(tensor.untyped_storage()).cpu().numpy().tobytes())

    def launch(self, compiled: Any, run: Callable[..., None], grid: Grid, launch_arguments: tuple[Any, ...]) -> None:
        stream, function, *others = launch_arguments
        flat = list(emulated.flattened(compiled.src.signature.values(), others[4:]))
        tensors, tables = touched([x for _, x in flat if isinstance(x, Tensor)])
        places = {at: number for number, at in enumerate(tensors)}
        arguments: list[bytes | tuple[int, int] | None] = []
        for kind, value in flat:
            if not kind.startswith("*"):
                arguments.append(emulated._packed(kind, value))
            elif value is None or value.untyped_storage().data_ptr() not in places:
                arguments.append(None)
            else:
                at = value.untyped_storage().data_ptr()
                arguments.append((places[at], value.data_ptr() - at))
        synchronize()
        before = [self.content(x) for x in tensors.values()]
        run(*grid, stream, function, *others)
        synchronize()
        memories = [
            Memory(at, str(x.dtype).removeprefix("torch."), old, self.content(x), at in tables)
            for (at, x), old in zip(tensors.items(), before, strict=True)
        ]
        ptx = self.keep(compiled.asm["ptx"].encode())
        shared = compiled.metadata.shared
        self.launches.append(Recorded(self.case, compiled.name, ptx, shared, grid, arguments, memories))


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record octavo's launches, and Triton's own, within the block."""
    from triton.compiler.compiler import CompiledKernel

    recorder, init = Recorder(), CompiledKernel._init_handles

    def init_handles(compiled: Any) -> None:
        if compiled.module is None or compiled._run is None:
            init(compiled)
            run = compiled._run
            compiled._run = lambda x, y, z, *arguments: recorder.launch(compiled, run, (x, y, z), arguments)

    with mock.patch.object(CompiledKernel, "_init_handles", init_handles):
        yield recorder


def record(path: Path) -> int:
    """Record launches, and write them to a file."""
    with triton_kernels.running(90) as kernels, recording() as recorder:

        def attempt(case: str, call: Callable[[], Any]) -> None:
            recorder.case = case
            try:
                if problem := call():
                    recorder.problems[case] = problem
            except Exception as error:
                recorder.problems[case] = describe(error)

        for name in CASES:
            attempt(name, partial(test_compiled.check, name, kernels))
        for name, shape in LONG.items():
            attempt(f"{name}, K = {shape[2]}", partial(cases.ALL_CASES[name].wrong, shape))
        a, b = operands(0), operands(1)

        def instruct(text: str) -> None:
            launch(instruction_kernel, OPERANDS // 1024, (torch.empty_like(a), a, b, text, 1024), 4)

        for name, text in INSTRUCTIONS.items():
            attempt(name, partial(instruct, text))
    for case, problem in recorder.problems.items():
        print(f"FAILED: {case}: {problem}")
    versions = {"device": device_name(), "torch": torch.__version__, "triton": triton.__version__, "commit": commit()}
    content = pickle.dumps((versions, recorder.launches, recorder.blobs))
    path.write_bytes(lzma.compress(content, preset=1))
    print(f"{len(recorder.launches)} launches, {len(recorder.problems)} problems, {path.stat().st_size / 1e6:.1f} MB")
    return int(bool(recorder.problems))


# --- replay -----------------------------------------------------------------------------------------------------------


class Buffer:
    """An allocation with its recorded bytes, at another address of the same alignment."""

    def __init__(self, content: bytes, address: int) -> None:
        self.size = len(content)
        self._own = ctypes.create_string_buffer(self.size + 1024)
        base = ctypes.addressof(self._own)
        self.address = base + (address - base) % 512
        ctypes.memmove(self.address, content, self.size)

    @property
    def bytes(self) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.address))


def replay(one: Recorded, blobs: dict[str, bytes]) -> dict[str, object]:
    """Return a row: the elements that a launch writes in the emulator, compared with the record."""
    buffers = [Buffer(blobs[memory.before], memory.address) for memory in one.memories]
    both = list(zip(one.memories, buffers, strict=True))
    moves = [(memory.address, buffer.size, buffer.address) for memory, buffer in both]
    for memory, buffer in both:
        if memory.is_table:
            addresses = torch.from_numpy(buffer.bytes[: buffer.size // 8 * 8].view(np.int64))
            addresses.copy_(relocated(addresses, moves))
    values = []
    for argument in one.arguments:
        if isinstance(argument, bytes):
            values.append(argument)
        else:
            at = 0 if argument is None else buffers[argument[0]].address + argument[1]
            values.append(at.to_bytes(8, "little"))
    text = blobs[one.ptx].decode()
    values += [b"\0" * 8] * (len(emulator.parse(text).parameters) - len(values))
    memory = GlobalMemory([(buffer.address, buffer.size, None) for buffer in buffers])
    emulator.run(text, one.grid, values, one.shared, memory, emulator.Options())
    row: dict[str, object] = {"case": one.case, "kernel": one.kernel, "written": 0, "other": 0, "dtype": "", "most": ""}
    for recorded, buffer in both:
        if recorded.is_table:
            continue
        dtype = getattr(torch, recorded.dtype)
        width = torch.empty(0, dtype=dtype).element_size()
        before, true, replayed = (
            np.frombuffer(content, f"u{width}")
            for content in (blobs[recorded.before], blobs[recorded.after], buffer.bytes.tobytes())
        )
        row["written"] = int(row["written"]) + int(((before != true) | (before != replayed)).sum())  # type: ignore[call-overload]
        if other := int((true != replayed).sum()):
            row["other"] = int(row["other"]) + other  # type: ignore[call-overload]
            row["dtype"] = f"{row['dtype']} {recorded.dtype}".strip()
            at = int(np.nonzero(true != replayed)[0][0])
            steps = np.abs(true.astype(np.int64) - replayed.astype(np.int64))
            row["most"] = f"{row['most']} {steps.max()} steps, first {int(true[at]):#x} {int(replayed[at]):#x}".strip()
    return row


def silicon_table() -> str:
    """Return the table of docs/emulator.md: the numbers compared, and the numbers that differ."""
    rows = read("silicon")
    kernels = [row for row in rows if row["case"] not in INSTRUCTIONS]
    names, numbers = {row["kernel"] for row in kernels}, sum(int(row["written"]) for row in kernels)
    lines = [
        [f"{len(kernels)} launches of {len(names)} kernels", f"{numbers:,}", str(sum(int(r["other"]) for r in kernels))]
    ]
    others = [f"`{name}`" for row in rows if (name := row["case"]) in INSTRUCTIONS and row["other"] == "0"]
    lines.append([f"{', '.join(others)}", f"{OPERANDS:,} each", "0"])
    for row in rows:
        if row["case"] in INSTRUCTIONS and row["other"] != "0":
            steps = int(row["most"].partition(" ")[0])
            by = f", by {steps} in the last place" if steps < 100 else ""
            lines.append([f"`{row['case']}`", f"{OPERANDS:,}", f"{int(row['other']):,}{by}"])
    return markdown(("recorded on an H100", "numbers written", "otherwise in the emulator"), lines)


TABLES = {"silicon": silicon_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks silicon", description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE", help="run the launches here and write what they did")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a record's launches in the emulator")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if options.record:
        return record(options.record)
    versions, launches, blobs = pickle.loads(lzma.decompress(options.replay.read_bytes()))
    rows = [replay(one, blobs) for one in launches if one.case in INSTRUCTIONS or one.kernel != "instruction_kernel"]
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('silicon', rows, origin=versions)}")
    return 0
