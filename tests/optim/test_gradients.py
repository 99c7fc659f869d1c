"""Gradients kept in FP8: rounded once, summed in float32, and a step by them is one by rounded ones."""

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedOpError
from octavo.optim import SGD, Adam, AdamW, update_in_backward
from octavo.optim.gradients import GradientStorage
from octavo.tensor.stored_gradient import StoredGradient
from tests.support import trained
from tests.support.memory import peak_bytes
from tests.support.trained import grads_of, loss_of

KINDS = ["fp32", "bf16", "fp8", "fp8 in blocks", "tied"]
each_kind = pytest.mark.parametrize("kind", KINDS)
model_of = functools.partial(trained.model_of, shaped=True)


@each_kind
def test_gradients_are_rounded_once_to_nearest(kind: str) -> None:
    model, other = model_of(kind), model_of(kind)
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    torch.manual_seed(1)
    loss_of(model).backward()
    torch.manual_seed(1)
    loss_of(other).backward()
    for param, plain in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(param.grad, StoredGradient)
        assert param.grad.shape == param.shape and param.grad.dtype == param.dtype
        assert torch.equal(param.grad.dequantize(), StoredGradient.cast(plain.grad).dequantize())
    optimizer.step()


def test_bytes() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 512, bias=False)).bfloat16()
    AdamW(model.parameters())
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    model(torch.randn(2, 1024, dtype=torch.bfloat16)).sum().backward()
    held = sum(getattr(g, n).untyped_storage().nbytes() for g in grads_of(model) for n in ("qdata", "scale_inv"))
    assert held <= 1.04 * sum(param.numel() for param in model.parameters())
    optimizer.step()


def test_a_gradient_is_a_pair_before_the_next_comes() -> None:
    model, kinds = model_of("bf16"), []
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    for param in model.parameters():  # after the optimizer's
        param.register_post_accumulate_grad_hook(lambda param: kinds.append([type(g) for g in grads_of(model)]))
    loss_of(model).backward()
    assert [len(found) for found in kinds] == list(range(1, 9))
    assert {kind for found in kinds for kind in found} == {StoredGradient}
    optimizer.step()


@each_kind
def test_a_second_backward_is_refused(kind: str) -> None:
    model = model_of(kind)
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    loss_of(model).backward()
    with pytest.raises(UnsupportedOpError, match=r"within optimizer\.accumulate\(\)"):
        loss_of(model).backward()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def test_what_else_it_could_be_is_refused() -> None:
    params = [nn.Parameter(torch.ones(3))]
    for make in (AdamW, Adam, SGD):
        with pytest.raises(ValueError, match="gradient_storage='e5m2': use None or 'fp8'"):
            make(params, gradient_storage="e5m2")
    optimizer = AdamW(params, gradient_storage="fp8")
    with pytest.raises(ValueError, match="choose one"):
        update_in_backward(optimizer)
    assert optimizer.in_backward is None


def test_accumulate_without_storage_is_torchs_or_update_in_backwards() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW([weight])
    with optimizer.accumulate():
        weight.sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    optimizer.zero_grad()
    handle = update_in_backward(optimizer, 0)
    with optimizer.accumulate():
        weight.sum().backward()
    assert weight.grad is not None and handle.launches == 0


def test_the_dtype_that_a_user_gave_gradients_stays() -> None:
    for dtype in (torch.float32, None):
        weight = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
        weight.grad_dtype = dtype
        storage = GradientStorage()
        storage.hooks.attach([weight])
        with storage.accumulate():
            weight.sum().backward()
        weight.sum().backward()
        assert weight.grad_dtype == dtype
        assert isinstance(weight.grad, StoredGradient)


def test_parameters_that_a_client_replaces_are_followed_and_let_go() -> None:
    first, second = (nn.Parameter(torch.ones(300)) for _ in range(2))
    optimizer = AdamW([first], gradient_storage="fp8")
    optimizer.param_groups[0]["params"] = [second]  # as accelerate's FSDP2 does
    optimizer.step()
    second.sum().backward()
    assert isinstance(second.grad, StoredGradient)
    gone = weakref.ref(first)
    del first
    assert gone() is None


# SGD does not step weights that are stored in FP8
def test_a_step_makes_no_gradient_of_full_size() -> None:
    weight = nn.Parameter(torch.randn(1024, 1024))
    optimizer = AdamW([weight], gradient_storage="fp8")
    for _ in range(2):
        (weight * torch.randn(1024, 1024)).sum().backward()
        held = peak_bytes(optimizer.step)
        optimizer.zero_grad()
    assert held <= 1 << 20  # at most a piece; the compiled step has none. A gradient in float32 has 4 << 20


def test_it_ends_with_the_optimizer() -> None:
    model = model_of("fp32")
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    loss_of(model).backward()
    optimizer.step()
    end = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert end() is None
    model.zero_grad()
    loss_of(model).backward()
    assert {type(grad) for grad in grads_of(model)} == {Tensor}
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    torch.optim.AdamW(model.parameters()).step()
