"""A small model whose weights live in FP8, on several ranks: sharded by FSDP2, beside the same one whole."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.distributed import checkpoint
from octavo.optim import AdamW
from octavo.weights.fsdp2 import like_sharded, on_this_rank
from octavo.weights.stored import StoredWeight, local_stored

RECIPES = {"dynamic": octavo.recipes.dynamic, "delayed": octavo.recipes.delayed, "blockwise": octavo.recipes.blockwise}
UNEVEN, BLOCKS = (140, 37, 5, 1), (140, 512, 256, 256)  # rows of 2 ranks; of 3 the last layers leave ranks without any
SIZES = {"dynamic": UNEVEN, "delayed": UNEVEN, "blockwise": BLOCKS}


def model(recipe: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(k, n, bias=False) for k, n in itertools.pairwise(SIZES[recipe])]
    for layer in layers:
        layer.weight.data[0] *= 20  # the first rank's amax is the whole one's, by far
    net = nn.Sequential(layers[0], nn.Tanh(), *layers[1:]).to(dtype)
    return octavo.convert(net, RECIPES[recipe](), lambda module, name: True, "fp8")


def on_meta(recipe: str) -> nn.Module:
    with torch.device("meta"):
        return model(recipe)


def shard(net: nn.Module, mesh: Any, **options: Any) -> Any:
    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def sharded(recipe: str, mesh: Any, seed: int = 0, **options: Any) -> Any:
    return shard(model(recipe, seed), mesh, **options)


def adamw(net: nn.Module, master: str | None = "auto", moments: Any = "fp8") -> AdamW:
    return AdamW(net.parameters(), lr=0.05, moments=moments, master=master, weight_decay=0.1)


def gradients(net: nn.Module, step: int) -> None:
    """Set gradients that do not depend on the weights, so that a rank's are a part of the whole one's."""
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = like(torch.randn(p.shape, generator=generator).to(p.dtype), p)


def like(whole: Tensor, p: Tensor) -> Tensor:
    """Return a whole tensor, sharded if the parameter is."""
    if not isinstance(p, DTensor):
        return whole
    return like_sharded(rows_of(whole, p.device_mesh).clone(), p, whole.shape)


def whole_stored(part: StoredWeight, parameter: Any) -> StoredWeight:
    """Return the weight of all ranks of which this one has a part."""
    codes = like_sharded(part.qdata.detach().view(torch.uint8), parameter, parameter.shape).full_tensor()
    scales = part.scale_inv.detach().clone()
    if scales.numel() > 1:  # of blocks
        shape = torch.Size(part.granularity.of_matrices(parameter.shape).scale_shape(parameter.shape))
        scales = like_sharded(scales.float(), parameter, shape).full_tensor()  # gloo has no E8M0
    return StoredWeight(codes.view(part.qdata.dtype), scales, part.dtype, part.granularity)


def rows_of(whole: Tensor, mesh: Any) -> Tensor:
    """Return this rank's rows."""
    dim = mesh.ndim - 1
    parts = [*whole.chunk(mesh.size(dim)), *[whole[:0]] * mesh.size(dim)]
    return parts[mesh.get_local_rank(dim)]


def steps(net: nn.Module, optimizer: AdamW, first: int, last: int) -> None:
    for step in range(first, last):
        gradients(net, step)
        optimizer.step()


def held(net: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return all tensors that training depends on, of this rank's part."""
    optimizer.state_dict()  # waits for what ranks agree on
    tensors: dict[str, Tensor] = {}
    for name, p in net.named_parameters():
        part = local_stored(p)
        if part is None:
            tensors[name] = on_this_rank(p).detach()
        else:
            tensors |= {f"{name} codes": part.qdata.view(torch.uint8), f"{name} scale_inv": part.scale_inv}
        for key, value in optimizer.state[p].items():
            tensors[f"{name} {key}"] = on_this_rank(value)
    return {name: value.clone() for name, value in tensors.items()}


def differences(actual: dict[str, Tensor], whole: dict[str, Tensor], mesh: Any) -> list[str]:
    """Return the names of tensors that are not the whole ones' part."""
    assert actual.keys() == whole.keys(), actual.keys() ^ whole.keys()
    return [name for name, value in actual.items() if not torch.equal(value, _part(whole[name], value, mesh))]


def _part(whole: Tensor, like: Tensor, mesh: Any) -> Tensor:
    return whole if whole.ndim == 0 or whole.shape == like.shape == (1, 1) else rows_of(whole, mesh)


def batch(step: int, rank: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(16, UNEVEN[0], generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def average(net: nn.Module, mesh: Any) -> None:
    """Average gradients of a replicated model as FSDP2 does: summed where a rank's shard is, then over replicas."""
    group, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    for p in net.parameters():
        if p.grad is not None:
            rows, padded = -(-len(p) // ranks), p.grad
            if rows * ranks > len(p):
                padded = torch.cat((p.grad, p.grad.new_zeros(rows * ranks - len(p), *p.shape[1:])))
            part = padded.new_empty(rows, *p.shape[1:])
            dist.reduce_scatter_tensor(part, padded.contiguous(), group=group)
            if mesh.ndim == 2:
                dist.all_reduce(part, group=mesh.get_group(0))
            whole = torch.empty_like(padded, memory_format=torch.contiguous_format)
            dist.all_gather_into_tensor(whole, part, group=group)
            p.grad = whole[: len(p)] / mesh.size()


@contextlib.contextmanager
def save_later(*arguments: Any, **options: Any) -> Iterator[None]:
    """Begin a background save, which writes nothing until the block has ended, and then wait for it."""
    go, write = threading.Event(), checkpoint._write
    with mock.patch.object(checkpoint, "_write", lambda *args: go.wait(60) and write(*args)):
        saving = checkpoint.async_save_checkpoint(*arguments, **options)
        yield
        go.set()
        saving.result(60)
