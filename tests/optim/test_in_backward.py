"""Updates in backward equal a step after it, bit for bit; gradients do not stay; what can't be exact is refused."""

import copy
import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.optim import AdamW, base, update_in_backward
from octavo.optim.gradient_norms import GradientNorms
from octavo.optim.in_backward import EstimatedNorm, LastStepNorm, PerParameterNorm
from octavo.tensor.stored_gradient import UsedGradient
from octavo.tensor.stored_weight import StoredWeight
from tests.support import in_backward_tasks
from tests.support.helpers import every_layer
from tests.support.in_backward_models import (
    HUGE,
    WEIGHT,
    D,
    assert_close,
    assert_same,
    loss_of,
    model_of,
    run,
    train,
)
from tests.support.pool import free_port

THRESHOLDS = [0, 2 * WEIGHT + 1, HUGE]
KINDS = ["bf16", "fp32", "fp8", "fp8 in blocks", "tied"]

each_kind = pytest.mark.parametrize("kind", KINDS)
each_threshold = pytest.mark.parametrize("threshold", THRESHOLDS)


@each_threshold
@each_kind
@pytest.mark.parametrize("micro", [1, 3])
def test_equal_to_a_step_after_backward(kind: str, threshold: int, micro: int) -> None:
    assert_same(run(kind, threshold, micro=micro), run(kind, None, micro=micro))


@each_threshold
@pytest.mark.parametrize("kind", ["bf16", "fp8", "tied"])
def test_checkpoints(kind: str, threshold: int) -> None:
    assert_same(run(kind, threshold, reentrant=False), run(kind, None, reentrant=False))


@each_threshold
def test_reentrant_checkpoints(threshold: int) -> None:
    assert_same(run("bf16", threshold, reentrant=True), run("bf16", None, reentrant=True))


def test_reentrant_checkpoints_that_share_a_weight() -> None:
    assert_same(run("tied", HUGE, reentrant=True), run("tied", None, reentrant=True))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run("tied", 0, reentrant=True)


def test_a_second_backward_is_refused() -> None:
    model = model_of()
    optimizer = AdamW(model.parameters())
    update_in_backward(optimizer, 0)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"within handle\.accumulate\(\)"):
        loss_of(model).backward()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("threshold", [0, HUGE])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_backward_that_fails_is_a_step_of_what_it_updated(kind: str, threshold: int, reentrant: bool | None) -> None:
    """Out of memory, say; then the usual: catch, zero_grad, the next batch."""

    def fail(grad: Tensor) -> None:
        raise MemoryError("no room")

    found = []
    for in_backward in (True, False):
        model, fails = model_of(kind), iter([False, True, True, False])
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if in_backward:
            update_in_backward(optimizer, threshold, EstimatedNorm(1e9))
        for failing in fails:
            y = model[:2](torch.randn(8, D, dtype=torch.bfloat16).requires_grad_())
            if failing:
                y.register_hook(fail)
            for layer in model[2:-1]:
                y = layer(y) if reentrant is None else checkpoint(layer, y, use_reentrant=reentrant)
            try:
                model[-1](y).float().square().mean().backward()
                optimizer.step()
            except MemoryError:
                if not in_backward and threshold == 0:
                    optimizer.step()
            optimizer.zero_grad()
        found.append((model, optimizer))
    assert_same(*found)
    model, optimizer = found[0]
    loss_of(model).backward()
    optimizer.zero_grad()
    if threshold == 0:  # a backward that ended is no failure
        with pytest.raises(RuntimeError, match=r"within handle\.accumulate\(\)"):
            loss_of(model).backward()


def test_nothing_is_held_by_hooks() -> None:
    """A deleted optimizer goes, with its model; a model that stays keeps no hook of it."""
    model = model_of()
    optimizer = AdamW(model.parameters())
    handle = update_in_backward(optimizer, 0)
    train(model, optimizer, 1)
    gone = [weakref.ref(found) for found in (optimizer, handle, *model.parameters())]
    del optimizer, handle
    gc.collect()
    assert [ref() for ref in gone[:2]] == [None, None]
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    del model
    gc.collect()
    assert not any(ref() for ref in gone)


@each_threshold
def test_gradients_do_not_stay(threshold: int) -> None:
    model = model_of()
    params = list(model.parameters())
    handle = update_in_backward(AdamW(params), threshold)
    live: list[int] = []

    def count(param: nn.Parameter) -> None:  # after update_in_backward's
        own = [p.grad for p in params if p.grad is not None and not isinstance(p.grad, UsedGradient)]
        live.append(sum(gradient.numel() * gradient.element_size() for gradient in own))

    for param in params:
        param.register_post_accumulate_grad_hook(count)
    loss_of(model).backward()
    assert len(live) == len(params)
    assert all(found < max(threshold, 1) for found in live)
    assert handle.most_bytes <= min(threshold + WEIGHT, 4 * (WEIGHT + 2 * D))
    handle.optimizer.step()
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize(
    ("threshold", "in_backward", "in_all"), [(0, 8, 8), (2 * (WEIGHT + 2 * D), 2, 2), (HUGE, 0, 1)]
)
def test_a_launch_a_crossing(threshold: int, in_backward: int, in_all: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    launch = base.optimizer_step
    monkeypatch.setattr(base, "optimizer_step", lambda some, *rest: (calls.append(len(some)), launch(some, *rest)))
    model = model_of()
    optimizer = AdamW(model.parameters())
    handle = update_in_backward(optimizer, threshold)
    loss_of(model).backward()
    assert handle.launches == len(calls) == in_backward
    optimizer.step()
    assert handle.launches == len(calls) == in_all
    assert sum(calls) == 8


class Mixed(nn.Module):
    """10 M parameters in tensors of uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [512, 1024, 2048, 1024, 1536, 1024, 640]
        self.embedding = nn.Embedding(128, sizes[0])
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in sizes[:-1])
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = layer(norm(y))
        return y


def test_bytes_a_parameter() -> None:
    model = Mixed().bfloat16()
    octavo.convert(model, octavo.recipes.dynamic(), select=every_layer, weight_storage="fp8")
    optimizer = AdamW(model.parameters(), moments="fp8", master="auto")
    handle = update_in_backward(optimizer, 1 << 20)
    model(torch.arange(16)).float().square().mean().backward()
    optimizer.step()
    params = list(model.parameters())
    kept = [part for p in params for part in ((p.qdata, p.scale_inv) if isinstance(p, StoredWeight) else (p,))]
    kept += [value for p in params for value in optimizer.state[p].values()]
    count = sum(p.numel() for p in params)
    assert 8e6 < count < 12e6 and len({p.numel() for p in params}) > 8
    assert sum(x.numel() * x.element_size() for x in kept) / count <= 4.15
    assert handle.most_bytes <= (1 << 20) + 2 * max(p.numel() for p in params)


def test_a_scheduler() -> None:
    found = []
    for threshold in (None, 0):
        model = model_of()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if threshold is not None:
            update_in_backward(optimizer, threshold)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                train(model, optimizer, 1)
                scheduler.step()
        assert scheduler.get_last_lr() == [1e-2 / 8]
        found.append((model, optimizer))
    assert_same(*found)


def test_remove() -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    handle = update_in_backward(optimizer, HUGE)
    train(model, optimizer, 2)
    loss_of(model).backward()
    handle.remove()  # gradients that wait are the step's
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert handle.launches == 2
    assert_same((model, optimizer), run("bf16", None, steps=4))
    update_in_backward(optimizer).remove()


def test_gradients_that_wait_may_be_dropped() -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    handle = update_in_backward(optimizer, HUGE)
    loss_of(model).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert handle.launches == 0 and not optimizer.state
    train(model, optimizer, 2)
    assert handle.most_bytes == 4 * (WEIGHT + 2 * D)


def test_what_is_refused() -> None:
    params = list(model_of().parameters())
    with pytest.raises(TypeError, match="not AdamW"):
        update_in_backward(torch.optim.AdamW(params))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="skip_nonfinite"):
        update_in_backward(AdamW(params, skip_nonfinite=True))
    optimizer = AdamW(params)
    with pytest.raises(ValueError, match="=-1 must be at least 0"):
        update_in_backward(optimizer, -1)
    assert optimizer.in_backward is None
    update_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="already"):
        update_in_backward(optimizer)


def test_a_closure_is_evaluated_once() -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    handle = update_in_backward(optimizer, 0)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(loss_of(model))
        losses[-1].backward()
        return losses[-1]

    for _ in range(3):
        assert optimizer.step(closure) is losses[-1]
    assert len(losses) == 3 and handle.launches == 3 * 8
    assert_same((model, optimizer), run("bf16", None))


def test_a_grad_scaler_is_refused_before_the_first_update() -> None:
    model = model_of("fp32")
    before = copy.deepcopy(model.state_dict())
    optimizer = AdamW(model.parameters())
    handle = update_in_backward(optimizer, 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match="GradScaler decides by all gradients"):
        scaler.step(optimizer)
    assert handle.launches == 0 and not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_grad_scaler_of_another_model_delays_the_first_step_alone() -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    handle = update_in_backward(optimizer, 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    train(model, optimizer, 2)
    assert handle.launches == 1 + 8
    assert_same((model, optimizer), run("bf16", None, steps=2))


@pytest.mark.parametrize(
    ("threshold", "raises"), [(0, True), (2 * (WEIGHT + 2 * D), True), (HUGE, False)], ids=["all", "some", "none"]
)
def test_gradients_that_were_used_have_a_norm_and_are_not_clipped(threshold: int, raises: bool) -> None:
    models = model_of(), model_of()
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
    update_in_backward(optimizers[1], threshold)
    norms: list[Tensor] = []
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(0)
        loss_of(model).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
        if raises and model is models[1]:
            assert norms[0] == norms[1] > 1e-3
            with pytest.raises(octavo.UnsupportedOpError, match="Switch the caller's clipping off"):
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            with pytest.raises(octavo.UnsupportedOpError, match="Switch the caller's clipping off"):
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            return
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert_same((models[0], optimizers[0]), (models[1], optimizers[1]))


def test_parameters_that_take_the_places_of_others_are_updated_in_backward_too() -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    handle = update_in_backward(optimizer, 0)
    for module in model.modules():  # as accelerate's FSDP2 does
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().clone()))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 2)
    assert handle.launches == 1 + 8
    assert_same((model, optimizer), run("bf16", None, steps=2))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_is_refused(group: None) -> None:
    model = model_of()
    optimizer = AdamW(model.parameters())
    update_in_backward(optimizer, HUGE)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="fully_shard"):
        loss_of(model).backward()
    assert not optimizer.state
    again = AdamW(wrapped.parameters())
    with pytest.raises(RuntimeError, match="fully_shard"):
        update_in_backward(again)
    assert again.in_backward is None
    update_in_backward(AdamW(model_of().parameters()))  # another model's


@pytest.mark.parametrize("threshold", [0, HUGE])
def test_each_parameter_is_clipped(threshold: int) -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss_of(model).backward()
        for param in model.parameters():
            nn.utils.clip_grad_norm_([param], 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(run("bf16", threshold, PerParameterNorm(1e-3)), (model, optimizer))


@pytest.mark.parametrize("threshold", [0, HUGE])
@pytest.mark.parametrize("most", [1e-3, 1e3])
def test_clipped_by_the_norm_of_the_step_before(threshold: int, most: float) -> None:
    model = model_of("fp32")
    optimizer, last = AdamW(model.parameters(), lr=1e-2, moments="fp32"), None
    for _ in range(3):
        loss_of(model).backward()
        norm = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        divisor = None if last is None else (last / most).clamp(min=1.0)
        optimizer.step_some(list(model.parameters()), divisor)
        optimizer.zero_grad()
        last = norm
    twin = model_of("fp32")
    other = AdamW(twin.parameters(), lr=1e-2, moments="fp32")
    update_in_backward(other, threshold, LastStepNorm(most))
    train(twin, other)
    assert_close((model, optimizer), (twin, other))


@pytest.mark.parametrize("most", [1e-3, 1e3])
def test_the_estimate_of_all_gradients_is_their_norm(most: float) -> None:
    models = model_of("fp32"), model_of("fp32")
    optimizers = [AdamW(model.parameters(), lr=1e-2, moments="fp32") for model in models]
    handle = update_in_backward(optimizers[1], HUGE, EstimatedNorm(most))
    torch.manual_seed(1)
    for _ in range(3):
        loss_of(models[0]).backward()
        norm = nn.utils.clip_grad_norm_(models[0].parameters(), most)
        optimizers[0].step()
        optimizers[0].zero_grad()
    torch.manual_seed(1)
    train(models[1], optimizers[1])
    assert float(handle.last_norm) == pytest.approx(float(norm), rel=1e-5)  # type: ignore[arg-type]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-5)  # clip_grad_norm_ adds 1e-6 to the norm


def test_clipped_by_an_estimate_of_the_norm() -> None:
    most, model = 1e-3, model_of("fp32")
    optimizer, norms = AdamW(model.parameters(), lr=1e-2, moments="fp32"), GradientNorms()
    batches = [[2 * index, 2 * index + 1] for index in reversed(range(4))]  # of a layer's weight and bias
    for _ in range(3):
        loss_of(model).backward()
        params = list(model.parameters())
        for batch in batches:
            some = [params[index] for index in batch]
            norms.add(some)
            optimizer.step_some(some, (norms.estimate() / most).clamp(min=1.0))
        norms.end_step()
        optimizer.zero_grad()
    twin = model_of("fp32")
    other = AdamW(twin.parameters(), lr=1e-2, moments="fp32")
    handle = update_in_backward(other, 2 * WEIGHT + 4 * D, EstimatedNorm(most))
    train(twin, other)
    assert handle.launches == 3 * len(batches)
    assert_close((model, optimizer), (twin, other))


def test_an_estimate_of_frozen_and_new_parameters() -> None:
    model = model_of("fp32")
    model[1].weight.requires_grad_(False)
    optimizer = AdamW(model[:3].parameters(), lr=1e-2)
    handle = update_in_backward(optimizer, 0, EstimatedNorm(1.0))
    train(model, optimizer, 2)
    optimizer.step()  # without gradients
    before = handle.last_norm
    assert before is not None and float(before) > 0
    optimizer.add_param_group({"params": model[3].parameters()})  # no hooks yet: updated in step()
    model[1].weight.requires_grad_(True)
    loss_of(model).backward()
    norm = nn.utils.get_total_norm([param.grad for param in model[3].parameters()])
    optimizer.step()
    assert handle.last_norm is not None and float(handle.last_norm) > float(norm) > 0
    assert float(before) != float(handle.last_norm)


def test_frozen_and_unused_parameters() -> None:
    found = []
    for threshold in (None, 0):
        model = model_of()
        model.unused = nn.Parameter(torch.ones(3))
        model[1].weight.requires_grad_(False)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if threshold is not None:
            update_in_backward(optimizer, threshold)
        for _ in range(3):
            loss_of(model[:4]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not optimizer.state[model.unused] and not optimizer.state[model[1].weight]
        found.append((model, optimizer))
        torch.manual_seed(0)
    assert_same(*found)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_saved_and_loaded(kind: str) -> None:
    expected = run(kind, None, steps=4)
    model, optimizer = run(kind, 0, steps=2)
    random = torch.get_rng_state()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = model_of(kind)
    again.load_state_dict(saved[0])
    other = AdamW(again.parameters(), lr=1e-2)
    update_in_backward(other, 0)
    other.load_state_dict(saved[1])
    torch.set_rng_state(random)
    train(again, other, 2)
    assert_same((again, other), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sharded(dtype: torch.dtype, pool: Any) -> None:
    assert pool.run(in_backward_tasks.sharded_equals, (2,), dtype) == [[], []]


@pytest.mark.parametrize(
    ("recipe", "ranks"), [("dynamic", 2), ("blockwise", 2), pytest.param("dynamic", 4, marks=pytest.mark.full)]
)
def test_sharded_weights_in_fp8(recipe: str, ranks: int, pool: Any) -> None:
    assert pool.run(in_backward_tasks.stored_equals, (ranks,), recipe, seconds=60) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sharded_weights_in_fp8_with_clipped_gradients(ranks: int, pool: Any) -> None:
    clip = PerParameterNorm(0.01)
    assert pool.run(in_backward_tasks.stored_equals, (ranks,), "dynamic", clip, seconds=60) == [[]] * ranks
    norms = pool.run(in_backward_tasks.norms_of_ranks, (ranks,), seconds=60)
    assert all(found == norms[0] for found in norms)
    assert norms[0] == pytest.approx([norms[0][0]] * 2, rel=0.05)
