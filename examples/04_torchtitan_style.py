"""Pre-training as torchtitan does it: meta device, convert, compile, shard, checkpoint; then a resume, bit for bit.

Run alone it starts two processes on this machine, as `torchrun --nproc-per-node 2` does.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import octavo
from octavo.distributed.checkpoint import load_checkpoint, save_checkpoint

WIDTH, HEADS, LAYERS, WORDS, STEPS = 64, 4, 2, 256, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.wqkv(self.attention_norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):  # no memory yet
        blocks = [Block() for _ in range(LAYERS)]
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    octavo.convert(model, octavo.recipes.delayed(), select=lambda module, name: ".w" in name)  # not the output head
    mesh, policy = init_device_mesh(DEVICE, (dist.get_world_size(),)), MixedPrecisionPolicy(torch.bfloat16)
    for block in blocks:
        block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=DEVICE)  # each rank has its shard
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def main() -> None:
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    losses: dict[int, float] = {}
    for first in (0, STEPS // 2):  # a new process would begin with each
        model, optimizer = build()
        step = first and load_checkpoint("checkpoint", model, optimizer)["step"]
        while step < STEPS:
            tokens = (torch.arange(33) + 37 * (torch.arange(4)[:, None] + step)).to(DEVICE) % WORDS
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert losses.setdefault(step, loss.item()) == loss.item(), f"step {step} differs after the resume"
            step += 1
            if first == 0 and step == STEPS // 2:
                save_checkpoint("checkpoint", model, optimizer, {"step": step})
    if dist.get_rank() == 0:
        print(octavo.summary(model), *(f"step {step}: loss {loss:.3f}" for step, loss in losses.items()), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main() if "RANK" in os.environ else torch.distributed.run.main(["--standalone", "--nproc-per-node=2", __file__])
