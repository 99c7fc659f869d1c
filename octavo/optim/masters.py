"""Masters: what an optimizer updates in place of a weight of few bits, and what its state keeps for that.

Of plain weights (bytes with the weight):

    fp32         a float32 weight is its own master; so is a float16 one under "auto", which is rounded to nearest
    split32      bf16 and a 16-bit remainder (4): together the bits of float32, with which training is the same
    split24      bf16 and an 8-bit remainder (3): the upper 24 bits of float32, the others rounded stochastically
    fp16_scaled  bf16 and a float16 master with one scale, a power of two (4): MS-AMP's, but the scale is known before
                 the update; 40 octaves below the largest
    None         bf16 alone (2), rounded stochastically, so that small updates count on average

Of weights in FP8: see kernels/reference/fp8_weights.py. Remainders of 16 bits are kept as bytes: NCCL and gloo send no
int16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.kernels.reference.fp8_weights import FLOAT16_FACTOR, Fp8Weight, values_with
from octavo.kernels.reference.master_weights import FLOAT16_MAX, MasterWeight
from octavo.numerics import scale_from_amax
from octavo.tensor.stored_weight import StoredWeight, local_stored

# the kernels' names: their places are in saved states
KINDS = (
    *("weight", "split32", "split24", "fp16_scaled", "stochastic"),
    *("fp8_split16", "fp8_split24", "fp8_fp16", "fp8_fp32", "fp8_stochastic"),
)


@dataclass(frozen=True)
class PlainMaster:
    """A plain weight's master.

    Attributes:
        name: the ``master`` argument's.
        kind: of KINDS.
        dtypes: of the weights that it is for.
        rest: dtype of what the state keeps besides the weight, or None.
    """

    name: str | None
    kind: str
    dtypes: tuple[torch.dtype, ...]
    rest: torch.dtype | None = None

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """The rest, so that the master begins as the weight; of a scaled one also its scale_inv and amax."""
        if self.rest is None:
            return {}
        if self.rest != torch.float16:
            return {"master_rest": _as_kept(torch.zeros(weight.shape, dtype=self.rest, device=weight.device))}
        amax = weight.detach().abs().amax().float() if weight.numel() else weight.new_zeros((), dtype=torch.float32)
        scale = scale_from_amax(amax.reshape(1, 1), FLOAT16_MAX, True, 0)
        return {
            "master_rest": (weight.detach().float().contiguous() * scale.reshape(())).half(),
            "master_scale_inv": scale.reciprocal(),
            "master_amax": amax.reshape(1, 1).clone(),
        }

    def for_kernel(self, weight_RC: Tensor, state: dict[str, Tensor]) -> MasterWeight:
        """What the kernels read and write, over the weight and its state."""
        rest = _rest_of(state, self.rest, weight_RC)
        return MasterWeight(
            weight_RC, self.kind, rest, state["master_scale_inv"] if self.name == "fp16_scaled" else None
        )


@dataclass(frozen=True)
class Fp8Master:
    """The master of a weight in FP8; attributes as PlainMaster's."""

    name: str | None
    kind: str
    rest: torch.dtype | None

    def new_state(self, weight: StoredWeight) -> dict[str, Tensor]:
        """The rest, so that the master begins as what was cast to the weight, and the amax that bounds the next scale.

        Where that is not known any more, it begins as the weight. Without a master there is nothing to hold it.
        """
        rest = weight.rest
        if rest is None or self.rest is None:
            rest = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
        codes = weight.qdata.view(torch.uint8)
        values = values_with(codes, weight.scale_inv, rest)
        state = {"master_amax": _amax_of(values, weight.scale_inv.shape)}
        if self.rest == torch.int8:
            state["master_rest"] = rest.clone()
        elif self.rest == torch.int16:
            state["master_rest"] = _as_kept(rest.to(torch.int16).mul_(1 << 8))
        elif self.rest == torch.float16:
            one = torch.full_like(weight.scale_inv, FLOAT16_FACTOR)
            state["master_rest"] = values_with(codes, one, rest).half()
        elif self.rest == torch.float32:
            state["master_rest"] = values
        return state

    def for_kernel(self, codes_RC: Tensor, state: dict[str, Tensor], scale_inv: Tensor) -> Fp8Weight:
        """What the kernels read and write, over the weight's codes and its state."""
        return Fp8Weight(codes_RC, self.kind, scale_inv, _rest_of(state, self.rest, codes_RC))


def _as_kept(rest: Tensor) -> Tensor:
    """16 bits as two bytes, [...] -> [..., 2]."""
    return rest.unsqueeze(-1).view(torch.uint8) if rest.dtype == torch.int16 else rest


def _rest_of(state: dict[str, Tensor], dtype: torch.dtype | None, matrix: Tensor) -> Tensor | None:
    return None if dtype is None else state["master_rest"].view(dtype).view(matrix.shape)


def _amax_of(values: Tensor, shape: torch.Size) -> Tensor:
    """Of all finite values, or of each block of 128 x 128."""
    values = values.nan_to_num(0.0, 0.0, 0.0)
    if shape == (1, 1):
        return values.abs().amax().reshape(1, 1) if values.numel() else values.new_zeros(1, 1)
    rows, cols = values.shape
    whole = values.new_zeros(shape[0] * 128, shape[1] * 128)
    whole[:rows, :cols] = values
    return whole.view(shape[0], 128, shape[1], 128).abs().amax((1, 3))


_BF16 = (torch.bfloat16,)
NAMED: dict[str | None, PlainMaster] = {
    "fp32": PlainMaster("fp32", "weight", (torch.float32,)),
    "split32": PlainMaster("split32", "split32", _BF16, torch.int16),
    "split24": PlainMaster("split24", "split24", _BF16, torch.int8),
    "fp16_scaled": PlainMaster("fp16_scaled", "fp16_scaled", (torch.bfloat16, torch.float16), torch.float16),
    None: PlainMaster(None, "stochastic", _BF16),
}
_FLOAT16 = PlainMaster("auto", "weight", (torch.float16,))

OF_FP8_WEIGHTS: dict[str | None, Fp8Master] = {
    "split16": Fp8Master("split16", "fp8_split16", torch.int8),
    "split24": Fp8Master("split24", "fp8_split24", torch.int16),
    "fp16_scaled": Fp8Master("fp16_scaled", "fp8_fp16", torch.float16),
    "fp32": Fp8Master("fp32", "fp8_fp32", torch.float32),
    None: Fp8Master(None, "fp8_stochastic", None),
}


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
    if local_stored(param) is not None:
        wanted = "split16" if master == "auto" else master
        if wanted not in OF_FP8_WEIGHTS:
            raise ValueError(f"master={master!r}: weights stored in FP8 take {', '.join(map(repr, OF_FP8_WEIGHTS))}")
        return OF_FP8_WEIGHTS[wanted]
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
