import math

import pytest
import torch
from torch import Tensor

from octavo import E4M3, E5M2
from octavo.formats import E4M4, Format
from octavo.kernels import moment_codes as reference
from octavo.kernels.reference.optimizer_state import round_to_bf16
from tests.support.definitions import same_bits
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M4], ids=str)
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
BLOCK = 4096


def numbers(fmt: Format) -> Tensor:
    """Codes, the middles between them, numbers next to both, and what no code holds."""
    codes = reference.decode_moment(CODES, fmt)
    codes = codes[codes.isfinite() & (codes >= 0)].sort().values
    beyond = torch.tensor([fmt.max * 17 / 16, fmt.max * 2, 65536.0, 1e6, 3e38, 2.0**-126, 1e-45, math.inf, math.nan])
    places = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, beyond])
    near = (places.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)).flatten()
    near = near[(near >= 0) & (near <= 0x7FC00000)]
    near = torch.cat([near.view(torch.float32), places * (1 + 2.0**-12), places * (1 - 2.0**-12)])
    return torch.cat([near, -near]) if fmt.signed else near


def bits_like(x: Tensor, kind: str) -> Tensor:
    if kind == "drawn":
        return torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    return torch.full(x.shape, 0xFFFF if kind == "ones" else 0, dtype=torch.int32)


@FORMATS
def test_every_code_is_read_as_the_reference_does(fmt: Format, kernels: TritonKernels) -> None:
    out = torch.empty(256, device=kernels.device)
    kernels.launch("decode_moment_kernel", 1, CODES.to(kernels.device), out, fmt, 256)
    expected, found = reference.decode_moment(CODES, fmt), out.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    assert same_bits(found[~found.isnan()], expected[~expected.isnan()])


@FORMATS
@pytest.mark.parametrize("kind", ["nearest", "zeros", "ones", "drawn"])
@pytest.mark.parametrize("bounded", [False, True], ids=["any", "bounded"])
def test_numbers_get_the_references_codes(fmt: Format, kind: str, bounded: bool, kernels: TritonKernels) -> None:
    x = numbers(fmt)
    if bounded:  # as amax times its scale is
        x = x[~(x.abs() > torch.tensor(fmt.max).nextafter(torch.tensor(math.inf)))]
    bits = bits_like(x, kind)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=kernels.device)
    given = x.to(kernels.device), bits.to(kernels.device), codes, len(x), fmt, kind != "nearest", bounded, BLOCK
    kernels.launch("encode_moment_kernel", -(-len(x) // BLOCK), *given)
    expected = reference.encode_moment(x.clone(), fmt, None if kind == "nearest" else bits)
    assert torch.equal(codes.cpu(), expected)


@pytest.mark.parametrize("kind", ["zeros", "ones", "drawn"])
def test_bf16_is_rounded_as_the_reference_does(kind: str, kernels: TritonKernels) -> None:
    x = torch.cat([numbers(E5M2), torch.randn(1000), torch.tensor([3.3e38, -3.4e38, -0.0, 1e-40])])
    bits = bits_like(x, kind)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=kernels.device)
    given = x.to(kernels.device), bits.to(kernels.device), out, len(x), BLOCK
    kernels.launch("round_to_bf16_kernel", -(-len(x) // BLOCK), *given)
    expected, found = round_to_bf16(x, bits), out.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    assert same_bits(found[~found.isnan()], expected[~expected.isnan()])
