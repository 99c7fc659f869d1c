"""Codes of a norm's results beside the exact ones."""

import math

import torch
from torch import Tensor

from tests.support.definitions import same_bits


def check_codes(qdata: Tensor, codes: Tensor, fmt: torch.dtype, pad: int) -> None:
    """That qdata is these, and zeros up to a multiple of ``pad``."""
    rows, cols = codes.shape
    raw = qdata.view(torch.uint8)
    assert qdata.dtype == fmt and qdata.is_contiguous() and qdata.shape == (rows, math.ceil(cols / pad) * pad)
    assert same_bits(raw[:, :cols], codes) and not raw[:, cols:].any()
