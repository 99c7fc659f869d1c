"""Several products on one input as one: a matrix whose rows are parted by name, and its output with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Splits = Mapping[str, int]


def checked_splits(out_features: int | Splits) -> tuple[int, dict[str, int] | None]:
    """(out_features in all, the splits or None) from a module's argument.

    Raises:
        ValueError: for a name that can't be one of state_dict's, or no split at all.

    Example:
        >>> checked_splits({"query": 64, "key": 16, "value": 16})
        (96, {'query': 64, 'key': 16, 'value': 16})
    """
    if isinstance(out_features, int):
        return out_features, None
    splits = dict(out_features)
    wrong = [name for name in splits if not name.isidentifier() or name in ("weight", "bias")]
    if not splits or wrong:
        raise ValueError(f"out_features={splits!r}: splits need names like 'query', not {wrong or 'none'}")
    return sum(splits.values()), splits


def split_output(output: Tensor, splits: dict[str, int] | None) -> Tensor | tuple[Tensor, ...]:
    """The output as it is, or a view of it for each split, in their order."""
    return output if splits is None else output.split(list(splits.values()), dim=-1)


def merge_keys(state_dict: dict[str, Tensor], prefix: str, splits: dict[str, int]) -> list[str]:
    """Join ``<prefix><split>.weight`` and ``.bias``, as separate layers save them, to one key each; in place.

    Only where all of them are there, and the joined one isn't.

    Returns:
        a line for each of another size than its split; where there is one, nothing is joined.
    """
    wrong = []
    for parameter in ("weight", "bias"):
        keys = {f"{prefix}{name}.{parameter}": size for name, size in splits.items()}
        if f"{prefix}{parameter}" in state_dict or not all(key in state_dict for key in keys):
            continue
        other = {key: list(state_dict[key].shape) for key, size in keys.items() if state_dict[key].shape[:1] != (size,)}
        wrong += [f"{key} is {shape}, but its split has {keys[key]} rows" for key, shape in other.items()]
        if not other:
            state_dict[f"{prefix}{parameter}"] = torch.cat([state_dict.pop(key) for key in keys])
    return wrong
