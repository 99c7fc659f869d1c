"""Messages between ranks, and the collectives that send them, compiled too.

    what travels in training             as                                        sent by
    a weight under FSDP2                 codes and scales, or in its dtype         weights/ways.py, fsdp2.py
    a stored weight when DDP begins      codes and scales                          weights/bucket.py
    tokens under tensor parallelism      pairs; their sums in the tensor's dtype   autograd/gather_input.py
    rows that experts elsewhere compute  pairs; results in high precision          autograd/exchange.py
    gradients that are averaged          pairs                                     distributed/fp8_reduce.py
    Muon's directions                    bf16, or pairs                            optim/muon.py
    amaxes that ranks share              their maximum, float32                    maximum_over_ranks
    sums over an optimizer's weights     float32, float64                          optim/in_backward.py, resolution.py
    settings that have to be equal       a hash, 16 bytes                          check_ranks_agree
    rows of each expert, their amaxes    int32                                     autograd/exchange.py
    errors, flags and sums of ranks      objects, int64, float64                   distributed/ranks.py

``pack_message`` makes a pair a message, codes beside their scales, and ``unpack_message`` reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.errors import RanksDifferError
from octavo.granularity import ALL, Tile
from octavo.kernels.arguments import lie_by_columns
from octavo.numerics import exponents_of, powers_of, scale_inv_dtype
from octavo.private import c10d_ops


def maximum_over_ranks(values: Tensor, *groups: Any, device: torch.device | str | None = None) -> Tensor:
    """Return the maximum of each of ``values`` over the ranks of process groups: a collective each, compiled too.

    ``groups``: one, or those of each dimension of a mesh; as themselves or, in code that may be compiled, by name.
    ``device``: where the ranks send from, if ``values`` may lie elsewhere.
    """
    maxima = values if device is None else values.to(device)
    for group in groups:
        name = group if isinstance(group, str) else group.group_name
        maxima = c10d_ops.wait_tensor(c10d_ops.all_reduce(maxima, "max", name))
    return maxima.to(values.device)


def gathered_parts(part: Tensor, ranks: int, group: str) -> Tensor:
    """Return the parts of all ranks of the process group of this name, one behind the other along dimension 0."""
    return c10d_ops.wait_tensor(c10d_ops.all_gather_into_tensor(part, ranks, group))


def summed_part(addends: Tensor, ranks: int, group: str) -> Tensor:
    """Return this rank's part, along dimension 0, of the sum over the ranks of a process group, in the dtype of all."""
    return c10d_ops.wait_tensor(c10d_ops.reduce_scatter_tensor(addends, "sum", ranks, group))


def exchanged_rows(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Return the rows that the ranks of a process group send this one; ``sent`` of its own go to each of them."""
    return c10d_ops.wait_tensor(c10d_ops.all_to_all_single(rows.contiguous(), received, sent, group))


def summed(values: Tensor, group: str) -> Tensor:
    """Return the sum of each of ``values`` over the ranks of the process group of this name, in their own dtype."""
    return c10d_ops.wait_tensor(c10d_ops.all_reduce(values, "sum", group))


def scale_bytes(scale_inv: Tensor, power_of_two: bool) -> Tensor:
    """Return scales [R, S], float32 or E8M0, as ranks send them: uint8 [R, S] of powers of two, else [R, 4 S]."""
    scales = exponents_of(scale_inv) if power_of_two else scale_inv
    return scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def scales_from(raw: Tensor, power_of_two: bool, tile: Tile = (ALL, ALL)) -> Tensor:
    """Return the scales that ``scale_bytes`` took, in the dtype and with the strides of a cast by these tiles."""
    # not contiguous(): of a single row or column that is itself, with any stride and offset
    scales = powers_of(raw) if power_of_two else raw.clone(memory_format=torch.contiguous_format).view(torch.float32)
    if lie_by_columns(tile):
        scales = scales.t().contiguous().t()
    return scales.to(scale_inv_dtype(tile, power_of_two))


def pack_message(qdata: Tensor, scale_inv: Tensor, power_of_two: bool) -> Tensor:
    """Return a pair as a message, uint8: of each row its codes [R, C] and its scales."""
    return torch.cat([qdata.view(torch.uint8), scale_bytes(scale_inv, power_of_two)], 1)


def unpack_message(
    message: Tensor, columns: int, dtype: torch.dtype, power_of_two: bool, tile: Tile = (ALL, ALL)
) -> tuple[Tensor, Tensor]:
    """Return the pair that ``pack_message`` took, of so many columns and codes of this dtype."""
    return message[:, :columns].contiguous().view(dtype), scales_from(message[:, columns:], power_of_two, tile)


def sending_device(group: Any) -> torch.device:
    """Return the device of tensors that a process group sends: the CPU, if its backend sends from there."""
    import torch.distributed as dist

    if "cpu" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator()  # type: ignore[return-value]


def check_ranks_agree(settings: Mapping[str, object], groups: Iterable[Any]) -> None:
    """Raise RanksDifferError on all ranks of process groups if their settings differ; collective, 16 bytes a group.

    ``settings``: {name: value}, values that print alike if they are equal; ``groups``: one, or those of each dimension
    of a mesh, whose ranks are compared all together.
    """
    import torch.distributed as dist

    if not (groups := [group for group in groups if dist.get_world_size(group) > 1]):
        return
    settings_here = {name: str(value) for name, value in settings.items()}
    # sorted, as ranks may have put the same settings together in another order
    number = int.from_bytes(hashlib.sha256(repr(sorted(settings_here.items())).encode()).digest()[:7])
    bounds = torch.tensor([number, -number], device=sending_device(groups[0]))
    if not int(maximum_over_ranks(bounds, *groups).sum()):
        return
    every: list[tuple[int, dict[str, str]]] = [(dist.get_rank(), settings_here)]
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, every, group=group)
        every = [settings_of_rank for part in parts for settings_of_rank in part]
    (first, here), *others = sorted(every)
    other, there = next((rank, values) for rank, values in others if values != here)
    differ = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    lines = [f"{name} is {here.get(name)} on rank {first}, {there.get(name)} on rank {other}" for name in differ]
    if len(lines) > 3:
        lines[3:] = [f"and {len(lines) - 3} more"]
    raise RanksDifferError(f"ranks have different settings: {'; '.join(lines)}. Give all of them the same")
