"""Gradients kept in FP8: rounded once, summed in float32, and a step by them is one by rounded ones."""

import copy
import functools
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedOpError
from octavo.optim import SGD, Adam, AdamW, update_in_backward
from octavo.optim.gradients import GradientStorage
from octavo.tensor.stored_gradient import StoredGradient
from tests.support import trained
from tests.support.memory import peak_bytes
from tests.support.trained import assert_same, by_hand, grads_of, loss_of, tensors_of

KINDS = ["fp32", "bf16", "fp8", "fp8 in blocks", "tied"]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda params, **options: AdamW(params, lr=1e-2, **options),
    "AdamW fp32": lambda params, **options: AdamW(params, lr=1e-2, moments="fp32", **options),
    "Adam bf16": lambda params, **options: Adam(params, lr=1e-2, weight_decay=0.1, moments="bf16", **options),
    "SGD": lambda params, **options: SGD(params, lr=1e-2, momentum=0.9, **options),
    "SGD alone": lambda params, **options: SGD(params, lr=1e-2, weight_decay=0.1, **options),
}

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


def test_small_addends_are_not_lost() -> None:
    weight = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = AdamW([weight], gradient_storage="fp8")
    weight.grad_dtype = torch.bfloat16
    with optimizer.accumulate():
        weight.sum().backward()
        for _ in range(255):
            (weight * 2.0**-9).sum().backward()  # nothing beside 1 in bf16
    (weight * 2.0**-9).sum().backward()
    torch.testing.assert_close(weight.grad.dequantize(torch.float32), torch.full((256,), 1.5))


def test_a_weight_that_the_last_micro_batch_does_not_reach_keeps_its_sum() -> None:
    model, other = model_of("bf16"), model_of("bf16")
    optimizer = AdamW(model.parameters(), lr=1e-2, gradient_storage="fp8")
    torch.manual_seed(1)
    loss_of(other).backward()
    expected = other[0].weight.grad.float()
    torch.manual_seed(1)
    with optimizer.accumulate():
        loss_of(model).backward()
    loss_of(model[1:]).backward()
    assert torch.equal(model[0].weight.grad, expected) and isinstance(model[1].weight.grad, StoredGradient)
    wide = [grad.dequantize(torch.float32) if isinstance(grad, StoredGradient) else grad for grad in grads_of(model)]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(wide), rtol=1e-6, atol=0)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


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
CELLS = [(kind, name) for kind in KINDS for name in OPTIMIZERS if not (kind.startswith("fp8") and "SGD" in name)]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "name"), CELLS)
def test_a_step_is_that_of_rounded_gradients(kind: str, name: str) -> None:
    found = []
    for storage in ("fp8", None):
        model = model_of(kind)
        optimizer = OPTIMIZERS[name](model.parameters(), gradient_storage=storage)
        for _ in range(3):
            loss_of(model).backward()
            if storage is None:
                for param in model.parameters():
                    by_hand(param)
            assert all(isinstance(grad, StoredGradient) == (storage is not None) for grad in grads_of(model))
            optimizer.step()
            optimizer.zero_grad()
            for param in model.parameters():
                param.grad_dtype = param.dtype
        found.append((model, optimizer))
        torch.manual_seed(0)
    assert_same(*found)


def test_a_step_makes_no_gradient_of_full_size() -> None:
    weight = nn.Parameter(torch.randn(1024, 1024))
    optimizer = AdamW([weight], gradient_storage="fp8")
    for _ in range(2):
        (weight * torch.randn(1024, 1024)).sum().backward()
        held = peak_bytes(optimizer.step)
        optimizer.zero_grad()
    assert held <= 1 << 20  # at most a piece; the compiled step has none. A gradient in float32 has 4 << 20


def test_loading_a_state_keeps_the_hooks() -> None:
    model = model_of("bf16")
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [len(param._post_accumulate_grad_hooks) for param in model.parameters()] == [1] * 8
    loss_of(model).backward()
    assert {type(grad) for grad in grads_of(model)} == {StoredGradient}


def test_a_step_by_zeros_decays() -> None:
    weight = nn.Parameter(torch.ones(3, 5))
    optimizer = AdamW([weight], lr=0.5, weight_decay=0.1, moments="fp32", gradient_storage="fp8")
    weight.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert torch.equal(weight, torch.full((3, 5), 0.95))


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_step_with_a_fault_is_skipped(name: str, fault: float) -> None:
    model = model_of("bf16")
    optimizer = OPTIMIZERS[name](model.parameters(), gradient_storage="fp8", skip_nonfinite=True)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {key: value.clone() for key, value in tensors_of(model, optimizer).items()}
    (loss_of(model) * fault).backward()
    optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in tensors_of(model, optimizer).items())
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    assert not all(torch.equal(value, before[key]) for key, value in tensors_of(model, optimizer).items())


def test_later_groups_and_parameters_that_were_frozen() -> None:
    first, second, frozen = (nn.Parameter(torch.ones(300)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = AdamW([first, frozen], gradient_storage="fp8")
    optimizer.add_param_group({"params": [second], "lr": 0.1})
    (first * second).sum().backward()
    optimizer.step()
    assert isinstance(first.grad, StoredGradient) and isinstance(second.grad, StoredGradient)
    optimizer.zero_grad()
    frozen.requires_grad_(True)
    (first * frozen).sum().backward()
    assert type(frozen.grad) is Tensor  # exact, and from the next step on a pair
    optimizer.step()
    optimizer.zero_grad()
    (first * frozen).sum().backward()
    assert isinstance(frozen.grad, StoredGradient)


def test_gradients_set_by_hand_beside_pairs() -> None:
    """Now of one weight, now of the other, so that each is now a pair, now not."""
    found = []
    for storage in ("fp8", None):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3, 300)) for _ in range(2)]
        optimizer = AdamW(params, lr=1e-2, gradient_storage=storage)
        for step in range(4):
            kept, given = params[step % 2], params[1 - step % 2]
            (kept * torch.randn(3, 300)).sum().backward()
            if storage is None:
                by_hand(kept)
            given.grad = torch.randn(3, 300)
            assert isinstance(kept.grad, StoredGradient) == (storage is not None)
            nn.utils.clip_grad_norm_(params, 1e9)
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach() for param in params])
    assert all(map(torch.equal, *found))


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
