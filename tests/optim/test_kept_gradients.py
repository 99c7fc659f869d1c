"""A step by gradients kept in FP8 equals one by gradients that were rounded by hand; what goes around it works."""

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.optim import AdamW
from octavo.tensor.stored_gradient import StoredGradient
from tests.support.in_backward_models import assert_same, tensors_of
from tests.support.kept_gradients import KINDS, OPTIMIZERS, by_hand, grads_of, loss_of, model_of

# SGD does not step weights that are stored in FP8
CELLS = [(kind, name) for kind in KINDS for name in OPTIMIZERS if not (kind.startswith("fp8") and "SGD" in name)]


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


class Largest(TorchDispatchMode):
    """The most bytes of any float tensor that an op makes, the weight itself not counted."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.bytes, self.own = 0, weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.is_floating_point() and x.untyped_storage().data_ptr() != self.own:
                self.bytes = max(self.bytes, x.numel() * x.dtype.itemsize)
        return result


def test_a_step_makes_no_gradient_of_full_size() -> None:
    weight = nn.Parameter(torch.randn(1024, 1024))
    optimizer = AdamW([weight], gradient_storage="fp8")
    (weight * torch.randn(1024, 1024)).sum().backward()
    with Largest(weight) as found:
        optimizer.step()
    assert 4 << 17 <= found.bytes <= 1 << 20  # a piece, and of all the codes: a gradient in float32 has 4 << 20


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("of_model", [False, True], ids=["optimizer's", "model's"])
def test_gradients_that_are_set_to_zero_can_be_added_to(of_model: bool, micro: int) -> None:
    found = []
    for set_to_none in (True, False):
        model = model_of("bf16")
        optimizer = AdamW(model.parameters(), gradient_storage="fp8")
        for _ in range(2):
            (model if of_model else optimizer).zero_grad(set_to_none=set_to_none)
            for _ in range(micro - 1):
                with optimizer.accumulate():
                    loss_of(model).backward()
            loss_of(model).backward()
            optimizer.step()
        assert all(isinstance(grad, StoredGradient) for grad in grads_of(model))
        found.append((model, optimizer))
        torch.manual_seed(0)
    assert_same(*found)


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


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_is_heeded(unscale: bool) -> None:
    """A scale of a power of two changes no code, so the steps are those without it."""
    found = []
    for scaled in (True, False):
        model = model_of("fp32")
        optimizer = AdamW(model.parameters(), lr=1e-2, gradient_storage="fp8")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(4):
            loss = scaler.scale(loss_of(model))
            if step == 2:
                if not scaled:
                    continue
                loss = loss * math.inf
            loss.backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert not scaled or scaler.get_scale() == 512.0
        found.append((model, optimizer))
        torch.manual_seed(0)
    assert_same(*found)


@pytest.mark.parametrize("name", ["AdamW fp32", "SGD"])
def test_a_closure(name: str) -> None:
    found = []
    for inside in (True, False):
        model = model_of()
        optimizer = OPTIMIZERS[name](model.parameters(), gradient_storage="fp8")

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(2):
            loss = optimizer.step(closure) if inside else closure()
            if not inside:
                optimizer.step()
            assert loss.item() > 0
        found.append((model, optimizer))
        torch.manual_seed(0)
    assert_same(*found)


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
    model = model_of()
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


def test_copies() -> None:
    model = model_of("fp8")
    optimizer = AdamW(model.parameters(), lr=1e-2, gradient_storage="fp8")
    loss_of(model).backward()
    twin = copy.deepcopy(model)  # torch copies a gradient only of what is no plain Parameter
    optimizer.step()
    assert "gradient_storage" not in str(optimizer.state_dict())
    plain = AdamW(model_of("fp8").parameters(), lr=1e-2)
    plain.load_state_dict(optimizer.state_dict())
    twin.zero_grad()
    loss_of(twin).backward()
    assert {type(grad) for grad in grads_of(twin)} == {Tensor}
    both = copy.deepcopy((model, optimizer))
    for one in ((model, optimizer), both):
        torch.manual_seed(3)
        one[1].zero_grad()
        loss_of(one[0]).backward()
        assert {type(grad) for grad in grads_of(one[0])} == {StoredGradient}
        one[1].step()
    assert_same((model, optimizer), both)
