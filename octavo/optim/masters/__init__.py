"""Masters: what an optimizer updates in place of a weight of few bits.

One file each, with one shape:

name       the ``master`` argument's
kind       of KINDS
dtypes     of the weights that it is for
random     whether it rounds stochastically
new_state  what it keeps in the optimizer's state
stored     what the kernels read and write
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from octavo.optim.masters import fp16_scaled, fp32, split24, split32, stochastic
from octavo.optim.masters.stored import STORED
from octavo.tensor.stored_weight import stored_part

# the kernels' names, in the order of triton/master_weights.py: their numbers are in saved states
KINDS = (
    *("weight", "split32", "split24", "fp16_scaled", "stochastic"),
    *("fp8_split16", "fp8_split24", "fp8_fp16", "fp8_fp32", "fp8_stochastic"),
)

NAMED: dict[str | None, Any] = {
    "fp32": fp32.Itself("fp32", (torch.float32,)),
    "split32": split32.Split32(),
    "split24": split24.Split24(),
    "fp16_scaled": fp16_scaled.Fp16Scaled(),
    None: stochastic.Stochastic(),
}


_FLOAT16 = fp32.Itself("auto", (torch.float16,))


def master_of(param: nn.Parameter, master: str | None) -> Any:
    """The master of a weight.

    Args:
        param: the weight.
        master: a name of NAMED; or "auto": float32 and float16 weights are their own, bf16 ones have "split32", stored
            ones "split16". "split16" is 8 bits of remainder: of bf16 weights it is "split24"; and "fp32" of
            these is "split32".

    Raises:
        ValueError: for another name, or a weight of another dtype than the master is for.
    """
    if stored_part(param) is not None:
        wanted = "split16" if master == "auto" else master
        if wanted not in STORED:
            raise ValueError(f"master={master!r}: weights stored in FP8 take {', '.join(map(repr, STORED))}")
        return STORED[wanted]
    if master == "fp32" and param.dtype == torch.bfloat16:
        master = "split32"  # the same float32 master, half of it the weight
    if master == "split16":
        master = "split24" if param.dtype == torch.bfloat16 else "fp32"
    if master == "auto" and param.dtype == torch.float16:
        return _FLOAT16
    if master == "auto":
        master = "split32" if param.dtype == torch.bfloat16 else "fp32"
    if master not in NAMED:
        raise ValueError(f"master={master!r}: use 'auto', 'split16', {', '.join(map(repr, NAMED))}")
    found = NAMED[master]
    if param.dtype not in found.dtypes:
        if param.dtype == torch.float32 and master in ("split32", "split24", None, "fp16_scaled"):
            return NAMED["fp32"]  # as is: a norm's weight, say, beside bf16 matrices
        raise ValueError(
            f"master={master!r} is for weights of {', '.join(map(str, found.dtypes))}, not {param.dtype}; "
            "use 'auto', or convert the model"
        )
    return found
