"""How the rows of a layer's tensors lie: dense, in groups of their own matrices, or in shards on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Parts(NamedTuple):
    """The name of the process group whose ranks hold a layer's roles, and which roles are in parts, not whole on each.

    ``begins``: whether delayed scales may be missing yet; the same on all of these ranks. ``rank``: this one's number.
    """

    group: str
    roles: tuple[bool, bool, bool]
    begins: bool = False
    rank: int = 0


class Wire(NamedTuple):
    """The process group that gathers and scatters tokens, and how; ``group`` is its name, ``ranks`` its size.

    ``runs``: the number of ranges of consecutive tokens on a rank, one for each sequence where sequences are sharded.
    ``reduce``: (addends, group) -> this rank's part of their sum, whose parts are along dimension 0; None: torch's
    reduce-scatter, in the tensor's dtype.
    """

    group: str
    ranks: int
    runs: int
    reduce: Callable[[Tensor, str], Tensor] | None = None


class Rows(NamedTuple):
    """The layout of the rows of a layer's input and output; without any field they are dense, and all on this rank.

    ``offsets`` [G] int32: where groups of rows end, each of which has a matrix of its own, see grouped.py; ``parts``:
    the roles that lie in shards on the ranks of a group; ``wire``: how the input's tokens came from these ranks.
    """

    offsets: Tensor | None = None
    parts: Parts | None = None
    wire: Wire | None = None


DENSE = Rows()
