"""Gradients kept in FP8: rounded once, summed in float32, and what else is asked of them raises."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedOpError
from octavo.optim import SGD, Adam, AdamW, update_in_backward
from octavo.optim.gradients import GradientStorage
from octavo.tensor.stored_gradient import StoredGradient
from tests.support.kept_gradients import each_kind, grads_of, loss_of, model_of


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
@pytest.mark.parametrize("micro", [2, 3])
def test_micro_batches_are_summed_in_float32(kind: str, micro: int) -> None:
    model, other = model_of(kind), model_of(kind)
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    for step in range(2):
        sums: dict[str, Tensor] = {}
        torch.manual_seed(step)
        for number in range(micro):
            for param in other.parameters():  # uses of a tied weight are summed so too
                param.grad_dtype = torch.float32 if number else param.dtype
            loss_of(other).backward()
            for name, param in other.named_parameters():
                sums[name] = sums[name] + param.grad.float() if name in sums else param.grad.float()
            other.zero_grad()
        torch.manual_seed(step)
        for number in range(micro):
            if number < micro - 1:
                with optimizer.accumulate():
                    loss_of(model).backward()
                assert {(type(grad), grad.dtype) for grad in grads_of(model)} == {(Tensor, torch.float32)}
            else:
                loss_of(model).backward()
        for name, param in model.named_parameters():
            assert isinstance(param.grad, StoredGradient) and param.grad.dtype == param.dtype
            expected = StoredGradient.cast(sums[name])
            assert torch.equal(param.grad.dequantize(torch.float32), expected.dequantize())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()  # so that both models stay alike


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


def test_sparse_gradients_stay_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = AdamW(table.parameters(), gradient_storage="fp8")
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense gradients only"):
        optimizer.step()


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
