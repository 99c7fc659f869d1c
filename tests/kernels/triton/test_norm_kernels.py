"""The statistics of rows that are hard to find in float32."""

import pytest
import torch
from torch import Tensor

from tests.support.casts import of_norm
from tests.support.triton_cases import ALL, E4M3
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


def statistics(kernels: TritonKernels, x: Tensor, kind: str = "layer_norm", eps: float = 0.0) -> tuple[Tensor, Tensor]:
    gamma = torch.ones(x.shape[1]).to(kernels.device)
    cast = None, 0, E4M3, ALL, False, 0, True
    *_, mean, rstd, _ = kernels.cast(x.to(kernels.device), *cast, **of_norm(gamma, None, kind, eps))
    return mean.cpu(), rstd.cpu()


def rows() -> dict[str, Tensor]:
    """Rows of 500 elements: the first tile of the small ones holds 32."""
    normal = torch.randn(500)
    first_differs, outlier, only_in_the_last = normal.clone(), normal.clone(), torch.zeros(500)
    first_differs[:32] += 1e4
    outlier[3] = 1e6
    only_in_the_last[480:] = torch.randn(20)
    return {
        "normal": normal,
        "far from 0": 1e4 + normal,
        "very far from 0": 3e5 + normal,
        "the first tile is elsewhere": first_differs,
        "an outlier in the first tile": outlier,
        "nothing but in the last tile": only_in_the_last,
        "tiny": normal * 1e-15,
        "large": normal * 1e15,
        "rising": torch.arange(500.0) + 1e3,
    }


@pytest.mark.usefixtures("tiles_of_any_size")
def test_mean_and_rstd(kernels: TritonKernels) -> None:
    x = torch.stack([*rows().values()])
    mean, rstd = statistics(kernels, x)
    exact = x.double()
    assert ((mean - exact.mean(1)).abs() <= 2.0**-21 * exact.abs().mean(1)).all()
    relative = (rstd * exact.var(1, correction=0).sqrt() - 1).abs()
    assert (relative <= 2.0**-18).all(), dict(zip(rows(), relative.tolist(), strict=True))
    mean, rstd = statistics(kernels, x, "rms_norm")
    assert mean.numel() == 0
    assert ((rstd * exact.square().mean(1).sqrt() - 1).abs() <= 2.0**-22).all()


@pytest.mark.usefixtures("tiles_of_any_size")
def test_rows_that_do_not_vary(kernels: TritonKernels) -> None:
    values = torch.tensor([0.0, 1.0, -3.0, 1 / 3, 1e4 + 1 / 3, 1e30])
    mean, rstd = statistics(kernels, values[:, None].expand(-1, 300).contiguous(), eps=1e-2)
    assert ((mean - values).abs() <= 2.0**-22 * values.abs()).all()
    assert ((rstd[:4] - 10).abs() < 1e-5).all() and (rstd >= 0).all() and (rstd <= 10.0001).all()
