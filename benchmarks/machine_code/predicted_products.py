"""Rates that the Triton products should reach, by their machine code and their tiles, without a GPU.

Each product is compiled as at that shape. A step of its loop is counted in clocks of a multiprocessor, by resource:

    tensor cores    the step's FLOP
    shared memory   bytes that the tensor cores read, and those that arrive; Hopper's read both operands of each
                    [64, N] product of four warps, Blackwell's of each [128, N]
    issue           the loop's instructions, a warp's in a clock on each of four schedulers
    L2              bytes of codes that arrive, each program its own
    memory          the same, but once for all programs that run at a time, eight tiles high

``tflops`` is what the slowest of them, which limits, allows if all of them overlap, and ``serial_tflops`` if
instructions wait for the step's product and the next product for them, as in a multiprocessor that holds one program
whose warps all keep step: what is measured should lie between. Programs run in whole waves. Where a multiprocessor
holds one only, nothing covers its first loads and its result's store. Clocks are those of the published dense peaks; a
GPU that is hot runs slower, by the same share for all but memory. L2 is what was measured of an H100, 6.65e12 bytes/s
(openxla/xla, gpu_dot_fusion_cost_model.cc), by clock and multiprocessor; B200's is assumed to be the same, for want of
a measurement.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from typing import NamedTuple

import torch
import triton

from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.roofline import product_flop
from benchmarks.machine_code.compiled_cases import E4M3, MX, ROW, SQUARE, TENSOR, VECTOR, scales, tensor, terms_scales
from benchmarks.machine_code.machine_code import instructions, loops, resources
from benchmarks.machine_code.offline import SHARED_MEMORY, offline
from benchmarks.machine_code.predictions import DEVICES
from octavo.granularity import Tile, scale_shape
from octavo.kernels.arguments import GroupedOperands, OperandPair, ProductArguments
from octavo.kernels.groups import padded_columns
from octavo.kernels.triton.grouped_matmul import grouped_config, triton_grouped_matmul
from octavo.kernels.triton.launch import Config
from octavo.kernels.triton.matmul import product_config, tiling_of, triton_matmul

TAKES = "20 seconds"
MEASURES = ("octavo/kernels/triton/matmul.py", "octavo/kernels/triton/configs.json")

TILES = {
    "tensor . tensor": (TENSOR, TENSOR),
    "rows . rows": (ROW, ROW),
    "1x128 . 128x128": (VECTOR, SQUARE),
    "1x128 . 1x128": (VECTOR, VECTOR),
    "1x32 . 1x32": (MX, MX),
    "rows . rows, rows in groups": (ROW, ROW),
    "rows . rows, terms in groups": (ROW, ROW),
    "1x128 . 128x128, rows in groups": (VECTOR, SQUARE),
    "1x128 . 1x128, terms in groups": (VECTOR, VECTOR),
}
GROUPS = 8  # of equal sizes, whole tiles
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
AIM = 1000.0  # TFLOP/s of 1x128 . 128x128 on an H200
SHARED_BANDWIDTH = 128  # bytes a clock and multiprocessor
TENSOR_MEMORY = 512  # columns of a multiprocessor


class Peak(NamedTuple):
    """A GPU's multiprocessor, by the clock."""

    flop: float  # dense FP8
    clock: float  # Hz, that of the published peak
    rows: int  # of one product of the tensor cores
    l2: float = 6.65e12 / 132 / 1.83e9  # bytes
    l2_bytes: float = 50e6  # what the cache holds


PEAKS = {90: Peak(8192, 1.83e9, 64), 100: Peak(16384, 1.85e9, 128, l2_bytes=126e6)}


def operand(rows: int, columns: int, tile: Tile) -> OperandPair:
    """Return a pair in place of codes that nothing reads."""
    codes = tensor((rows, columns), E4M3)
    return OperandPair(codes, scales(scale_shape(codes.shape, tile), tile), tile)


class Work(NamedTuple):
    """The work of a product's programs, all of one tile and with the same number of steps."""

    config: Config
    programs: int
    terms: int  # of a program's sums
    step: int  # of them
    read: int  # bytes of codes, once each


def launched(name: str, shape: tuple[int, int, int]) -> Work:
    """Launch a product at a shape: M, N and K of all groups together."""
    (M, N, K), (a_tile, b_tile) = shape, TILES[name]
    _, _, form = name.partition(", ")
    a, b = operand(M, K, a_tile), operand(N, K, b_tile)
    groups = GROUPS if form else 1
    offsets = torch.empty(groups, dtype=torch.int32)
    if form == "rows in groups":
        codes = tensor((groups, N, K), E4M3)
        b = OperandPair(codes, scales(scale_shape(codes.shape, b_tile), b_tile), b_tile)
        triton_grouped_matmul(GroupedOperands(a, b, offsets, None), torch.bfloat16, False)
        config, parts, terms, read = grouped_config(a, b, (M, N), groups), 1, K, (M + groups * N) * K
    elif form:
        columns = padded_columns(K, groups, 16)
        a, b = (
            OperandPair(
                tensor((rows, columns), E4M3),
                terms_scales((K, rows), groups, tile),
                tile,
            )
            for rows, tile in ((M, a_tile), (N, b_tile))
        )
        triton_grouped_matmul(GroupedOperands(a, b, offsets, None, 16), torch.bfloat16, False)
        config, parts, terms, read = grouped_config(a, b, (M, N)), groups, K // groups, (M + N) * K
    else:
        operands = ProductArguments(a, b, None)
        triton_matmul(operands, torch.bfloat16, False)
        config, parts, terms, read = product_config(a, b, (M, N)), 1, K, (M + N) * K
    step = tiling_of(a, b, False, config, terms).tile_k
    return Work(config, parts * -(-M // config.tile_r) * -(-N // config.tile_c), terms, step, read)


def row_of(name: str, shape: tuple[int, int, int], capability: int) -> dict[str, object]:
    """Return the row of a product at a shape."""
    device, peak = DEVICES[capability], PEAKS[capability]
    with offline(capability) as launches:
        config, programs, terms, step, codes = launched(name, shape)
    ((kernel, *_),) = launches
    tile_m, tile_n = config.tile_r, config.tile_c
    loop = next(loop for loop in loops(kernel) if any(re.match("QGMMA|UTCQMMA", i.name) for i in loop))
    counts, used = Counter(i.name.partition(".")[0] for i in loop), resources(kernel)

    multiplied = tile_n // (2 if config.num_warps > 8 else 1)  # columns of one product
    read = max(1, tile_m // peak.rows) * (tile_n // multiplied) * (peak.rows + multiplied) * step
    arriving = (tile_m + tile_n) * step
    registers = -(-used["REG"] // 8) * 8
    held = min(
        65536 // (registers * 32 * config.num_warps),
        SHARED_MEMORY[capability] // (kernel.metadata.shared + 1024),
        TENSOR_MEMORY // max(1, kernel.metadata.tmem_size),
    )
    at_a_time = min(programs, held * device.multiprocessors)
    high = min(8, -(-shape[0] // tile_m))
    of_a_time = (high * tile_m + at_a_time / high * tile_n) * terms / at_a_time
    shared_by_all = codes / programs if codes <= peak.l2_bytes else of_a_time
    clocks = {
        "tensor cores": product_flop(tile_m, tile_n, step) / peak.flop,
        "shared memory": (read + arriving) / SHARED_BANDWIDTH,
        "issue": config.num_warps * len(loop) / 4,
        "L2": arriving / peak.l2,
        "memory": shared_by_all / terms * step / (device.bandwidth / device.multiprocessors / peak.clock),
    }
    limiter = max(clocks, key=lambda resource: clocks[resource])
    serial = max(clocks["tensor cores"], clocks["shared memory"]) + clocks["issue"] / held
    ends = device.latency * peak.clock + tile_m * tile_n * 2 / peak.l2 if held == 1 else 0.0
    waves = math.ceil(programs / device.multiprocessors)

    def tflops(clocks_a_step: float) -> float:
        seconds = waves * (-(-terms // step) * clocks_a_step + ends) / peak.clock + device.launch
        return product_flop(*shape) / seconds / 1e12

    return {
        "product": name,
        "shape": "x".join(map(str, shape)),
        "device": device.name,
        "tflops": f"{tflops(clocks[limiter]):.0f}",
        "limiter": limiter,
        "serial_tflops": f"{tflops(max(serial, clocks[limiter])):.0f}",
        **{resource.replace(" ", "_"): f"{value:.0f}" for resource, value in clocks.items()},
        "tile": f"{tile_m}x{tile_n}x{step}",
        "warps": config.num_warps,
        "stages": config.depth,
        "registers": used["REG"],
        "spills": sum(i.name.startswith(("STL", "LDL")) for i in instructions(kernel)),
        "shared_bytes": kernel.metadata.shared,
        "loop": len(loop),
        "multiplies": counts["QGMMA"] + counts["UTCQMMA"],
        "adds": " ".join(
            f"{kind}:{counts[kind]}" for kind in ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2") if counts[kind]
        ),
        "copies": " ".join(f"{kind}:{counts[kind]}" for kind in ("LDGSTS", "UTMALDG") if counts[kind]),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks predicted_products", description=__doc__)
    parser.add_argument("--only", default="", help="products whose name holds this")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    names = [name for name in TILES if options.only in name]
    rows = [row_of(name, shape, capability) for capability in DEVICES for name in names for shape in SHAPES]
    print(table(rows))
    if not options.no_write and not options.only:
        origin = {"triton": triton.__version__, "commit": commit()}
        print(f"written to {write_results('predicted_products', rows, origin=origin)}")
    missed = [
        row
        for row in rows
        if row["product"] == "1x128 . 128x128" and row["device"] == "H200" and float(str(row["tflops"])) < AIM
    ]
    for row in missed:
        print(f"MISSED: {row['product']} {row['shape']}: {row['tflops']} TFLOP/s, aim {AIM:.0f}: {row['limiter']}")
    return int(bool(missed))
