"""A compiled kernel's machine code, and the checks of it.

    hardly anything spills: of a hundred instructions at most one reads or writes the stack
    codes are made and read by the hardware's conversions
    x, codes and results of aligned tensors move 16 bytes an access
    a product runs on the FP8 tensor cores, and ptxas need not wait for its sums where the code does not
    for Ada no float32 becomes a code by Triton's own conversion, which before Triton 3.9 cuts off to float16 first
    no two codes are packed with two others and read alone too: ptxas 12 then loses them (docs/triton-faults.md)

The tools are Triton's own: its wheel carries ptxas, nvdisasm and cuobjdump.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from octavo.kernels.triton import norm_kernels, optimizer_state, prologue, tiles


class Instruction(NamedTuple):
    """One of a kernel's instructions and the source lines (file's name, line) that it comes from, innermost first."""

    name: str  # with its suffixes: LDG.E.128
    lines: tuple[tuple[str, int], ...]


_LINE = re.compile(r'"([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?\s*([A-Z][A-Z0-9_.]*)")


def _tool(tool: Any, kernel: CompiledKernel, *options: str) -> str:
    """Return the output of a tool of Triton's own wheel for a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool.path, *options, file.name], capture_output=True, text=True, check=True).stdout


@functools.lru_cache(maxsize=1)
def _disassembled(kernel: CompiledKernel) -> list[str]:
    """Return a kernel's machine code with source lines and labels, line by line."""
    return _tool(triton.knobs.nvidia.nvdisasm, kernel, "-gi", "-c").splitlines()


def instructions(kernel: CompiledKernel) -> list[Instruction]:
    """Return a kernel's machine code."""
    code: list[Instruction] = []
    lines: list[tuple[str, int]] = []
    in_lines = False
    for text in _disassembled(kernel):
        if "//##" in text:
            if not in_lines:
                lines = []
            lines += [(path.rpartition("/")[2], int(line)) for path, line in _LINE.findall(text)[:1]]
            in_lines = True
        elif match := _INSTRUCTION.match(text):
            in_lines = False
            code.append(Instruction(match[1], tuple(lines)))
    return code


def loops(kernel: CompiledKernel) -> list[list[Instruction]]:
    """Return the instructions of each innermost loop, less the blocks that call.

    A call is what a correctly rounded root or quotient makes where float32's range ends, which is rare; for sm_89 ptxas
    also writes so what is but a jump to a label.
    """
    code, places, branches, blocks, calls = instructions(kernel), {}, [], [0], set()
    count = 0
    for text in _disassembled(kernel):
        if label := re.match(r"(\.L_x_\d+):", text):
            places[label[1]] = count
            blocks.append(count)
        elif _INSTRUCTION.match(text):
            count += 1
            if "CALL" in text and "`(.L_x_" not in text:
                calls.add(count - 1)
            if branch := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", text):
                branches.append((branch[1], count - 1))
                blocks.append(count)
    rare = {
        place
        for first, last in itertools.pairwise([*blocks, count])
        if not calls.isdisjoint(range(first, last))
        for place in range(first, last)
    }
    spans = [(places[label], end) for label, end in branches if label in places and places[label] < end]
    inner = [
        one for one in spans if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in spans)
    ]
    return [[code[i] for i in range(first, last + 1) if i not in rare] for first, last in inner]


def resources(kernel: CompiledKernel) -> dict[str, int]:
    """Return registers a thread and bytes of stack: {"REG": ..., "STACK": ...}."""
    text = _tool(triton.knobs.nvidia.cuobjdump, kernel, "--dump-resource-usage")
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


_TO_CODES = re.compile(r"tt\.fp_to_fp .*f32\S* -> tensor<\S*f8E")
_SERIALIZED = re.compile(r"\(C(7510|7514|7517)\)[^\n]*")


def serialized(kernel: CompiledKernel) -> list[str]:
    """Return the warnings of ptxas about places where it makes Hopper's asynchronous products wait for each other."""
    if "wgmma" not in kernel.asm["ptx"]:
        return []
    arch = kernel.metadata.target.arch
    command = [get_ptxas(arch).path, f"--gpu-name={sm_arch_from_capability(arch)}", "--output-file", "/dev/null", "-"]
    log = subprocess.run(command, input=kernel.asm["ptx"], capture_output=True, text=True, check=True).stderr
    return sorted({match[0] for match in _SERIALIZED.finditer(log)})


@functools.cache
def _source() -> dict[tuple[str, int], str]:
    """Return the kernels' source lines by (file's name, line)."""
    folder = Path(tiles.__file__).parent
    return {
        (file.name, number): line
        for file in folder.glob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    }


_CODES = re.compile(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32\s+(%rs\d+)")
_PACKED = re.compile(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}")


def lost_codes(ptx: str) -> int:
    """Return the number of pairs of codes that ptxas 12 loses: below two others in a register, and read alone too."""
    text = re.sub(r"//.*", "", ptx)
    pairs, uses = set(_CODES.findall(text)), Counter(re.findall(r"%rs\d+", text))
    packed = Counter(low for low, high in _PACKED.findall(text) if {low, high} <= pairs)
    return sum(uses[low] > 1 + times for low, times in packed.items())


_BITS = re.compile(r"\.(?:U|S)?(8|16|64|128|256)(?:\.|$)")
_PRODUCTS = ("matmul_kernel", "rows_in_groups_kernel", "terms_in_groups_kernel")
# kernels of small tensors: a few numbers a tensor or a group, scales
_WITHOUT_TILES = ("delayed_update_kernel", "note_faults_kernel", "checked_ends_kernel", "mend_kernel")
_WITHOUT_TILES += ("swizzle_groups_kernel",)
# kernels whose widest loads are those of tiles
_WIDEST = ("dequantize_kernel", "rotary_kernel", "cross_entropy_kernel", "cross_entropy_backward_kernel")
MOST_SPILLS = 0.01  # of all instructions: an address kept on the stack, which the first cache holds, costs no time
_TENSOR_CORES = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA", 120: "QMMA"}


def _bits(instruction: Instruction) -> int:
    match = _BITS.search(instruction.name)
    return int(match[1]) if match else 32


# what reads and writes tiles of tensors; scales and their like are narrow and few
_READ = (tiles.load_tile, prologue.produce, prologue.load_input, prologue.turned_back, optimizer_state.load_at)
_WRITE = (tiles.store_codes, norm_kernels.store_y, optimizer_state.store_at)


def _is_of(functions: Sequence[JITFunction], instruction: Instruction) -> bool:
    """Whether an access is in the body of one of these functions.

    Triton 3.6 gives its line only. 3.9 gives the callers' too, but its own is off by a few, since the lines of inline
    assembly count.
    """
    (file, line), *callers = instruction.lines or [("", 0)]
    for function in functions:
        first = function.starting_line_number
        inside = function.__module__.endswith(f".{file.removesuffix('.py')}") and (
            first <= line < first + len(function.raw_src)
        )
        called = callers and re.search(rf"\b{function.__name__}\(", _source().get(callers[0], ""))
        if called or (inside and not callers):
            return True
    return False


def tile_bytes(name: str, code: Sequence[Instruction]) -> tuple[float, float]:
    """Return bytes of tiles that a thread of a kernel reads and writes in these instructions."""
    loads, stores = _accesses(name, code)
    return sum(map(_bits, loads)) / 8, sum(map(_bits, stores)) / 8


def _accesses(name: str, code: Sequence[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
    """Return a kernel's loads and stores of tiles."""
    loads = [i for i in code if i.name.startswith("LDG.")]
    stores = [i for i in code if i.name.startswith("STG.")]
    widest = [i for i in loads if _bits(i) == max(map(_bits, loads))]
    if name in _PRODUCTS:
        loads = [i for i in code if i.name.startswith("LDGSTS.")]
    elif name in _WIDEST:
        loads = widest
    else:  # Triton 3.7 gives the loads of some a line of the kernel itself
        loads = [i for i in loads if _is_of(_READ, i)] or widest
    if name not in (*_PRODUCTS, *_WIDEST):
        stores = [i for i in stores if _is_of(_WRITE, i)]
    return loads, stores


def _narrowest(accesses: Sequence[Instruction]) -> int:
    """Return the bits of the narrowest accesses that move a tenth of the bytes; a few may have the line of others."""
    moved = Counter[int]()
    for bits in map(_bits, accesses):
        moved[bits] += bits
    return min((bits for bits, of_all in moved.items() if 10 * of_all >= moved.total()), default=0)


def examine(kernel: CompiledKernel, bits: int = 128) -> tuple[dict[str, object], list[str]]:
    """Return the properties of a kernel's machine code, and a line for each check that it fails.

    Args:
        kernel: compiled for one of ``_TENSOR_CORES``.
        bits: how wide its accesses of tiles should be at least.
    """
    code, used = instructions(kernel), resources(kernel)
    accesses = _accesses(kernel.name, code)
    loads, stores = ({*map(_bits, each)} for each in accesses)
    conversions = sorted({match[0] for i in code if (match := re.search(r"^F2FP.*E[45]M[23]", i.name))})
    tensor_core = sorted({i.name for i in code if "MMA" in i.name and not i.name.startswith("HFMA2")})
    spills = sum(i.name.startswith(("STL", "LDL")) for i in code)
    misses = []
    if spills > MOST_SPILLS * len(code):
        misses.append(f"{spills} spills, {used['STACK']} bytes of stack")
    text = kernel.asm["ttir"]
    if kernel.name in _PRODUCTS:  # gives the tensor cores codes as they are, and may write some
        text = "\n".join(line for line in text.splitlines() if "tt.store" in line)
    formats = set(re.findall(r"\bf8(E4M3|E5M2)", text))
    for name in sorted(formats):
        if not any(name in conversion for conversion in conversions):
            misses.append(f"no hardware conversion of {name}")
    arch = kernel.metadata.target.arch
    if arch == 89 and _TO_CODES.search(kernel.asm["ttir"]):
        misses.append("codes by Triton's conversion of float32")
    if lost := lost_codes(kernel.asm["ptx"]):
        misses.append(f"{lost} pairs of codes that ptxas 12 loses")
    misses += serialized(kernel)
    wanted = _TENSOR_CORES[arch]
    if kernel.name in _PRODUCTS and not any(name.startswith(wanted) for name in tensor_core):
        misses.append(f"no {wanted}")
    if kernel.name not in _WITHOUT_TILES and _narrowest(accesses[0]) < bits:
        misses.append(f"loads of {sorted(loads) or 'no'} bits")
    updates = kernel.name == "optimizer_step_kernel" and bool(stores)  # some launches only look
    only_reads = kernel.name in ("cast_statistics_kernel", "note_faults_kernel")
    if (formats or tensor_core or updates) and not only_reads and min(stores, default=0) < bits:
        misses.append(f"stores of {sorted(stores) or 'no'} bits")
    return {
        "kernel": kernel.name,
        "capability": f"sm_{arch}",
        "warps": kernel.metadata.num_warps,
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "spills": spills,
        "shared_bytes": kernel.metadata.shared,
        "load_bits": "/".join(map(str, sorted(loads))),
        "store_bits": "/".join(map(str, sorted(stores))),
        "conversions": " ".join(conversions),
        "tensor_core": " ".join(tensor_core),
    }, misses
