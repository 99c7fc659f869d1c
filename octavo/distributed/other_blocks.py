"""Moments in a checkpoint that are not as an optimizer keeps them here, read as float32 for the optimizer to convert.

Ranks that share a vector keep float32 in place of codes, and blocks of codes begin anew with each rank's columns where
these are no whole blocks (optim/layout.py). So another layout of ranks may have saved codes of other blocks, codes for
float32, or the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.distributed.joined_parts import Joined
from octavo.optim.layout import SCALE_INV, place_of, run_in, without_run
from octavo.optim.moment import Moment
from octavo.optim.state import moment_from
from octavo.tensor.sharded_weight import like_sharded, on_this_rank

CODES = "_codes"


@dataclass
class OtherMoments:
    """A parameter's moments as they were saved.

    Attributes:
        names: of the optimizer's moments.
        tensors: to be filled, by the names in the checkpoint; as this rank has the parameter.
    """

    names: Sequence[str]
    tensors: dict[str, Any]

    @classmethod
    def of(cls, own: Mapping[str, Any], names: Sequence[str], sizes: Mapping[str, torch.Size]) -> OtherMoments | None:
        """What to fill of a parameter whose state is ``own`` here; None: it was saved as it is kept.

        Args:
            own: its state's tensors.
            names: of the optimizer's moments.
            sizes: of all that was saved of it.
        """
        tensors, differs = dict[str, Any](), False
        for name in names:
            saved, here = ({key for key in some if _is_of(key, name)} for some in (sizes, own))
            like = own.get(name + CODES, own.get(name))
            if like is None or not saved:
                continue
            differs |= saved != here or any(own[key].shape != sizes[key] for key in saved)
            for key in saved:
                if without_run(key).endswith(SCALE_INV):
                    tensors[key] = _scales(like, sizes[key])
                else:
                    tensors[key] = _empty(like, torch.uint8 if key.endswith(CODES) else torch.float32)
        return cls(names, tensors) if differs else None

    def values(self, moments: Mapping[str, Moment]) -> dict[str, Any]:
        """The moments in float32, by name, sharded as the parameter is; ``moments``: how they were saved."""
        found = {name: self.tensors[name] for name in self.names if name in self.tensors}
        for key, scales in self.tensors.items():
            name = without_run(key).removesuffix(SCALE_INV)
            if name in self.names and name not in found:
                found[name] = _read(moments[name], self.tensors[name + CODES], scales, run_in(key), 0)
        return found


def put(states: dict[str, Any], others: Mapping[str, OtherMoments], description: Mapping[str, Any] | None) -> None:
    """Put filled moments into states by parameters' names; ``description``: what a saved group says of octavo's."""
    for name, other in others.items():
        moments = map(moment_from, () if description is None else description["moments"])
        rest = {key: value for key, value in states[name].items() if key not in other.tensors}
        states[name] = rest | other.values(dict(zip(other.names, moments, strict=False)))


def _is_of(key: str, name: str) -> bool:
    return without_run(key) in (name, name + CODES, name + SCALE_INV)


def _read(moment: Moment, codes: Any, scales: Any, run: int, first: int) -> Any:
    if isinstance(codes, Joined):
        parts = []
        for number, part in enumerate(codes.parts):
            own = scales.parts[number] if isinstance(scales, Joined) else scales
            parts.append(_read(moment, part, own, run, first))
            first += part.shape[0] if part.ndim < 2 else 0
        return Joined(parts)
    place, shard = place_of(codes), on_this_rank(codes)
    first += place.first_row if codes.ndim < 2 else place.first_col
    wide = moment.read_codes(shard, on_this_rank(scales), run, first)
    return wide if shard is codes else like_sharded(wide, codes, codes.shape)


def _empty(like: Any, dtype: torch.dtype) -> Any:
    """A tensor of another dtype, in the same parts on the same ranks."""
    if isinstance(like, Joined):
        return Joined([_empty(part, dtype) for part in like.parts])
    shard = on_this_rank(like)
    own = torch.empty_like(shard, dtype=dtype)
    return own if shard is like else like_sharded(own, like, like.shape)


def _scales(like: Any, size: torch.Size) -> Any:
    """The scales of this rank's rows, in all columns; of a vector all."""
    if like.ndim > 1 and isinstance(like, Joined):
        return Joined([_scales(part, torch.Size((part.shape[0], *size[1:]))) for part in like.parts])
    shard = on_this_rank(like)
    if like.ndim < 2 or shard is like or size.numel() == 1:
        return torch.empty(size, device=like.device)
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate() if placement.is_shard(1) else placement for placement in like.placements]
    own, stride = torch.empty(shard.shape[0], size[1], device=shard.device), (size[1], 1)
    return DTensor.from_local(own, like.device_mesh, placements, run_check=False, shape=size, stride=stride)
