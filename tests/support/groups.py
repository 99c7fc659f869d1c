"""Rows in groups: sizes as a router might make them, and where each group lies."""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

# no row at all; no group with one; one group; all awkward sizes and rows in no group (the last number)
SIZES = [([0], 0), ([0, 0, 0], 5), ([17], 0), ([0, 1, 17, 0, 40, 130, 0], 3), ([1] * 3 + [0] * 17, 0)]


def random_sizes(seed: int) -> tuple[list[int], int]:
    """Return sizes of groups, every fourth seed of 128, and how many rows are in none; often fewer rows than groups."""
    rng = random.Random(seed)
    count = 128 if seed % 4 == 0 else rng.choice([1, 3, 8])
    largest = rng.choice([0, 1, 2, 17, 70])
    return [rng.choice([0, 1, rng.randint(0, largest)]) for _ in range(count)], rng.choice([0, 0, 1, 50])


def offsets_of(sizes: Sequence[int]) -> Tensor:
    """Return the groups' ends."""
    return torch.tensor([*accumulate(sizes)], dtype=torch.int32)


def slices_of(sizes: Sequence[int], multiple: int = 1) -> list[slice]:
    """Return each group's slice, if it begins where the previous one ends, rounded up to a multiple."""
    starts = accumulate((-(-size // multiple) * multiple for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def scale_slices(sizes: Sequence[int], tile_rows: int) -> list[slice]:
    """Return the rows of scale_inv of each group."""
    counts = [1 if tile_rows == -1 else -(-size // tile_rows) for size in sizes]
    return [slice(*both) for both in pairwise(accumulate(counts, initial=0))]


def parts(tensor: Any, slices: Sequence[slice]) -> list[Any]:
    """Return a tensor's rows by group; anything else once for each group."""
    return [tensor[rows] if isinstance(tensor, Tensor) else tensor for rows in slices]
