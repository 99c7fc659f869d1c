"""How the rows of a layer's tensors lie: dense, in groups of their own matrices, or in shards on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Parts(NamedTuple):
    """The layout of a layer's input, weight and grad_output on the ranks of a process group.

    Attributes:
        group: the group's name.
        roles: for each of the three, whether each rank has a part of it; else all of it.
        scale_may_be_empty: whether a delayed scale may be 0, without a history yet; the same on all ranks.
        rank: this rank's number.
    """

    group: str
    roles: tuple[bool, bool, bool]
    scale_may_be_empty: bool = False
    rank: int = 0


class Wire(NamedTuple):
    """The way in which the ranks of a process group gather an input's tokens, and scatter sums of tokens.

    Attributes:
        group: the group's name.
        ranks: its size.
        runs: the number of ranges of consecutive tokens on a rank, one for each sequence where sequences are sharded.
        reduce: (addends, group) -> this rank's part of their sum, whose parts are along dimension 0; None: torch's
            reduce-scatter, in the tensor's dtype.
    """

    group: str
    ranks: int
    runs: int
    reduce: Callable[[Tensor, str], Tensor] | None = None


class Rows(NamedTuple):
    """The layout of the rows of a layer's input and output; without any field they are dense, and all on this rank.

    Attributes:
        offsets: [G] int32, where groups of rows end, each of which has a matrix of its own, see grouped.py.
        parts: how the roles lie on several ranks.
        wire: how the input's tokens came from these ranks.
    """

    offsets: Tensor | None = None
    parts: Parts | None = None
    wire: Wire | None = None


DENSE = Rows()
