"""Products of the tensor cores that warps and warpgroups ask for: mma.sync and wgmma."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from emulator.accesses import groups
from emulator.machine import Mask, Threads, instruction, items, reader, whole_warps, wide, write
from emulator.memory import BASE
from emulator.parse import Fault, Instruction, Program, Vector
from emulator.tensor_cores import Rule, multiply_add, rule_of
from emulator.values import FP8, from_bf16

# Of a matrix in shared memory, by the swizzle in its descriptor: the bytes of a row, and the bits of an address that
# three (two, one) others are added to.
SWIZZLES = {128: 7, 64: 3, 32: 1}


def values_of(raw: np.ndarray, element: str) -> np.ndarray:
    """float64 of bytes [..., n]: n codes, or n / 2 numbers of 16 bits."""
    if element in FP8:
        return FP8[element][raw]
    half = np.ascontiguousarray(raw).view(np.uint16)
    return (from_bf16(half) if element == "bf16" else half.view(np.float16)).astype(np.float64)


def rule_for(program: Program, one: Instruction, a: str, b: str) -> Rule:
    """How this program's tensor cores add products of elements of a and b."""
    try:
        return rule_of(program.target, one.parts[0], a, b)
    except NotImplementedError as error:
        raise one.unsupported(f"{error}:") from None


def descriptor_places(descriptor: int, rows: int, swizzle: int, columns: int = 32) -> np.ndarray:
    """Byte addresses [rows, columns] of a matrix whose rows lie along K.

    Args:
        descriptor: 64 bits: where it begins, and the strides between 16-byte columns and between 8 rows, in 16 bytes.
        swizzle: bytes of a row, 128, 64 or 32, or 0.
    """
    start, column_stride, row_stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    if not swizzle:
        return start + row // 8 * row_stride + row % 8 * 16 + column // 16 * column_stride + column % 16
    places = start + row // 8 * row_stride + row % 8 * swizzle + column
    return places ^ ((places >> 7 & SWIZZLES[swizzle]) << 4)


def matrix_places(threads: Threads, program: int, addresses: np.ndarray, what: Any) -> np.ndarray:
    """Places in shared memory of a matrix's bytes, for one program."""
    shared = threads.launch.shared
    if addresses.min() < BASE or addresses.max() >= shared.stride:
        raise Fault(f"out of bounds: shared {addresses.min()}..{addresses.max()} of {shared.stride}: {what}")
    return addresses + program * shared.stride


@instruction("mma")
def warp_product(program: Program, one: Instruction) -> Any:
    """mma.sync m16n8k16 or m16n8k32: each lane holds parts of a, b, c and d in registers."""
    shapes = {"m16n8k16": 16, "m16n8k32": 32}
    one.allow("sync", "aligned", "row", "col", "kind::f8f6f4", *shapes, *FP8)
    depth, (to, a_element, b_element, accumulator) = shapes[one.one_of(shapes)], one.parts[-4:]
    rule = rule_for(program, one, a_element, b_element)
    if to != "f32" or accumulator != "f32" or (depth == 32) != (a_element in FP8) or not one.has("row"):
        raise one.unsupported()
    d, a, b, c = (items(operand) for operand in one.operands)
    reads = [[reader(one, item, kind, 32) for item in part] for part, kind in ((a, "b"), (b, "b"), (c, "f"))]
    lane, each = np.arange(32), depth // 8  # elements of a register
    row, place = lane >> 2, (lane & 3)[:, None] * each + np.arange(each)

    def run(threads: Threads, mask: Mask) -> None:
        warps = whole_warps(threads, mask, one)
        given = [[wide(read(threads), threads.count).reshape(-1, 32) for read in part] for part in reads]
        a_values, b_values = np.empty((warps.size, 16, depth)), np.empty((warps.size, 8, depth))
        c_values = np.empty((warps.size, 16, 8), np.float32)
        for number, raw in enumerate(given[0]):
            found = values_of(raw.view(np.uint8).reshape(-1, 32, 4), a_element)
            a_values[:, (row + 8 * (number & 1))[:, None], place + depth // 2 * (number >> 1)] = found
        for number, raw in enumerate(given[1]):
            found = values_of(raw.view(np.uint8).reshape(-1, 32, 4), b_element)
            b_values[:, row[:, None], place + depth // 2 * number] = found
        for number, raw in enumerate(given[2]):
            c_values[:, row + 8 * (number >> 1), (lane & 3) * 2 + (number & 1)] = raw
        out = multiply_add(a_values, b_values, c_values, rule)
        for number, target in enumerate(d):
            found = out[:, row + 8 * (number >> 1), (lane & 3) * 2 + (number & 1)]
            write(threads, mask, target, np.ascontiguousarray(found).reshape(-1))

    return run


GROUP = 128  # threads of a warpgroup


@instruction("wgmma")
def warpgroup_product(program: Program, one: Instruction) -> Any:
    """wgmma.mma_async m64nNk32 of FP8: b, and often a, from shared memory; d is there after a wait."""
    if one.has("fence"):
        return lambda threads, mask: None
    if one.has("commit_group", "wait_group"):
        return groups(one, "products", "product_groups")
    shape = re.fullmatch(r"m64n(\d+)k32", one.parts[4])
    a_element, b_element = one.parts[-2:]
    one.allow("mma_async", "sync", "aligned", one.parts[4], *FP8)
    d, a, b, scale_d, *rest = one.operands
    if not shape or one.parts[5] != "f32" or a_element not in FP8 or any(part.value != 1 for part in rest):
        raise one.unsupported()
    columns, rule = int(shape[1]), rule_for(program, one, a_element, b_element)
    targets, held = frozenset(item.number for item in d.items), isinstance(a, Vector)
    read_a = [reader(one, item, "b", 32) for item in a.items] if held else [reader(one, a, "u", 64)]
    read_b, read_scale = reader(one, b, "u", 64), reader(one, scale_d, "p", 1)
    thread, number = np.arange(GROUP)[:, None], np.arange(columns // 2)
    row = 16 * (thread // 32) + (thread % 32 >> 2) + 8 * (number >> 1 & 1)
    column = 8 * (number >> 2) + thread % 4 * 2 + (number & 1)

    def descriptors(threads: Threads, values: Any, lanes: np.ndarray) -> np.ndarray:
        found = wide(values, threads.count)[lanes].reshape(-1, GROUP)
        if (found != found[:, :1]).any():
            raise Fault(f"a descriptor differs in a warpgroup: {one}")
        return found[:, 0]

    def places_of(threads: Threads, found: np.ndarray, rows: int, owners: np.ndarray) -> np.ndarray:
        every = []
        for descriptor, owner in zip(found.tolist(), owners.tolist(), strict=True):
            if descriptor >> 49 & 7:
                raise one.unsupported("a descriptor's base offset")
            swizzle = (0, 128, 64, 32)[descriptor >> 62]
            every.append(matrix_places(threads, owner, descriptor_places(descriptor, rows, swizzle), one))
        return np.stack(every)

    def run(threads: Threads, mask: Mask) -> None:
        lanes = np.flatnonzero(np.repeat(whole_warps(threads, mask, one, GROUP), GROUP))
        warps, owners = threads.warp[lanes][::GROUP], threads.program[lanes][::GROUP]
        count, shared = owners.size, threads.launch.shared
        b_places = places_of(threads, descriptors(threads, read_b(threads), lanes), columns, owners)
        given = [read(threads) for read in read_a]
        if held:
            a_values = np.empty((count, 64, 32))
            first = thread[:, 0]
            for place, raw in enumerate(given):
                found = values_of(wide(raw, threads.count)[lanes].view(np.uint8).reshape(count, GROUP, 4), a_element)
                rows = 16 * (first // 32) + (first % 32 >> 2) + 8 * (place & 1)
                a_values[:, rows[:, None], first[:, None] % 4 * 4 + np.arange(4) + 16 * (place >> 1)] = found
            a_places = None
        else:
            a_places = places_of(threads, descriptors(threads, given[0], lanes), 64, owners)
        keeps = wide(read_scale(threads), threads.count)[lanes][::GROUP]
        read = [places for places in (a_places, b_places) if places is not None]
        codes = [shared.read(p.reshape(count, -1), warps, one).reshape(p.shape) for p in read]
        before = [shared.snapshot(places) for places in read]

        def end() -> None:
            for places, snapshot in zip(read, before, strict=True):
                shared.end_read(places, snapshot, one)
            left = values_of(codes[0], a_element) if a_places is not None else a_values
            c_values = np.zeros((count, 64, columns), np.float32)
            for place, item in enumerate(d.items):
                old = threads.registers[item.number].view(np.float32)[lanes].reshape(count, GROUP)
                c_values[:, row[:, place], column[:, place]] = np.where(keeps[:, None], old, np.float32(0))
            out = multiply_add(left, values_of(codes[-1], b_element), c_values, rule)
            for place, item in enumerate(d.items):
                values = np.zeros(threads.count, np.float32)
                values[lanes] = out[:, row[:, place], column[:, place]].reshape(-1)
                write(threads, mask, item, values)

        threads.products.append(end)
        threads.under_way |= targets
        if not threads.launch.options.late:
            threads.products.pop()()

    run.writes = targets  # type: ignore[attr-defined]
    return run
