"""Masters and moments, as the reference's functions take them."""

import math

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.layouts import blocks_in_row
from octavo.kernels.reference.optimizer_state import Fp8Weight, Master, MasterWeight, MomentTensors, pieces
from octavo.optim.masters import FP8_MASTERS, PLAIN_MASTERS

# significant bits of the values that a kind of MASTER_KINDS holds
BITS = {"weight": 24, "split32": 24, "split24": 16, "stochastic": 8, "fp8_split16": 12, "fp8_split24": 20}
BITS |= {"fp8_fp16": 11, "fp8_fp32": 24, "fp8_stochastic": 4}
RESTS = {form.kind: form.low_bits_dtype for form in FP8_MASTERS.values()}
PLAIN_RESTS = {form.kind: form.low_bits_dtype for form in PLAIN_MASTERS.values()}


def weight(kind: str, shape: tuple[int, int], blocks: bool = False) -> Fp8Weight:
    scales = (-(-shape[0] // 128), -(-shape[1] // 128)) if blocks else (1, 1)
    remainder = None if RESTS[kind] is None else torch.zeros(shape, dtype=RESTS[kind])
    codes, amax = torch.zeros(shape, dtype=torch.uint8), torch.full(scales, math.nan)
    return Fp8Weight(codes, kind, torch.ones(scales), remainder, amax)


def amax_of(values: Tensor, scales: torch.Size) -> Tensor:
    """Return the largest finite magnitude of all, or of each block of 128 x 128."""
    values = torch.where(values.isfinite(), values, 0).abs()
    if scales == (1, 1):
        return values.amax().view(1, 1)
    rows = [values[128 * i : 128 * i + 128] for i in range(scales[0])]
    return torch.stack([torch.stack([part.amax() for part in row.split(128, 1)]) for row in rows])


def random32(shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return 32 random bits for each element, int32."""
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)


def store(m: Fp8Weight, wide: Tensor, bits: Tensor | None = None, bound: Tensor | None = None) -> Tensor:
    """Write all values, with a scale of this bound or of their own amax; return the amax of the values written."""
    bits = random32(wide.shape) if bits is None else bits
    m.begin(amax_of(wide, m.scale_inv.shape) if bound is None else bound)
    for piece in pieces(*wide.shape):
        m.write(piece, piece.of(wide.clone()), piece.of(bits) if m.is_random else None)
    m.end()
    assert m.amax is not None
    return m.amax.clone()


def read(stored: Master | MomentTensors) -> Tensor:
    """Return all stored values."""
    data = stored.data if isinstance(stored, MomentTensors) else stored.weight
    values = torch.full(data.shape, math.nan)
    for piece in pieces(*data.shape):
        piece.of(values).copy_(stored.read(piece))
    return values


def master_of(kind: str, weight: Tensor) -> MasterWeight:
    """Return a master of a weight that is no code."""
    dtype = PLAIN_RESTS[kind]
    return MasterWeight(weight, kind, None if dtype is None else torch.zeros(weight.shape, dtype=dtype))


def codes_of(
    fmt: Format,
    shape: tuple[int, int],
    root: bool = False,
    stochastic: bool = False,
    per_tensor: bool = False,
    previous: float | None = None,
) -> MomentTensors:
    """Return a moment of 0, with a scale a block, or one, by the previous amax too."""
    scales = (1, 1) if per_tensor else (shape[0], blocks_in_row(shape[1]))
    amax = None if previous is None else torch.full((1, 1), previous)
    rounding = "stochastic" if stochastic else "nearest"
    return MomentTensors(torch.zeros(shape, dtype=torch.uint8), fmt, torch.ones(scales), amax, root, rounding)


def values_of(shape: tuple[int, int]) -> Tensor:
    """Return values some of which are large, some small, by five orders of magnitude; blocks differ."""
    return torch.rand(shape).mul(-12).exp() * torch.linspace(0.1, 10, shape[1]) * torch.randn(shape)
