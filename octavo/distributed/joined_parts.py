"""Layers parted by their splits (nn/linear.py) have one weight in a checkpoint, as on any other layout of ranks.

In a checkpoint ``<layer>.weight`` is what it is where the layer isn't parted: all splits' rows, one after the other.
Each part's rows are pieces of it, written and read where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.linear import PartedLinear
from octavo.nn.weight_files import SCALE_INV
from octavo.private import LocalShardsWrapper, set_local_tensor
from octavo.tensor.fsdp2 import like_sharded, on_this_rank

Names = dict[str, list[str]]  # of tensors in a checkpoint: those of their parts here, in order


def parts_of(model: nn.Module) -> Names:
    """The names that a model's parted layers have in a checkpoint, whether or not they have such a tensor."""
    found: Names = {}
    for at, layer in model.named_modules():
        if isinstance(layer, PartedLinear):
            for name in ("weight", "bias", f"weight{SCALE_INV}"):
                own = [f"{at}.{split}.{name}".lstrip(".") for split in layer.splits or ()]
                found[f"{at}.{name}".lstrip(".")] = own
    return found


def by_file(names: Iterable[str], parted: Names) -> Names:
    """Names of a model's or its optimizer's tensors, by those in a checkpoint; parts are joined if all are there."""
    found = {name: [name] for name in names}
    for whole, parts in parted.items():
        if found.keys() >= set(parts):
            found = {name: own for name, own in found.items() if name not in parts} | {whole: parts}
    return found


def is_common(value: Any) -> bool:
    """Whether it is one for all parts, which are sharded: a number, such as a count of steps, or a scale."""
    return not hasattr(value, "placements")


def joined(parts: Sequence[Any]) -> Any:
    """DTensors [n, ...] as one that DCP writes and reads, with their rows where they lie; of what is common the first.

    Of DTensor's operations it has those that copy it.
    """
    if len(parts) == 1 or is_common(parts[0]):
        return parts[0]
    shards, offsets, rows = list[Tensor](), list[tuple[int, ...]](), 0
    for part in parts:
        if (shard := on_this_rank(part)).numel():
            first, *others = part.__create_chunk_list__()[0].offsets
            shards.append(shard)
            offsets.append((rows + first, *others))
        rows += part.shape[0]
    whole = like_sharded(on_this_rank(parts[0]), parts[0], torch.Size((rows, *parts[0].shape[1:])))
    set_local_tensor(whole, LocalShardsWrapper(shards, offsets))
    return whole
