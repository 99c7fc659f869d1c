"""Layers parted by their splits (nn/linear.py) have one weight in a checkpoint, as on any other layout of ranks.

In a checkpoint ``<layer>.weight`` is what it is where the layer isn't parted: all splits' rows, one after the other.
Each part's rows are pieces of it, written and read where they lie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import WriteItemType

from octavo.nn.linear import PartedLinear
from octavo.nn.weight_files import SCALE_INV
from octavo.private import create_chunk_list, create_write_items, local_tensor
from octavo.tensor.pair import MOVES, Facade
from octavo.tensor.stored_weight import local_stored

Names = dict[str, list[str]]  # of whole parameters: those of their parts, in order


class Joined(Facade):
    """Tensors [n, ...], sharded perhaps, as one that DCP writes and reads: it has their sizes, and no memory."""

    parts: list[Tensor]
    REMEDY = "of the parts of a layer as they are in a checkpoint: read the parts"

    @staticmethod
    def __new__(cls, parts: list[Tensor]) -> Joined:
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=parts[0].dtype)
        self.parts = parts
        return self

    def moved(self, move: Any) -> Joined:
        """The same again, of the very same parts."""
        return Joined(self.parts)

    def pieces(self) -> Iterable[tuple[int, Tensor]]:
        """Each part with its first row."""
        start = 0
        for part in self.parts:
            yield start, part
            start += part.shape[0]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        items = []
        for start, part in self.pieces():
            for item in create_write_items(fqn, part):
                assert item.tensor_data is not None
                chunk = _moved(item.tensor_data.chunk, start)
                index = dataclasses.replace(item.index, offset=chunk.offsets, index=None)
                data = dataclasses.replace(item.tensor_data, chunk=chunk, size=self.shape)
                items.append(dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        return [_moved(chunk, start) for start, part in self.pieces() for chunk in create_chunk_list(part)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for start, part in self.pieces():
            for chunk in create_chunk_list(part):
                if _moved(chunk, start).offsets == index.offset and 0 not in chunk.sizes:
                    return local_tensor(part)
        raise ValueError(f"no part of {index.fqn} begins at {index.offset}")


Joined.RULES = dict(MOVES)


def _moved(chunk: Any, rows: int) -> Any:
    """A piece that lies so many rows further down."""
    first, *others = chunk.offsets
    return dataclasses.replace(chunk, offsets=torch.Size((first + rows, *others)))


def names_of(model: nn.Module) -> Names:
    """The whole parameters of a model's parted layers."""
    found: Names = {}
    for at, layer in model.named_modules():
        if isinstance(layer, PartedLinear):
            stored = local_stored(next(layer.children()).weight) is not None
            for name in ("weight", *["bias"] * (layer.bias is not None), *[f"weight{SCALE_INV}"] * stored):
                whole = f"{at}.{name}".lstrip(".")
                found[whole] = [f"{at}.{split}.{name}".lstrip(".") for split in layer.splits or ()]
    return found


def join(values: dict[str, Any], names: Names) -> dict[str, Any]:
    """Values of parameters by name, tensors or dicts of them (an optimizer's), with those of parts as one.

    Of what has no rows, an optimizer's count of steps or a scale in common, the first part's.
    """
    found = dict(values)
    for whole, parts in names.items():
        if parts[0] in values:
            found[whole] = _joined([found.pop(part) for part in parts])
    return found


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _joined([value[key] for value in values]) for key in values[0]}
    return Joined(values) if isinstance(values[0], Tensor) and not _is_common(values[0]) else values[0]


def _is_common(value: Tensor) -> bool:
    """Whether it is one number for all parts, which are sharded."""
    return value.ndim == 0 or (value.shape == (1, 1) and not hasattr(value, "placements"))


def share(values: dict[str, Any], names: Names) -> None:
    """Give all parts what ``join`` has of the first one alone, once DCP has filled that; in place."""
    for first, *others in (parts for parts in names.values() if parts[0] in values):
        if isinstance(value := values[first], Tensor) and _is_common(value):
            for other in others:
                values[other].copy_(value)


def part(values: dict[str, dict[str, Any]], names: Names) -> dict[str, dict[str, Any]]:
    """An optimizer's state, as ``join`` gave it and DCP has filled it, with each part's again."""
    found = dict(values)
    for whole, parts in names.items():
        if whole in found:
            state = found.pop(whole)
            for number, name in enumerate(parts):
                found[name] = {key: _part(value, number) for key, value in state.items()}
    return found


def _part(value: Any, number: int) -> Any:
    if isinstance(value, Joined):
        return value.parts[number]
    return value.clone() if isinstance(value, Tensor) else value


def renamed(groups: Sequence[dict[str, Any]], names: Names, joined: bool) -> list[dict[str, Any]]:
    """An optimizer's groups, with the names of whole parameters for those of parts, or the reverse."""
    wholes = {part: whole for whole, parts in names.items() for part in parts}
    found = []
    for group in groups:
        if joined:
            params = list(dict.fromkeys(wholes.get(name, name) for name in group["params"]))
        else:
            params = [own for name in group["params"] for own in names.get(name, [name])]
        found.append({**group, "params": params})
    return found
