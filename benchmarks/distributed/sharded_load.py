"""Memory of each rank while a model that is sharded over four of them is initialised or loaded.

A model of so many parameters is made on the meta device, converted and sharded by FSDP2, a block a group; then it gets
values, by reset_parameters, from rank 0 (torch's broadcast_from_rank0, of bf16) or from files of bf16 or FP8
(octavo.export.load_fp8). Four processes of this machine, joined by gloo.

Bytes are of a process beyond those before the shards had any, sampled by psutil each millisecond: "peak" is what is its
own (RSS without mapped files and shared memory), "peak_rss" is all. "shard" is what the rank holds in the end, weights
that an optimizer will train with the 8 bits beside their codes; "block" is one block's matrices in bf16.
``beyond_blocks`` is how many of these the peak is above the shard, on the rank where it is highest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import Row, listed
from benchmarks.distributed.communication_ranks import on_ranks
from octavo import recipes
from octavo.weights.fsdp2 import on_this_rank
from octavo.weights.stored import local_stored

TAKES = "15 minutes"
MEASURES = ("octavo/export/loading.py", "octavo/weights/stored.py", "octavo/weights/files.py")

RANKS = 4
STORAGES = {
    "bf16": (recipes.dynamic, None),
    "one scale": (recipes.dynamic, "fp8"),
    "blocks": (recipes.blockwise, "fp8"),
}
CELLS = [
    ("one scale", "reset_parameters"),
    ("one scale", "broadcast"),
    ("one scale", "fp8 files"),
    ("one scale", "bf16 files"),
    ("bf16", "broadcast"),
    ("bf16", "bf16 files"),
    ("blocks", "bf16 files"),
]


class Block(nn.Module):
    """Matrices of a transformer's block: four of attention, three of its feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, rows, columns in shapes(width):
            self.add_module(name, nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))


def shapes(width: int) -> list[tuple[str, int, int]]:
    """Return (name, rows, columns) of a block's matrices."""
    wide = [("gate", 4 * width, width), ("up", 4 * width, width), ("down", width, 4 * width)]
    return [(name, width, width) for name in ("query", "key", "value", "out")] + wide


def write(folder: Path, blocks: int, width: int, in_fp8: bool) -> None:
    """Write a checkpoint, a file for each block, of which one is in memory at a time."""
    from safetensors.torch import save_file

    folder.mkdir()
    files = {}
    for block in range(blocks):
        state = {}
        for name, rows, columns in shapes(width):
            key, values = f"{block}.{name}.weight", torch.randn(rows, columns) / 64
            if in_fp8:
                pair = octavo.quantize(values, octavo.E4M3, octavo.PerTensor(), power_of_two=True)
                state |= {key: pair.qdata, f"{key}_scale_inv": pair.scale_inv}
            else:
                state[key] = values.bfloat16()
        files |= dict.fromkeys(state, f"{block}.safetensors")
        save_file(state, folder / f"{block}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}} if in_fp8 else {}))


class Peak:
    """The peak memory of a process, sampled by a thread: [RSS without shared memory, RSS]."""

    def __enter__(self) -> Peak:
        import psutil

        self._process, self._ended = psutil.Process(), threading.Event()
        self._before, self.bytes = self._now(), [0, 0]
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _now(self) -> list[int]:
        memory = self._process.memory_info()
        return [memory.rss - memory.shared, memory.rss]

    def _sample(self) -> None:
        while not self._ended.wait(0.001):
            above = [now - before for now, before in zip(self._now(), self._before, strict=True)]
            self.bytes = [max(pair) for pair in zip(self.bytes, above, strict=True)]

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()


def load(mesh: Any, storage: str, way: str, folder: str, blocks: int, width: int) -> tuple[list[int], int, float]:
    """Return (peaks, bytes of the shards, seconds) of this rank."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    recipe, weight_storage = STORAGES[storage]
    with torch.device("meta"):
        model = nn.Sequential(*[Block(width) for _ in range(blocks)])
    octavo.convert(model, recipe(), lambda module, name: True, weight_storage)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = {}
    if way == "broadcast" and dist.get_rank() == 0:  # mapped
        state = {key: one for file in Path(folder).glob("*.safetensors") for key, one in load_file(file).items()}
    dist.barrier()
    start = time.perf_counter()
    with Peak() as peak:
        if way == "reset_parameters":
            for module in model.to_empty(device="cpu").modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
        elif way == "broadcast":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model.to_empty(device="cpu"), state, options=options)
        else:
            octavo.export.load_fp8(model, folder)
    held = 0
    for parameter in model.parameters():
        stored = local_stored(parameter)
        parts = [on_this_rank(parameter)] if stored is None else [stored.qdata, stored.scale_inv, stored.extra_bits]
        held += sum(part.nbytes for part in parts if part is not None)
    return peak.bytes, held, time.perf_counter() - start


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sharded_load", description=__doc__)
    parser.add_argument("--parameters", type=float, default=1e9, help="of the model, about (default: 1e9)")
    parser.add_argument("--width", type=int, default=2048, help="features; a multiple of 512 (default: 2048)")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--toy", action="store_true", help="that all of it runs: a small model, nothing written")
    options = parser.parse_args(arguments)
    if options.toy:
        options.parameters, options.width, options.no_write = 1, 512, True
    of_block = sum(rows * columns for _, rows, columns in shapes(options.width))
    blocks = max(1, round(options.parameters / of_block))
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as parent:
        for in_fp8 in (False, True):
            write(Path(parent) / ("fp8 files" if in_fp8 else "bf16 files"), blocks, options.width, in_fp8)
        for storage, way in CELLS:
            folder = f"{parent}/{'fp8 files' if way == 'fp8 files' else 'bf16 files'}"
            loads = on_ranks(load, RANKS, storage, way, folder, blocks, options.width)
            peaks, rss = (max(loads, key=lambda one: one[0][which])[0][which] for which in (0, 1))
            held = max(shard for _, shard, _ in loads)
            rows.append(
                {"parameters": blocks * of_block, "ranks": RANKS, "storage": storage, "way": way}
                | {
                    "shard_mb": f"{held / 1e6:.1f}",
                    "block_mb": f"{2 * of_block / 1e6:.1f}",
                    "peak_mb": f"{peaks / 1e6:.1f}",
                }
                | {"peak_rss_mb": f"{rss / 1e6:.1f}", "beyond_blocks": f"{(peaks - held) / (2 * of_block):.2f}"}
                | {"seconds": f"{max(seconds for *_, seconds in loads):.1f}"}
            )
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if not options.no_write:
                written = write_results("sharded_load", rows)
    print(table(rows))
    if not options.no_write:
        print(f"written to {written}")
    return 0


def load_table() -> str:
    """Return the table of docs/many-gpus.md: MB of a rank."""
    ways = {"reset_parameters": "`reset_parameters`", "broadcast": "rank 0, bf16", "fp8 files": "files in FP8"}
    cells: dict[str, Callable[[Row], str]] = {
        "weights": lambda row: row["storage"] if row["storage"] == "bf16" else f"FP8, {row['storage']}",
        "where values come from": lambda row: ways.get(row["way"], "files in bf16"),
        "shard": lambda row: f"{float(row['shard_mb']):.0f}",
        "peak": lambda row: f"{float(row['peak_mb']):.0f}",
        "in blocks beyond the shard": lambda row: row["beyond_blocks"],
    }
    return listed("sharded_load", cells)


TABLES = {"loading": load_table}
