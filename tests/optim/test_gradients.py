"""Gradients kept in FP8: rounded once, summed in float32, and a step by them is one by rounded ones."""

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedOpError
from octavo.optim import SGD, Adam, AdamW, update_in_backward
from octavo.optim.gradients import GradientHooks, GradientStorage
from octavo.tensor.stored_gradient import StoredGradient
from tests.support import trained
from tests.support.memory import peak_bytes
from tests.support.trained import grads_of, loss_of

model_of = functools.partial(trained.model_of, shaped=True)


def test_a_gradient_is_a_pair_before_the_next_comes() -> None:
    model, kinds = model_of("bf16"), []
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    for param in model.parameters():  # after the optimizer's
        param.register_post_accumulate_grad_hook(lambda param: kinds.append([type(g) for g in grads_of(model)]))
    loss_of(model).backward()
    assert [len(kinds_of_step) for kinds_of_step in kinds] == list(range(1, 9))
    assert {kind for kinds_of_step in kinds for kind in kinds_of_step} == {StoredGradient}
    optimizer.step()


def test_a_second_backward_is_refused() -> None:
    model = model_of("tied")
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


def test_a_step_makes_no_gradient_of_full_size() -> None:
    weight = nn.Parameter(torch.randn(1024, 1024))
    optimizer = AdamW([weight], gradient_storage="fp8")
    for _ in range(2):
        (weight * torch.randn(1024, 1024)).sum().backward()
        held = peak_bytes(optimizer.step)
        optimizer.zero_grad()
    assert held <= 1 << 20  # at most a piece; the compiled step has none. A gradient in float32 has 4 << 20


def test_hooks_whose_object_has_gone_do_nothing() -> None:
    class Taker:
        def take(self, param: nn.Parameter) -> None:
            taken.append(param)

    taken: list[nn.Parameter] = []
    taker, param = Taker(), nn.Parameter(torch.ones(2))
    hooks = GradientHooks(taker.take, "no DDP")
    hooks.attach([param])
    param.sum().backward()
    assert taken == [param]
    del taker
    param.sum().backward()
    assert len(taken) == 1 and param.grad.tolist() == [2.0, 2.0] and hooks.handles


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
