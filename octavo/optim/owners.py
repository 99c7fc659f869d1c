"""Matrices whose rows several ranks share: each comes together on one rank, its owner, and goes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.private import c10d_ops
from octavo.tensor.fsdp2 import rows_of_rank


def owners_of(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """The rank that has each matrix [R, C]: the work, R C min(R, C), is spread evenly, alike on all ranks."""
    work = [shape.numel() * min(shape) for shape in shapes]
    owners, loads = [0] * len(shapes), [0] * ranks
    for number in sorted(range(len(shapes)), key=lambda number: -work[number]):
        owners[number] = owner = loads.index(min(loads))
        loads[owner] += work[number]
    return owners


def by_owners(
    parts: Sequence[Tensor], shapes: Sequence[torch.Size], group: Any, functions: Sequence[Callable[[Tensor], Tensor]]
) -> list[Tensor]:
    """This rank's rows of what each matrix's function makes of it, which is called on the matrix's owner alone.

    Args:
        parts: this rank's rows [r, C] of each matrix, all of one dtype and device, divided as FSDP2 divides them.
        shapes: of the whole matrices [R, C]; all ranks call with the same.
        group: the process group of the ranks that share them, in the order of the rows.
        functions: one a matrix [R, C], each of which returns a matrix of the same shape and dtype.
    """
    ranks, own = group.size(), group.rank()
    owners = owners_of(shapes, ranks)
    owned = [[number for number, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
    ordered = list(itertools.chain.from_iterable(owned))
    rows: dict[int, list[int]] = {}  # of each rank, of the matrices that are this one's
    for number in owned[own]:
        each = (rows_of_rank(shapes[number][0], ranks, rank) for rank in range(ranks))
        rows[number] = [some.stop - some.start for some in each]
    whole_sizes = [[rows[number][rank] * shapes[number][1] for number in owned[own]] for rank in range(ranks)]
    sent = [sum(parts[number].numel() for number in some) for some in owned]
    received = [sum(some) for some in whole_sizes]
    arrived = _exchanged((parts[number] for number in ordered), parts[0], sent, received, group)
    pieces = [part.split(each) for part, each in zip(arrived.split(received), whole_sizes, strict=True)]
    made = [
        functions[number](torch.cat(those).view(shapes[number])).split(rows[number])
        for number, those in zip(owned[own], zip(*pieces, strict=True), strict=True)
    ]
    back = (matrix[rank] for rank in range(ranks) for matrix in made)
    returned = _exchanged(back, parts[0], received, sent, group).split([parts[number].numel() for number in ordered])
    found = dict(zip(ordered, returned, strict=True))
    return [found[number].view(part.shape) for number, part in enumerate(parts)]


def _exchanged(tensors: Iterable[Tensor], like: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])
    return c10d_ops.wait_tensor(c10d_ops.all_to_all_single(flat, received, sent, group.group_name))
