"""PTX written by hand, run by the emulator over NumPy's memory.

``launch`` wraps a body in an entry whose registers are named by their size: %p1 (predicates), %h1 (16 bits), %r1 (32),
%d1 (64). It knows its thread (%t), its program (%c), its number among all threads (%n), and the address of each array
(%a0, %a1, ...); shared memory begins at the symbol ``memory``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import emulator
from emulator.machine import Launch
from emulator.memory import GlobalMemory

HEAD = """
.version 8.7
.target {target}
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel({parameters})
.reqntid {threads}
{{
.reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<160>; .reg .b64 %d<32>; .reg .b64 %a<{arrays}>;
.reg .b32 %t; .reg .b32 %c; .reg .b32 %n;
mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mad.lo.s32 %n, %c, {threads}, %t;
{loads}
"""
LETTERS = {1: "p", 16: "h", 32: "r", 64: "d"}


def module(body: str, arrays: int = 0, threads: int = 32, target: str = "sm_90a") -> str:
    """Return PTX of an entry with ``arrays`` pointers as parameters."""
    head = HEAD.format(
        target=target,
        threads=threads,
        arrays=max(arrays, 1),
        parameters=", ".join(f".param .u64 kernel_param_{index}" for index in range(arrays)),
        loads=" ".join(f"ld.param.b64 %a{index}, [kernel_param_{index}];" for index in range(arrays)),
    )
    return f"{head}{body}\nret;\n}}\n"


def launch(
    body: str,
    *arrays: np.ndarray,
    threads: int = 32,
    programs: int = 1,
    shared: int = 0,
    target: str = "sm_90a",
    unwritten: Sequence[int] = (),
    **options: Any,
) -> Launch:
    """Run a body; arrays change in place. No byte of the arrays numbered in ``unwritten`` counts as written before."""
    spans = [
        (array.ctypes.data, array.nbytes, np.zeros(array.nbytes, bool) if index in unwritten else None)
        for index, array in enumerate(arrays)
    ]
    values = [array.ctypes.data.to_bytes(8, "little") for array in arrays]
    text = module(body, len(arrays), threads, target)
    return emulator.run(text, (programs, 1, 1), values, shared, GlobalMemory(spans), emulator.Options(**options))


def compute(name: str, *inputs: Any, out: Any = None, form: str = "{d}, {s}", **options: Any) -> np.ndarray:
    """Return one instruction's results for arrays, an element a thread; a Python integer stands in its text as it is.

    Args:
        name: with all modifiers.
        inputs: arrays of one length, of the operands' sizes (those of 8 bits in registers of 16).
        out: the result's dtype, or else the first input's.
        form: of the operands, with {d} for the target and {s} for the sources.
    """
    arrays = [np.ascontiguousarray(array) for array in inputs if not isinstance(array, int)]
    count, threads = arrays[0].size, 128
    programs = -(-count // threads)
    padded = [np.resize(one.reshape(-1), programs * threads) for one in arrays]
    result = np.zeros(programs * threads, out or arrays[0].dtype)
    lines, sources, index = [], [], 0
    for place, one in enumerate(inputs):
        if isinstance(one, int):
            sources.append(str(one))
            continue
        bits = arrays[index].dtype.itemsize * 8
        register = f"%{LETTERS[max(bits, 16)]}{place + 1}"
        lines.append(f"mad.wide.s32 %d31, %n, {bits // 8}, %a{index}; ld.global.b{bits} {register}, [%d31];")
        sources.append(register)
        index += 1
    bits = result.dtype.itemsize * 8
    target = f"%{LETTERS[max(bits, 16)]}0"
    if result.dtype == bool:
        lines += [f"{name} {form.format(d='%p1', s=', '.join(sources))};", "selp.b32 %r0, 1, 0, %p1;"]
        lines += ["cvt.u16.u32 %h0, %r0;"]
        target, bits = "%h0", 8
    else:
        lines.append(f"{name} {form.format(d=target, s=', '.join(sources))};")
    lines.append(f"mad.wide.s32 %d31, %n, {bits // 8}, %a{index}; st.global.b{bits} [%d31], {target};")
    launch("\n".join(lines), *padded, result, threads=threads, programs=programs, **options)
    return result[:count]
