"""A gradient in FP8 behind the facade of any tensor: torch's functions on it are exact, or raise."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo import E4M3, PerBlock, UnsupportedOpError, quantize
from octavo.tensor import stored_gradient
from octavo.tensor.stored_gradient import StoredGradient, UsedGradient, norm_of
from tests.support.helpers import saved_and_loaded

SHAPES: list[tuple[int, ...]] = [(), (1,), (300,), (3, 300), (2, 5, 30), (8, 4, 3, 3), (0,), (0, 5), (5, 0)]

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_foreach = pytest.mark.parametrize("foreach", [None, True, False])


def values_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of different magnitude."""
    values = torch.randn(shape)
    if len(shape) > 1:
        values *= torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return values.to(dtype)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter with a gradient in FP8."""
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    param.grad = StoredGradient.cast(values_of(*shape, dtype=dtype))
    return param


def stored(param: nn.Parameter) -> StoredGradient:
    assert isinstance(param.grad, StoredGradient)
    return param.grad


@each_dtype
@each_shape
def test_any_gradient_is_a_pair_in_its_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = values_of(*shape, dtype=dtype)
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    param.grad = StoredGradient.cast(values)
    grad = stored(param)
    assert grad.shape == values.shape and grad.dtype == dtype and grad.is_contiguous()
    matrix = values.view(shape[0], -1) if len(shape) > 1 and values.numel() else values.view(1, -1)
    if values.numel():
        pair = quantize(matrix, E4M3, PerBlock(1, 128))
        assert torch.equal(grad.qdata.view(torch.uint8), pair.qdata.view(torch.uint8))
        assert torch.equal(grad.scale_inv, pair.scale_inv)
        assert torch.equal(grad.dequantize(), pair.dequantize().view(shape))
    wide = grad.dequantize(torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), grad.dequantize())


def test_another_layout_is_taken_by_value() -> None:
    values = values_of(8, 4, 3, 3)
    grad = StoredGradient.cast(values.contiguous(memory_format=torch.channels_last))
    assert torch.equal(grad.dequantize(), StoredGradient.cast(values).dequantize())
    assert StoredGradient.cast(values, torch.bfloat16).dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_fault_stays_visible_where_it_is(fault: float) -> None:
    values = values_of(3, 300)
    values[1, 200] = fault
    grad = StoredGradient.cast(values)
    assert grad.dequantize().isnan().nonzero().tolist() == [[1, 200]]
    assert norm_of(grad).isnan() and norm_of(grad, math.inf).isnan()


@each_dtype
@each_foreach
@pytest.mark.parametrize("ord", [2.0, 1.0, math.inf])
def test_norms_are_those_of_the_values(ord: float, foreach: bool | None, dtype: torch.dtype) -> None:
    params = [parameter(*shape, dtype=dtype) for shape in ((300,), (3, 300), (8, 4, 3, 3), (0, 5))]
    grads = [stored(param) for param in params]
    some = grads[:3] if ord == math.inf else grads  # which an empty tensor has not
    norm = nn.utils.get_total_norm(some, ord, foreach=foreach)
    assert norm.dtype == torch.float32
    assert torch.equal(norm, nn.utils.get_total_norm([grad.dequantize(torch.float32) for grad in some], ord))


@pytest.mark.parametrize("shape", [(2, 300), (600,)], ids=str)
def test_a_file_whose_codes_and_scales_do_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    grad = StoredGradient.cast(values_of(2, 300))
    wrong = StoredGradient(grad.qdata, grad.scale_inv[:1], shape)
    with pytest.raises(ValueError, match=r"shape \(1, 3\).*needs \(2, 3\)"):
        saved_and_loaded(wrong)
    with pytest.raises(ValueError, match="takes a matrix in E4M3"):
        saved_and_loaded(StoredGradient(grad.qdata[:1], grad.scale_inv, shape))


@pytest.mark.parametrize("ord", [2.0, 1.0, 0, math.inf, -math.inf])
def test_norms_of_large_gradients_are_read_in_parts(ord: float, monkeypatch: pytest.MonkeyPatch) -> None:
    grad = StoredGradient.cast(values_of(30, 300).relu())
    whole = norm_of(grad, ord)
    monkeypatch.setattr(stored_gradient, "_ELEMENTS_AT_A_TIME", 1000)
    torch.testing.assert_close(norm_of(grad, ord), whole, rtol=1e-6, atol=0)


@each_dtype
@each_foreach
def test_clipping_goes_to_the_scales(foreach: bool | None, dtype: torch.dtype) -> None:
    params = [parameter(*shape, dtype=dtype) for shape in ((300,), (3, 300), (8, 4, 3, 3))]
    plain = nn.Parameter(torch.ones(7, dtype=dtype))
    plain.grad = torch.randn(7).to(dtype)
    before = [(g.qdata.clone(), g.scale_inv.clone(), g.scale_inv.data_ptr()) for g in map(stored, params)]
    wide = [g.dequantize(torch.float32) for g in map(stored, params)] + [plain.grad.clone()]
    norm = nn.utils.clip_grad_norm_([*params, plain], 0.5, foreach=foreach)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(wide, foreach=False), rtol=1e-6, atol=0)
    factor = torch.clamp(0.5 / (norm + 1e-6), max=1.0)
    for grad, (q, scale_inv, address) in zip(map(stored, params), before, strict=True):
        assert torch.equal(grad.qdata.view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(grad.scale_inv, scale_inv * factor) and grad.scale_inv.data_ptr() == address
    assert torch.equal(plain.grad, wide[-1] * factor.to(dtype)) or dtype != torch.float32
    nn.utils.clip_grad_norm_([*params, plain], 1e9, foreach=foreach)  # nothing to clip
    assert torch.equal(stored(params[0]).scale_inv, before[0][1] * factor)


def test_nothing_waits_for_the_device() -> None:
    """Nothing waits for the device: on the meta device whatever asks for a number raises."""
    param = nn.Parameter(torch.ones(3, 300, device="meta"))
    q = torch.empty(3, 300, dtype=torch.float8_e4m3fn, device="meta")
    param.grad = StoredGradient(q, torch.empty(3, 3, device="meta"), (3, 300))
    assert nn.utils.clip_grad_norm_([param], 1.0).is_meta
    param.grad.zero_()
    found_inf, scale = torch.empty(1, device="meta"), torch.empty(1, device="meta")
    torch._amp_foreach_non_finite_check_and_unscale_([param.grad], found_inf, scale)


def test_factors() -> None:
    grad = StoredGradient.cast(values_of(3, 300))
    values = grad.dequantize()
    for scaled, factor in (
        (lambda: grad.mul_(2.0), 2.0),
        (lambda: grad.mul_(torch.tensor([0.5])), 0.5),
        (lambda: grad.div_(4), 0.25),
        (lambda: grad.div_(torch.tensor(2.0)), 0.5),
        (lambda: torch._foreach_mul_([grad], 8.0), 8.0),
        (lambda: torch._foreach_div_([grad], torch.tensor(2.0)), 0.5),
        (lambda: grad.mul_(-1.0), -1.0),
    ):
        scaled()
        values = values * factor
        assert torch.equal(grad.dequantize(), values)


def test_zeros_can_be_added_to_and_nothing_else() -> None:
    param = parameter(3, 300)
    with pytest.raises(UnsupportedOpError, match=r"optimizer\.accumulate\(\)"):
        param.sum().backward()
    for zero in (lambda: param.grad.zero_(), lambda: torch._foreach_zero_([param.grad])):
        zero()
        assert not stored(param).dequantize().any() and stored(param).is_zero
        (param * 3).sum().backward()
        assert torch.equal(stored(param).dequantize(), StoredGradient.cast(torch.full((3, 300), 3.0)).dequantize())
        with pytest.raises(UnsupportedOpError, match="rounded a second time"):
            param.sum().backward()
    other = StoredGradient.cast(values_of(3, 300))
    assert torch.equal(param.grad.zero_().add_(other).dequantize(), other.dequantize())


@pytest.mark.parametrize("alpha", [0.5, -2.0])
def test_a_factor_of_what_is_added_goes_to_the_scales(alpha: float) -> None:
    values, grad = values_of(3, 300), StoredGradient.cast(values_of(3, 300))
    for addend in (values, StoredGradient.cast(values)):
        grad.zero_().add_(addend, alpha=alpha)
        assert torch.equal(grad.dequantize(), StoredGradient.cast(values).dequantize() * alpha)
    with pytest.raises(UnsupportedOpError, match="rounded a second time"):
        grad.add_(values, alpha=alpha)


@pytest.mark.parametrize(
    ("use", "remedy"),
    [
        (lambda g: g + 1, r"\.grad\.dequantize\(\)"),
        (lambda g: torch.ones(3, 300) + g, r"\.grad\.dequantize\(\)"),
        (lambda g: g * 2, "gradient_storage=None"),
        (lambda g: g.abs(), r"\.grad\.dequantize\(\)"),
        (lambda g: g.view(-1), r"for views .* read \.grad\.dequantize\(\)"),
        (lambda g: g.mul_(torch.ones(300)), "by one number, which goes to its scales"),
        (lambda g: torch.ones(3, 300).mul_(g), "by one number, which goes to its scales"),
        (lambda g: torch.linalg.vector_norm(g, 2, dim=0), "for views and other norms"),
        (lambda g: g.clamp_(-1, 1), "gradient_storage=None"),
    ],
)
def test_what_makes_no_sense_raises(use: Any, remedy: str) -> None:
    with pytest.raises(UnsupportedOpError, match=remedy):
        use(StoredGradient.cast(values_of(3, 300)))


@pytest.mark.parametrize("foreach", [True, False])
def test_torchs_optimizers_say_what_to_use(foreach: bool) -> None:
    param = parameter(3, 300)
    with pytest.raises(UnsupportedOpError, match=r"octavo\.optim"):
        torch.optim.AdamW([param], foreach=foreach).step()


@each_dtype
def test_a_grad_scaler_unscales_and_finds_faults(dtype: torch.dtype) -> None:
    for fault in (None, math.nan, math.inf):
        values = values_of(3, 300, dtype=dtype)
        if fault is not None:
            values[2, 299] = fault
        grads = [StoredGradient.cast(values), StoredGradient.cast(values_of(7, dtype=dtype))]
        plain = torch.ones(4, dtype=dtype)
        before = [grad.dequantize(torch.float32) for grad in grads]
        found_inf = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([*grads, plain], found_inf, torch.tensor([0.25]))
        assert float(found_inf) == (fault is not None)
        for grad, old in zip(grads, before, strict=True):
            assert torch.equal((grad.dequantize(torch.float32) * 4).nan_to_num(), old.nan_to_num())
        assert torch.equal(plain, torch.full((4,), 0.25, dtype=dtype))


def test_a_fault_that_was_found_stays_found() -> None:
    found_inf = torch.ones(1)
    torch._amp_foreach_non_finite_check_and_unscale_([StoredGradient.cast(torch.ones(3))], found_inf, torch.ones(1))
    assert float(found_inf) == 1.0


@each_shape
def test_copies(shape: tuple[int, ...]) -> None:
    grad = StoredGradient.cast(values_of(*shape), torch.bfloat16)
    for other in (copy.deepcopy(grad), grad.clone(), grad.detach(), grad.view(shape)):
        assert isinstance(other, StoredGradient) and other.dtype == torch.bfloat16 and other.shape == grad.shape
        assert torch.equal(other.dequantize(), grad.dequantize())
    assert grad.clone().qdata.data_ptr() != grad.qdata.data_ptr() or not grad.numel()
    assert grad.float().dtype == torch.float32 and isinstance(grad.float(), StoredGradient)
    inner, context = grad.__tensor_flatten__()
    again = StoredGradient.__tensor_unflatten__({name: getattr(grad, name) for name in inner}, context, None, None)
    assert torch.equal(again.dequantize(), grad.dequantize()) and repr(again) == repr(grad)


# --- What stands for a gradient that is gone: it has a norm and can be dropped; nothing else can be done with it.


def used(*shape):
    param = nn.Parameter(torch.zeros(shape))
    param.grad = UsedGradient(param, torch.tensor(3.0))
    return param


@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (0, 2)])
def test_it_is_dropped_like_any_gradient(shape):
    param = used(*shape)
    optimizer = torch.optim.SGD([param], 0.1)
    optimizer.zero_grad(set_to_none=False)
    assert isinstance(param.grad, UsedGradient) and param.grad.shape == shape
    optimizer.zero_grad()
    assert param.grad is None


@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_norm_is_read_and_a_clip_that_changes_nothing_passes(foreach):
    params = used(4, 5), nn.Parameter(torch.zeros(2))
    params[1].grad = torch.tensor([0.0, 4.0])
    for largest in (float("inf"), 5.1):
        assert nn.utils.clip_grad_norm_(params, largest, foreach=foreach) == 5.0
    assert params[1].grad.tolist() == [0.0, 4.0]
    with pytest.raises(UnsupportedOpError, match="switch the caller's clipping off"):
        nn.utils.clip_grad_norm_(params, 4.9, foreach=foreach)


@pytest.mark.parametrize(
    "use",
    [
        lambda param: nn.utils.clip_grad_norm_([param], 9.0, norm_type=1.0),
        lambda param: nn.utils.clip_grad_value_([param], 1.0),
        lambda param: param.grad.div_(2),
        lambda param: param.grad.mul_(torch.ones(()) * 0.5),
        lambda param: param.grad.clone(),
        lambda param: param.grad.view(-1),
        lambda param: torch.linalg.vector_norm(param.grad, dim=0),
    ],
)
def test_whatever_else_is_done_with_it_raises(use):
    with pytest.raises(UnsupportedOpError, match="a gradient that is gone"):
        use(used(4, 5))


def test_what_is_added_to_it_comes_too_late():
    with pytest.raises(UnsupportedOpError, match="updated already"):
        used(4, 5).sum().backward()
