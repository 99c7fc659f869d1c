"""Training on many ranks: experts on each, gradients in FP8, what they decide together, checkpoints for any number."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.distributed import checkpoint
    from octavo.distributed.experts import expert_parallel
    from octavo.distributed.fp8_reduce import Fp8Reduction, fp8_reduce_hook
    from octavo.distributed.tensor_parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

__all__ = ["checkpoint", "expert_parallel", "Fp8Reduction", "fp8_reduce_hook"]
__all__ += ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput"]

# "checkpoint" is not imported with the room, as torch.distributed.checkpoint takes a second to import
_FILES = {"checkpoint": "checkpoint", "expert_parallel": "experts"}
_FILES |= dict.fromkeys(("Fp8Reduction", "fp8_reduce_hook"), "fp8_reduce")


def __getattr__(name: str) -> Any:
    if name in __all__:  # of a torch without distributed, only these cannot be imported
        file = importlib.import_module(f"octavo.distributed.{_FILES.get(name, 'tensor_parallel')}")
        return file if name == "checkpoint" else getattr(file, name)
    raise AttributeError(f"module 'octavo.distributed' has no attribute {name!r}")
