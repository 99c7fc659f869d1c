"""What all ranks run together, so that a fault of one ends all, may wait for no other rank: enforced in all tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}  # namespaces of torch's ops
HARMLESS = {"wait_tensor"}


class NoCollectives(TorchDispatchMode):
    """Raises where a collective begins; whoever waits for one that all began may."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if func.namespace in COLLECTIVES and name not in HARMLESS:
            raise AssertionError(
                f"{name} began inside Ranks.together(): a rank that fails in that block never calls it, and the others "
                "would wait for it; end the block before it"
            )
        return func(*args, **(kwargs or {}))


def guard() -> None:
    """Have Ranks.together() run its blocks so, in this process."""
    from octavo.distributed.ranks import Ranks

    together: Any = Ranks.together
    if getattr(together, "guarded", False):
        return

    @contextlib.contextmanager
    def guarded(self: Ranks) -> Iterator[None]:
        with together(self), NoCollectives():
            yield

    guarded.guarded = True  # type: ignore[attr-defined]
    Ranks.together = guarded  # type: ignore[method-assign]
