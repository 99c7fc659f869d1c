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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.errors import UnsupportedOpError
from octavo.optim import SGD, Adam, AdamW, update_in_backward
from octavo.optim.gradients import GradientStorage
from octavo.optim.state import local
from octavo.tensor.stored_gradient import StoredGradient
from tests.support import trained
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


# --- a step -----------------------------------------------------------------------------------------------------------


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
        model = model_of("fp32")
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


# --- under FSDP2, clipped by the norm of all --------------------------------------------------------------------------


def sharded_like(part: Tensor, param: nn.Parameter) -> DTensor:
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def round_by_hand(params: list[nn.Parameter], sums: list[Tensor], most: float) -> Tensor:
    """Round sums and clip them as the scales of pairs are: their norm."""
    pairs = [StoredGradient.cast(part) for part in sums]
    exact = [sharded_like(pair.dequantize(), param) for pair, param in zip(pairs, params, strict=True)]
    norm = nn.utils.get_total_norm(exact).full_tensor()
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for param, pair in zip(params, pairs, strict=True):
        pair.mul_(factor)
        param.grad = None
        param.grad_dtype = torch.float32
        param.grad = sharded_like(pair.dequantize(), param)
    return norm


def one_run(mesh: Any, dtype: torch.dtype, storage: str | None, micro: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 48), nn.Tanh(), nn.Linear(48, 370), nn.Linear(370, 5)).to(dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    optimizer = AdamW(params, lr=1e-2, skip_nonfinite=True, gradient_storage=storage)
    torch.manual_seed(1 + mesh.get_local_rank())
    found = {}

    def backward() -> None:
        model(torch.randn(8, 200, dtype=dtype)).float().square().mean().backward()

    for step in range(2):
        sums: list[Tensor] = []
        for number in range(micro):
            if storage is None:
                backward()
                parts = [local(param.grad).float() for param in params]
                sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
                optimizer.zero_grad()
            elif number < micro - 1:
                with optimizer.accumulate():
                    backward()
            else:
                backward()
        if storage is None:
            found[f"norm {step}"] = round_by_hand(params, sums, 0.05)
        else:
            assert all(isinstance(param.grad, DTensor) for param in params)
            assert all(isinstance(local(param.grad), StoredGradient) for param in params)
            found[f"norm {step}"] = nn.utils.clip_grad_norm_(params, 0.05).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.grad_dtype = param.dtype
    for name, param in model.named_parameters():
        found[name] = local(param).detach().clone()
        found |= {f"{name} {key}": local(value).clone() for key, value in optimizer.state[param].items()}
    return found


def sharded_equals(mesh: Any, dtype: torch.dtype) -> list[str]:
    """What differs between gradients in FP8, clipped by their global norm, and such by hand."""
    wrong = []
    for micro in (1, 2):
        ours, theirs = (one_run(mesh, dtype, storage, micro) for storage in ("fp8", None))
        wrong += [f"{micro} {name}" for name, x in ours.items() if not torch.equal(x, theirs[name])]
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sharded(dtype: torch.dtype, pool: Any) -> None:
    assert pool.run(sharded_equals, (2,), dtype) == [[], []]
