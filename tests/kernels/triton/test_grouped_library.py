"""torch's own product of operands in groups: its call, the memory after it, and whether it is trusted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import SwizzleType

from octavo.kernels.arguments import unpacking
from octavo.kernels.layouts import plain_scales
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.numerics import E8M0
from tests.support.casts import poisoned_memory, to
from tests.support.groups import SIZES
from tests.support.product_cases import BLOCK, MX, ROWS, close, rows_in_groups, terms_in_groups
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

FORMS = [rows_in_groups, terms_in_groups]


def torch_s_product(
    a: Tensor, b: Tensor, a_scale: Tensor, _: Any, b_scale: Tensor, __: Any, *swizzles: Any, **how: Any
) -> Tensor:
    """Check as torch does, then return scaled_grouped_mm by rows or by 1x32 as documented; ungrouped rows are NaN."""
    offs, fast = how["offs"], how["use_fast_accum"]
    checked = torch._scaled_grouped_mm(*(t.to("meta") for t in (a, b, a_scale, b_scale)), offs.to("meta"))
    assert how["output_dtype"] == torch.bfloat16 and not fast
    out, start, part_start = torch.full(checked.shape, float("nan"), dtype=torch.bfloat16), 0, 0
    for group, end in enumerate(offs.tolist()):
        part = slice(start, end)
        if a_scale.dtype == E8M0:
            assert swizzles == (SwizzleType.SWIZZLE_32_4_4,) * 2
            size = -(-(end - start) // 128) * 128 * a_scale.shape[1]
            scales = a_scale.view(-1)[part_start : part_start + size], b_scale[group]
            values = [
                REFERENCE["dequantize"](codes, plain_scales(one, codes.shape, MX), MX, torch.float32)
                for codes, one in ((a[part], scales[0]), (b[group].t(), scales[1]))
            ]
            out[part], part_start = (values[0] @ values[1].t()).bfloat16(), part_start + size
        elif b.ndim == 3:
            values = a[part].float() @ b[group].float()
            out[part] = (values * a_scale[part, None] * b_scale[group]).bfloat16()
        else:
            of_a, of_b = (scale.view(len(offs), -1)[group] for scale in (a_scale, b_scale))
            out[group] = ((a[:, part].float() @ b[part].float()) * of_a[:, None] * of_b).bfloat16()
        start = end
    return out


@contextmanager
def given_to_torch(product: Any) -> Iterator[None]:
    with mock.patch.object(F, "scaled_grouped_mm", product):
        yield


def e4m3(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with codes of E4M3, which torch's takes."""
    return args[0].to(torch.float32).clamp(-448, 448).to(torch.float8_e4m3fn), *args[1:]


@pytest.fixture
def emulated(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> TritonKernels:
    if kernels.gpu.type == "cuda":
        pytest.skip("a GPU has its own")
    monkeypatch.setattr(kernels.module("library_matmul"), "_known", {})
    return kernels


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "ungrouped"), SIZES[1:4], ids=lambda v: str(v)[:20])
def test_torch_s_product(form: Any, sizes: list[int], ungrouped: int, emulated: TritonKernels) -> None:
    check_torch_s((*e4m3(form(sizes, ungrouped, (ROWS, ROWS), 32, 48)), None, torch.bfloat16, False, 16), emulated)


@pytest.mark.parametrize(("sizes", "ungrouped"), [*SIZES[1:4], ([130, 0, 257], 2)], ids=lambda v: str(v)[:20])
def test_torch_s_product_of_1x32(sizes: list[int], ungrouped: int, emulated: TritonKernels) -> None:
    """Swizzled scales of each group begin with 128 rows of their own."""
    check_torch_s((*e4m3(rows_in_groups(sizes, ungrouped, (MX, MX), 48, 160)), None, torch.bfloat16, False), emulated)


def check_torch_s(args: tuple[Any, ...], emulated: TritonKernels) -> None:
    calls = mock.Mock(side_effect=torch_s_product)
    with given_to_torch(calls), poisoned_memory():
        y = emulated.grouped_matmul(*args)
    assert calls.call_count == (2 if args[0].numel() else 1)  # the first is the question whether it is right
    close(y, REFERENCE["grouped_matmul"](*args), emulated)


@pytest.mark.parametrize("form", FORMS)
def test_wrong_offsets_are_not_given_to_torch(form: Any, emulated: TritonKernels) -> None:
    args = e4m3(form([10, 20, 10], 0, (ROWS, ROWS), 32, 48))
    with given_to_torch(torch_s_product):
        for ends in ([30, 10, 40], [10, 20, 1 << 20]):
            offsets = torch.tensor(ends, dtype=torch.int32)
            assert emulated.grouped_matmul(*args[:6], offsets, None, torch.bfloat16, False, 16).isnan().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_product_is_left_alone(form: Any, emulated: TritonKernels) -> None:
    def wrong(*args: Any, **how: Any) -> Tensor:
        """Return the product with scales read in another order."""
        return torch_s_product(*args, **how).flip(-1)

    def missing(*args: Any, **how: Any) -> Tensor:
        raise NotImplementedError("not on this device")

    args = *e4m3(form([10, 0, 23], 2, (ROWS, ROWS), 32, 48)), None, torch.bfloat16, False, 16
    for product in (wrong, missing):
        emulated.module("library_matmul")._known.clear()
        with given_to_torch(product):
            close(emulated.grouped_matmul(*args), REFERENCE["grouped_matmul"](*args), emulated)


def test_what_torch_does_not_take(kernels: TritonKernels) -> None:
    library = kernels.module("library_matmul")
    takes = unpacking({"grouped_matmul": lambda operands, dtype, fast: library.takes_groups(operands, dtype)})
    args = e4m3(rows_in_groups([10, 0, 23], 2, (ROWS, ROWS), 32, 48))
    terms = e4m3(terms_in_groups([10, 0, 23], 2, (ROWS, ROWS), 32, 48))
    how = None, torch.bfloat16, False
    taken = takes["grouped_matmul"]
    assert taken(*args, *how) and taken(*terms, *how, 16)
    assert not taken(*args, torch.ones(3, 32), *how[1:])
    assert not taken(*args, None, torch.float32, False)
    assert not taken(*terms, *how, 8)
    for other in (
        rows_in_groups([10, 0, 23], 2, (ROWS, ROWS), 32, 48),  # E5M2
        e4m3(rows_in_groups([10, 0, 23], 2, (BLOCK, ROWS), 32, 48)),
        e4m3(rows_in_groups([10, 0, 23], 2, (ROWS, ROWS), 24, 48)),
        (args[0].t().contiguous().t(), *args[1:]),
        e4m3(rows_in_groups([10, 0, 23], 2, (MX, MX), 32, 48)),  # no whole blocks
        e4m3(terms_in_groups([10, 0, 23], 2, (MX, MX), 32, 64)),
    ):
        assert not taken(*other, *how, 16)
    assert taken(*e4m3(rows_in_groups([10, 0, 23], 2, (MX, MX), 32, 64)), *how)


def test_a_gpu_asks_once(kernels: TritonKernels) -> None:
    if kernels.gpu.type != "cuda":
        pytest.skip("needs a GPU")
    args = *e4m3(rows_in_groups([40, 0, 230], 2, (ROWS, ROWS), 256, 512)), None, torch.bfloat16, False
    close(kernels.grouped_matmul(*to(kernels.gpu, args)).cpu(), REFERENCE["grouped_matmul"](*args), kernels)
