"""Train a pipeline of two stages, each sharded over two processes (torch's pipelining over FSDP2), in FP8.

Run alone it starts four processes on this machine; `torchrun --nproc-per-node 4` starts them itself.
"""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import octavo

WIDTH, MICRO_BATCHES = 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train() -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("pipeline", "fsdp"))
    place, shard = mesh["pipeline"].get_local_rank(), mesh["fsdp"].get_local_rank()

    torch.manual_seed(place)
    stage = nn.Sequential(Block(), Block()).to(device)
    octavo.convert(stage, octavo.recipes.delayed())  # this rank's stage, before fully_shard
    for block in stage:
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(stage, mesh=mesh["fsdp"])
    schedule = Schedule1F1B(
        PipelineStage(stage, place, 2, device, group=mesh["pipeline"].get_group()),
        n_microbatches=MICRO_BATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = octavo.optim.AdamW(stage.parameters(), lr=1e-3)  # of this stage's weights

    for step in range(10):
        generator = torch.Generator().manual_seed(step * 2 + shard)  # stages of one shard see one batch
        x = torch.randn(64, WIDTH, generator=generator).to(device)
        losses: list[torch.Tensor] = []
        if place == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.roll(1, dims=-1), losses=losses)
            print(f"step {step}, shard {shard}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def start(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(start, (port,), nprocs=4)
