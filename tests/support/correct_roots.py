"""Square roots rounded correctly, as by CUDA and the kernels; of torch's on a CPU 15 % are a bit off in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

_sqrt = torch.Tensor.sqrt


def _correct(x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.is_cuda:
        return _sqrt(x)
    return _sqrt(x.double()).float()  # float64 has more than twice float32's bits, so rounding twice rounds once


@contextmanager
def correct_roots() -> Iterator[None]:
    """Let Tensor.sqrt and sqrt_ of float32 on a CPU be correctly rounded."""
    with (
        mock.patch.object(torch.Tensor, "sqrt", _correct),
        mock.patch.object(torch.Tensor, "sqrt_", lambda x: x.copy_(_correct(x))),
    ):
        yield
