"""Products of the tensor cores that warps and warpgroups ask for: mma.sync and wgmma."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator.machine import Mask, Run, Threads, constant, instruction, items, reader, whole_warps, wide, write
from emulator.memory import GROUP, NOBODY
from emulator.parse import Fault, Instruction, Program
from emulator.tensor_cores import multiply_add, rule_of
from emulator.values import FP8

# Of a matrix in shared memory, by the bytes of a swizzled row: the bits of an address that three (two, one) others are
# added to.
SWIZZLES = {128: 7, 64: 3, 32: 1}
CHUNK = 16  # bytes that stay together


def values_of(raw: np.ndarray, element: str) -> np.ndarray:
    """float64 of bytes [..., n]: n codes of FP8, or n / 2 of float16."""
    return FP8[element][raw] if element in FP8 else raw.view(np.float16).astype(np.float64)


def matrix_chunks(descriptor: int, rows: int, swizzle: int) -> np.ndarray:
    """Addresses [rows, 2] of 16 bytes each of a matrix whose rows, of 32 bytes, lie along K.

    Args:
        descriptor: 64 bits: where it begins, and the strides between 16-byte columns and between 8 rows, in 16 bytes.
        swizzle: bytes of a row, 128, 64 or 32, or 0.
    """
    start, column_stride, row_stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    row, column = np.arange(rows)[:, None], np.arange(2)[None, :]
    if not swizzle:
        return start + row // 8 * row_stride + row % 8 * CHUNK + column * column_stride
    places = start + row // 8 * row_stride + row % 8 * swizzle + column * CHUNK
    return places ^ ((places >> 7 & SWIZZLES[swizzle]) << 4)


class SharedOperand:
    """A product's operand in one program's shared memory, which nobody may write before the product ends.

    After that the ``reader`` may, a warpgroup, or nobody in particular.
    """

    def __init__(self, threads: Threads, lane: int, chunks: np.ndarray, one: Instruction, reader: int = NOBODY) -> None:
        shared, lanes = threads.launch.shared, np.full(chunks.size, lane)
        units, warps = shared.places(chunks.reshape(-1), threads.program[lanes], CHUNK, one), threads.warp[lanes]
        self._codes, self._one = shared.read(units, CHUNK, warps, one, reader).view(np.uint8), one
        self._again = lambda: shared.read(units, CHUNK, warps, one, NOBODY).view(np.uint8)

    def end(self) -> np.ndarray:
        """The codes, uint8 [rows, 32]."""
        if (self._again() != self._codes).any():
            raise Fault(f"race: shared memory that a product under way reads was written: {self._one}")
        return self._codes.reshape(-1, 2 * CHUNK)


KINDS = ("b32", "b32", "f32")  # of the registers of a, b and c


@instruction(
    "mma.sync.aligned.m16n8k(16).row.col.f32.(f16).(f16).f32",
    "mma.sync.aligned.m16n8k(32).row.col.f32.(e4m3|e5m2).(e4m3|e5m2).f32",
)
def warp_product(program: Program, one: Instruction, k: str, a_element: str, b_element: str) -> Run:
    """d = a . b + c of a warp: each lane holds parts of a, b, c and d in registers."""
    depth, rule = int(k), rule_of(program.target, "mma", a_element, b_element)
    registers = [items(operand) for operand in one.operands]
    reads = [[reader(one, item, kind) for item in part] for part, kind in zip(registers[1:], KINDS, strict=True)]
    if [len(part) for part in registers] != [4, 4, 2, 4]:
        raise one.unsupported()
    lane, number, each = np.arange(32)[:, None], np.arange(4)[:, None, None], depth // 8  # elements of a register
    row, place = lane >> 2, (lane & 3) * each + np.arange(each)
    a_at = slice(None), row + 8 * (number & 1), place + depth // 2 * (number >> 1)  # [registers, lanes, elements]
    b_at = slice(None), row, place + depth // 2 * number[:2]
    c_at = slice(None), row[:, 0] + 8 * (number >> 1)[..., 0], (lane & 3)[:, 0] * 2 + (number & 1)[..., 0]

    def run(threads: Threads, mask: Mask) -> None:
        warps = whole_warps(threads, mask, one)
        a, b, c = (
            np.stack([wide(read(threads), threads.count).reshape(-1, 32)[warps] for read in part], 1) for part in reads
        )
        a_values, b_values = np.empty((len(a), 16, depth)), np.empty((len(a), 8, depth))
        c_values = np.empty((len(a), 16, 8), np.float32)
        a_values[a_at] = values_of(a.view(np.uint8).reshape(-1, 4, 32, 4), a_element)
        b_values[b_at] = values_of(b.view(np.uint8).reshape(-1, 2, 32, 4), b_element)
        c_values[c_at] = c
        out = multiply_add(a_values, b_values, c_values, rule)[c_at]
        for place, target in enumerate(registers[0]):
            write(threads, mask, target, out[:, place].reshape(-1))

    return run


THREADS = 128  # of a warpgroup


@instruction("wgmma.fence.sync.aligned")
def fence(program: Program, one: Instruction) -> Run:
    """Registers written before are seen by the products that follow, as everything is here."""
    return lambda threads, mask: None


@instruction("wgmma.mma_async.sync.aligned.m64n(64|128|256)k32.f32.(e4m3|e5m2).(e4m3|e5m2)")
def warpgroup_product(program: Program, one: Instruction, n: str, a_element: str, b_element: str) -> Run:
    """d = a . b, plus d where its predicate says so, of a warpgroup; a and b in shared memory, d after a wait."""
    columns, rule = int(n), rule_of(program.target, "wgmma", a_element, b_element)
    d, a, b, keeps, *signs = one.operands
    if any(constant(one, sign) != 1 for sign in signs) or len(d) != columns // 2:
        raise one.unsupported()
    read_a, read_b, read_keeps = reader(one, a, "u64"), reader(one, b, "u64"), reader(one, keeps, "pred")
    targets = frozenset(item.number for item in d)
    thread, number = np.arange(THREADS)[:, None], np.arange(columns // 2)
    row = 16 * (thread // 32) + (thread % 32 >> 2) + 8 * (number >> 1 & 1)
    column = 8 * (number >> 2) + thread % 4 * 2 + (number & 1)

    def operands(threads: Threads, read: Any, first: np.ndarray, rows: int) -> list[SharedOperand]:
        given = wide(read(threads), threads.count)
        if (given.reshape(-1, THREADS) != given[::THREADS, None])[first // THREADS].any():
            raise Fault(f"a descriptor differs in a warpgroup: {one}")
        if (given[first] >> np.uint64(49) & np.uint64(7)).any():
            raise one.unsupported("a descriptor's base offset:")
        found = []
        for lane in first:
            chunks = matrix_chunks(int(given[lane]), rows, (0, 128, 64, 32)[int(given[lane]) >> 62])
            found.append(SharedOperand(threads, lane, chunks, one, GROUP - threads.warp[lane] // 4))
        return found

    def run(threads: Threads, mask: Mask) -> None:
        groups = whole_warps(threads, mask, one, THREADS)
        first, lanes = np.flatnonzero(groups) * THREADS, np.flatnonzero(np.repeat(groups, THREADS))
        left, right = operands(threads, read_a, first, 64), operands(threads, read_b, first, columns)
        adds = wide(read_keeps(threads), threads.count)[first][:, None, None]

        def end() -> None:
            a_codes, b_codes = (np.stack([operand.end() for operand in side]) for side in (left, right))
            c_values = np.empty((first.size, 64, columns), np.float32)
            old = np.stack([threads.registers[item.number].view(np.float32)[lanes] for item in d], 1)
            c_values[:, row, column] = np.where(adds, old.reshape(-1, THREADS, len(d)), np.float32(0))
            out = multiply_add(values_of(a_codes, a_element), values_of(b_codes, b_element), c_values, rule)
            for item, values in zip(d, out[:, row, column].reshape(-1, len(d)).T, strict=True):
                write(threads, mask, item, values)

        threads.under_way |= targets
        threads.products[-1].append((end, targets))

    run.writes = targets  # type: ignore[attr-defined]
    return run
