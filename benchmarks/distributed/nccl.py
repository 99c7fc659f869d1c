"""FSDP2 over NCCL with two ranks: an FP8 gather and a checkpoint beside one rank. On one GPU where NCCL takes it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

TAKES = "a GPU; 1 minute"
MEASURES = (
    "octavo/weights/gathered.py",
    "octavo/weights/ways.py",
    "octavo/weights/shard_cast.py",
    "octavo/weights/fsdp2.py",
)
_REFUSAL = "Duplicate GPU detected"


def rank_main(folder: Path) -> None:
    """Train a sharded model for three steps, on each rank; rank 0 writes the losses to a file."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import octavo

    rank, count = int(os.environ["RANK"]), torch.cuda.device_count()
    if count:
        torch.cuda.set_device(rank % count)
    dist.init_process_group("nccl" if count else "gloo")
    device = torch.device("cuda" if count else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).to(device, torch.bfloat16)
    octavo.convert(model, octavo.recipes.delayed())
    if int(os.environ["WORLD_SIZE"]) > 1:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 512, device=device, dtype=torch.bfloat16)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    if rank == 0:
        (folder / f"{os.environ['WORLD_SIZE']}.txt").write_text(" ".join(map(str, losses)))
        print(octavo.summary(model), flush=True)
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks nccl", description=__doc__)
    parser.add_argument("--rank-main", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_main:
        rank_main(options.rank_main)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [*launcher, "-m", "benchmarks", "nccl", "--rank-main", folder]
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
            if _REFUSAL in run.stdout + run.stderr:
                print("two ranks on one GPU: refused by NCCL; this needs two GPUs")
                return 0
            if run.returncode:
                print(run.stdout[-2000:] + run.stderr[-3000:])
                return 1
            print(run.stdout)
        one, two = ([*map(float, (Path(folder) / f"{n}.txt").read_text().split())] for n in (1, 2))
    print(f"losses of one rank {one}, of two {two}")
    return int(not all(abs(a - b) <= 1e-2 * abs(a) for a, b in zip(one, two, strict=True)))
