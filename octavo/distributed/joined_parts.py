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
from octavo.private import LocalShardsWrapper, set_local_tensor
from octavo.weights.files import SCALE_INV
from octavo.weights.fsdp2 import like_sharded, on_this_rank

Names = dict[str, list[str]]  # of tensors in a checkpoint: those of their parts here, in order


def parts_of(model: nn.Module) -> Names:
    """Return the names that a model's parted layers have in a checkpoint, whether or not they have such a tensor."""
    names: Names = {}
    for at, layer in model.named_modules():
        if isinstance(layer, PartedLinear):
            for name in ("weight", "bias", f"weight{SCALE_INV}"):
                names_here = [f"{at}.{split}.{name}".lstrip(".") for split in layer.splits or ()]
                names[f"{at}.{name}".lstrip(".")] = names_here
    return names


def by_file(names: Iterable[str], parted: Names) -> Names:
    """Return names of a model's or its optimizer's tensors, by those in a checkpoint; parts join if all are there."""
    grouped = {name: [name] for name in names}
    for whole, parts in parted.items():
        if grouped.keys() >= set(parts):
            grouped = {name: here for name, here in grouped.items() if name not in parts} | {whole: parts}
    return grouped


def is_common(value: Any) -> bool:
    """Whether a value is one for all splits (a step count, a scale), not rows of each split."""
    return not hasattr(value, "placements")


def joined(parts: Sequence[Any]) -> Any:
    """Join DTensors [n, ...] to one that DCP writes and reads where the rows lie; of a common value return the first.

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
