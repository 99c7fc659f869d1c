"""torchao's styles of tensor parallelism: octavo.distributed's, under torchao's names.

Under torchao's each input is in FP8 before it is gathered; octavo's gather those that the table of
docs/tensor-parallel.md names in FP8, and others in their dtype. They take plain layers too.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.distributed.tensor_parallel import ColwiseParallel as Float8ColwiseParallel
from octavo.distributed.tensor_parallel import PrepareModuleInput
from octavo.distributed.tensor_parallel import RowwiseParallel as Float8RowwiseParallel
from octavo.errors import UnsupportedOptionError

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """octavo.distributed.PrepareModuleInput with the arguments of torchao's style.

    Args:
        float8_dtype: torch.float8_e4m3fn, as in torchao; each layer's recipe says how its input is cast.
        fwd_config_submodule_fqn: has no effect, for the same reason.
        layouts: as of octavo.distributed.PrepareModuleInput.

    Raises:
        UnsupportedOptionError: for another float8_dtype.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()).input_layouts
        (Shard(dim=1),)
    """

    def __init__(
        self,
        *,
        float8_dtype: torch.dtype = torch.float8_e4m3fn,
        fwd_config_submodule_fqn: str | None = None,
        **layouts: Any,
    ) -> None:
        if float8_dtype is not torch.float8_e4m3fn:
            raise UnsupportedOptionError(
                f"float8_dtype={float8_dtype}: each layer's recipe has its input's format: leave it out, and give the "
                "format as target_dtype of the configuration's cast_config_input"
            )
        super().__init__(**layouts)
