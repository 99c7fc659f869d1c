"""torchao's call after each optimizer step, which octavo does not need."""

from __future__ import annotations

from torch import nn


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Do nothing: under fully_shard octavo finds the scales of all weights of a forward in one all-reduce by itself.

    Example:
        >>> precompute_float8_dynamic_scale_for_fsdp(nn.Linear(64, 64))
    """
