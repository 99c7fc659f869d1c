"""A run on the ranks that torchrun starts: how they join, shard the model, and divide every batch among them."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.distributed.ranks import Ranks
from octavo.train.config import ALONE, FSDP, RanksConfig, TrainConfig, TrainError
from octavo.train.model import GPT

LAUNCH = "torchrun --nproc-per-node 2 -m octavo train"


def require_one_process(config: RanksConfig) -> None:
    """Raise TrainError unless this process is to train alone."""
    if config.shard != ALONE or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainError("compare trains in one process: start it without torchrun and --shard, or use octavo train")


@contextlib.contextmanager
def joined(config: TrainConfig) -> Iterator[Ranks]:
    """Yield the ranks of a run, joined by torchrun's environment; without `config.ranks.shard` this process alone."""
    shard, process_count = config.ranks.shard, int(os.environ.get("WORLD_SIZE", "1"))
    if shard == ALONE and process_count > 1:
        raise TrainError(f"{process_count} processes were started, but shard is none: add --shard fsdp or --shard ddp")
    if shard == ALONE:
        yield Ranks()
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise TrainError(f"shard {shard} trains on ranks that torchrun starts: {LAUNCH} --shard {shard} ...")
    on_cuda = device_name(config).startswith("cuda")
    succeeded = False
    try:
        with Ranks.as_rank_errors():
            # gloo besides NCCL, as ranks compare their options by tensors on the CPU
            backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
            timeout = timedelta(seconds=config.ranks.timeout)
            store, rank, size = _fresh_store(timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        yield Ranks(dist.group.WORLD)
        succeeded = True
    finally:
        if dist.is_initialized() and (succeeded or not on_cuda):  # NCCL would wait for the ranks that are gone
            dist.destroy_process_group()


def _fresh_store(timeout: timedelta) -> tuple[Any, int, int]:
    """Return (the store in which ranks meet, with a prefix that no earlier start has used; this rank; how many).

    torchrun's agent keeps its store through restarts, with the addresses of dead ranks (PyTorch's issues 135712 and
    167288). Rank 0 draws a prefix and writes it as the answer to each rank's question, also to questions that an
    earlier start left. Only ranks of this start read their answer and confirm it; rank 0 waits for all of them.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    token = secrets.token_hex(8)
    if rank > 0:
        store.set(f"octavo/question/{rank}", token)
        name = store.get(f"octavo/answer/{token}").decode()
        store.set(f"octavo/{name}/{rank}", "")
        return dist.PrefixStore(name, store), rank, size
    deadline = time.monotonic() + timeout.total_seconds()
    missing = {*range(1, size)}
    while missing := {other for other in missing if not store.check([f"octavo/{token}/{other}"])}:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"timeout: ranks {sorted(missing)} did not join")
        for other in missing:
            if store.check([f"octavo/question/{other}"]):
                store.set(f"octavo/answer/{store.get(f'octavo/question/{other}').decode()}", token)
        time.sleep(0.01)
    return dist.PrefixStore(token, store), rank, size


def ranks_of(config: RanksConfig) -> Ranks:
    """Return the ranks of a run: this process alone, or the default process group; raise TrainError without one."""
    if config.shard == ALONE:
        return Ranks()
    if (ranks := Ranks.of_process()).group is None:
        raise TrainError(
            f"shard {config.shard} needs a process group: {LAUNCH} --shard {config.shard} ..., or joined(config)"
        )
    return ranks


def ranks_for_saves(config: TrainConfig, ranks: Ranks) -> Ranks | None:
    """Return the ranks in a new group, to write checkpoints while they train; None if training waits for each one."""
    if not config.ranks.async_save:
        return None
    if ranks.group is None:
        return ranks
    with Ranks.as_rank_errors():
        options: Any = {"timeout": timedelta(seconds=config.ranks.timeout), "use_local_synchronization": True}
        return Ranks(dist.new_group(dist.get_process_group_ranks(ranks.group), **options))


def device_name(config: TrainConfig) -> str:
    """Return the name of this process's device; each process on a machine has a different GPU."""
    if (name := config.run.device) == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" and config.ranks.shard != ALONE else name


def require_even_batches(config: TrainConfig, ranks: Ranks) -> None:
    """Raise TrainError unless a micro-batch's sequences divide evenly among ranks (groups, if they share sequences)."""
    sharing = config.ranks.tensor_parallel
    if ranks.size % sharing:
        raise TrainError(f"{ranks.size} ranks do not divide by tensor_parallel {sharing}: start a multiple of it")
    batch, micro_batches = config.data.batch, config.data.micro_batches
    groups = ranks.size // sharing
    if batch % (groups * micro_batches):
        raise TrainError(
            f"batch {batch} does not divide into {groups} ranks x {micro_batches} micro_batches: "
            f"choose a batch of {math.ceil(batch / (groups * micro_batches)) * groups * micro_batches}"
        )


def share_of(batch: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's sequences of a batch."""
    return batch.tensor_split(ranks.size)[ranks.rank]


def _mesh_of(config: TrainConfig, ranks: Ranks, device_type: str) -> Any:
    """Return the ranks as a mesh (data) or, under tensor parallelism, (data, tensor)."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if (sharing := config.ranks.tensor_parallel) == 1:
        return DeviceMesh.from_group(ranks.group, device_type, mesh_dim_names=("data",))
    if ranks.size != dist.get_world_size():
        raise TrainError("tensor_parallel takes all ranks that were started: give no group of some of them")
    return init_device_mesh(device_type, (ranks.size // sharing, sharing), mesh_dim_names=("data", "tensor"))


def _parallelize(model: GPT, mesh: Any) -> None:
    """Share each product, or the experts, among the ranks of a mesh, and between products each sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from octavo.distributed import ColwiseParallel, RowwiseParallel, SequenceParallel, expert_parallel

    first, second = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attention.qkv.norm": SequenceParallel(),
        "blocks.*.attention.qkv.linear": first,
        "blocks.*.attention.out": second,
        "blocks.*.mlp.norm": SequenceParallel(use_local_output=bool(model.mixtures)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    if model.mixtures:
        plan["blocks.*.mlp.router"] = SequenceParallel(sequence_dim=0, use_local_output=True)  # of [T, W]
    else:
        plan |= {"blocks.*.mlp.fc1": first, "blocks.*.mlp.fc2": second}
    parallelize_module(model, mesh, plan)
    if model.mixtures:
        expert_parallel(model, mesh, average=False)


def shard(model: GPT, config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, Ranks]:
    """Shard the model over the ranks, or replicate it, and compile it if the run's options say so.

    Returns the module to call, which is the model or contains it; and the ranks that share a batch: under tensor
    parallelism, one of each group of ranks that share sequences.
    """
    if config.ranks.shard == FSDP:
        from torch.distributed.fsdp import fully_shard

        mesh = _mesh_of(config, ranks, model.head.weight.device.type)
        if mesh.ndim == 2:
            _parallelize(model, mesh["tensor"])
            mesh = mesh["data"]
        for block in model.blocks:
            if config.run.compile:
                # before fully_shard adds hooks, which stay out of the graph; experts on several ranks would break it
                compiled: Any = block.attention if model.mixtures and mesh.size() < ranks.size else block
                compiled.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, Ranks(mesh.get_group())
    compiled_model: Any = torch.compile(model) if config.run.compile else model
    if config.ranks.shard == ALONE:
        return compiled_model, ranks
    return nn.parallel.DistributedDataParallel(compiled_model, process_group=ranks.group), ranks


def syncing(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Return a context for the forward and backward of a micro-batch: gradients are sent only after the last one."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) and not is_last else nullcontext()
