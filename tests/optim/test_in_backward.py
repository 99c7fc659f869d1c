"""Updates in backward equal a step after it, bit for bit; gradients do not stay; inexact options are refused."""

import copy
import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.optim import AdamW, update_in_backward
from octavo.optim.in_backward import GradientNorms, squared_norms
from octavo.tensor.stored_gradient import UsedGradient
from tests.support import sharded_weights as cases
from tests.support.combinations import in_full
from tests.support.helpers import stepped
from tests.support.pool import free_port
from tests.support.streams import GPU, notes_of_streams, tensor_on_gpu
from tests.support.trained import assert_same, loss_of, model_of

D = 64
WEIGHT = D * D * 2  # bytes of a bf16 gradient
LAYER = WEIGHT + 2 * D  # with its bias
HUGE = 1 << 30


def train(model: nn.Sequential, optimizer: Any, steps: int = 3, reentrant: bool | None = None) -> None:
    for _ in range(steps):
        stepped(optimizer, loss_of(model, reentrant))


def test_on_a_gpu_updates_have_a_stream_for_which_the_next_forward_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the gradients, which outlive it; in a captured graph all is on one stream."""
    update = update_in_backward(AdamW([nn.Parameter(torch.ones(2))]))
    notes = notes_of_streams(monkeypatch)
    params: Any = [SimpleNamespace(device=GPU, grad=tensor_on_gpu(f"gradient {number}", notes)) for number in range(2)]
    for first_lines in (["another stream is made"], []):
        with update._streams_of_updates(params):
            notes.append("step")
        outlive = [f"gradient {number} outlives another stream" for number in range(2)]
        of_step = ["begin on another stream", "step", "end on another stream"]
        assert notes == [*first_lines, "another stream waits for the current stream", *outlive, *of_step]
        notes.clear()
    elsewhere = SimpleNamespace(device=torch.device("cuda", 1), grad=tensor_on_gpu("gradient 2", notes))
    with update._streams_of_updates([*params, elsewhere]):
        assert [notes.count(f"{event} another stream") for event in ("begin on", "gradient 2 outlives")] == [2, 1]
    notes.clear()
    update._wait()
    assert notes == ["the current stream waits for another stream"] * 2
    notes.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with update._streams_of_updates(params):
        assert notes == []


def run(kind: str, threshold: int | None, reentrant: bool) -> tuple[nn.Sequential, Any]:
    model = model_of(kind)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if threshold is not None:
        update_in_backward(optimizer, threshold)
    train(model, optimizer, reentrant=reentrant)
    return model, optimizer


def test_reentrant_checkpoints_that_share_a_weight() -> None:
    assert_same(run("tied", HUGE, reentrant=True), run("tied", None, reentrant=True))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run("tied", 0, reentrant=True)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_weight_that_a_step_does_not_reach(set_to_none: bool) -> None:
    """A gradient of zeros moves it by its momentum, as in a step after backward; without one it stays."""
    weights = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        always, first_only = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = AdamW([*always.parameters(), *first_only.parameters()], 1e-2, moments="fp32")
        if in_backward:
            update_in_backward(optimizer, 0)
        for reached in (True, False, False):
            y = always(torch.ones(4, 8))
            (first_only(y) if reached else y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            weights.append(first_only.weight.detach().clone())
    assert all(map(torch.equal, weights[:3], weights[3:])) and torch.equal(*weights[1:3]) == set_to_none


@pytest.mark.covering(1)
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("threshold", [0, HUGE])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_backward_that_fails_is_a_step_of_what_it_updated(kind: str, threshold: int, reentrant: bool | None) -> None:
    """Out of memory, say; then the usual: catch, zero_grad, the next batch."""

    def fail(grad: Tensor) -> None:
        raise MemoryError("no room")

    trainings = []
    for in_backward in (True, False):
        model, fails = model_of(kind), iter([False, True, True, False])
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if in_backward:
            update_in_backward(optimizer, threshold, 1e9)
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
        trainings.append((model, optimizer))
    assert_same(*trainings)
    model, optimizer = trainings[0]
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
    gone = [weakref.ref(referent) for referent in (optimizer, handle, *model.parameters())]
    del optimizer, handle
    gc.collect()
    assert [ref() for ref in gone[:2]] == [None, None]
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    del model
    gc.collect()
    assert not any(ref() for ref in gone)


@pytest.mark.parametrize(("threshold", "in_backward", "in_all"), [(0, 8, 8), (2 * LAYER, 2, 2), (HUGE, 0, 1)])
def test_gradients_do_not_stay_and_a_crossing_is_a_launch(threshold: int, in_backward: int, in_all: int) -> None:
    model = model_of()
    params = list(model.parameters())
    handle = update_in_backward(AdamW(params), threshold)
    live: list[int] = []

    def count(param: nn.Parameter) -> None:  # after update_in_backward's
        gradients = [p.grad for p in params if p.grad is not None and not isinstance(p.grad, UsedGradient)]
        live.append(sum(gradient.numel() * gradient.element_size() for gradient in gradients))

    for param in params:
        param.register_post_accumulate_grad_hook(count)
    loss_of(model).backward()
    assert len(live) == len(params)
    assert all(live_bytes < max(threshold, 1) for live_bytes in live)
    assert handle.most_bytes <= min(threshold + WEIGHT, 4 * LAYER)
    assert handle.launches == in_backward
    handle.optimizer.step()
    assert handle.launches == in_all and len(handle.optimizer.state) == 8
    assert all(param.grad is None for param in params)


def test_what_is_refused() -> None:
    params = list(model_of().parameters())
    with pytest.raises(TypeError, match="not AdamW"):
        update_in_backward(torch.optim.AdamW(params))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="skip_nonfinite"):
        update_in_backward(AdamW(params, skip_nonfinite=True))
    optimizer = AdamW(params)
    with pytest.raises(ValueError, match=r"=0\.0 must be a 2-norm above 0"):
        update_in_backward(optimizer, clip=0.0)
    with pytest.raises(ValueError, match="=-1 must be at least 0"):
        update_in_backward(optimizer, -1)
    assert optimizer.in_backward is None
    update_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="already"):
        update_in_backward(optimizer)


@pytest.mark.parametrize(("threshold", "says"), [(0, "Leave out a GradScaler"), (HUGE, "decides by all gradients")])
def test_a_grad_scaler_is_refused_in_the_first_step(threshold: int, says: str) -> None:
    model = model_of("fp32")
    optimizer = AdamW(model.parameters())
    update_in_backward(optimizer, threshold)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match=says):
        scaler.step(optimizer)


@pytest.mark.parametrize(("threshold", "raises"), [(2 * LAYER, True), (HUGE, False)], ids=["some", "none"])
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
            for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
                with pytest.raises(octavo.UnsupportedOpError, match="switch the caller's clipping off"):
                    clip(model.parameters(), 1e-3)
            return
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert_same((models[0], optimizers[0]), (models[1], optimizers[1]))


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


@pytest.mark.parametrize("most", [1e-3, 1e3])
def test_the_estimate_of_all_gradients_is_their_norm(most: float) -> None:
    models = model_of("fp32"), model_of("fp32")
    optimizers = [AdamW(model.parameters(), lr=1e-2, moments="fp32") for model in models]
    handle = update_in_backward(optimizers[1], HUGE, most)
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


CROSSED_EARLY = {"dynamic": 200, "blockwise": 100_000}  # bytes, by the second of three gradients


def stored_equals(mesh: Any, recipe: str) -> list[str]:
    """Return what differs between updates in backward and a step after it, of sharded weights that live in FP8.

    With micro-batches; the thresholds part ranks' updates differently.
    """
    runs = {}
    for threshold in (None, 0, CROSSED_EARLY[recipe]):
        net = cases.sharded(recipe, mesh)
        optimizer = cases.adamw(net)
        handle = None if threshold is None else update_in_backward(optimizer, threshold)
        for step in range(2):
            for last in (False, True):
                net.set_requires_gradient_sync(last)
                with nullcontext() if handle is None or last else handle.accumulate():
                    net(cases.batch(2 * step + last, mesh.get_local_rank())).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs[threshold] = cases.held(net, optimizer)
    expected = next(iter(runs.values()))
    return [f"{run} {name}" for run, of in runs.items() for name, x in of.items() if not torch.equal(x, expected[name])]


@pytest.mark.parametrize(("recipe", "ranks"), [("dynamic", 2), *in_full(("blockwise", 2), ("dynamic", 4))])
def test_sharded_weights_in_fp8(recipe: str, ranks: int, pool: Any) -> None:
    assert pool.run(stored_equals, (ranks,), recipe, seconds=60) == [[]] * ranks


def params_with(*norms: float) -> list[nn.Parameter]:
    """Parameters whose gradients have these norms."""
    return again([nn.Parameter(torch.zeros(4, 4)) for _ in norms], *norms)


def again(params: list[nn.Parameter], *norms: float) -> list[nn.Parameter]:
    for param, norm in zip(params, norms, strict=True):
        param.grad = torch.full((4, 4), norm / 4)
    return params


def test_by_hand() -> None:
    norms = GradientNorms()
    a, b, c = params = params_with(6.0, 2.0, 3.0)
    assert float(norms.last()) == 0.0
    norms.add([a, b])
    assert float(norms.estimate()) == pytest.approx(math.sqrt(40))  # nothing is known of the rest
    norms.add([c])
    assert float(norms.end_step()) == float(norms.last()) == 7.0
    again(params, 3.0, 4.0, 5.0)
    norms.add([a])  # 36 of 49 has become 9
    assert float(norms.estimate()) == pytest.approx(math.sqrt(9 + 13 * (9 / 36) ** (6 / 7)))
    norms.add([b])
    assert float(norms.estimate()) == pytest.approx(math.sqrt(25 + 9 * (25 / 40) ** math.sqrt(40 / 49)))
    assert float(norms.last()) == 7.0
    norms.add([c])
    assert float(norms.estimate()) == pytest.approx(math.sqrt(50))
    assert float(norms.end_step()) == pytest.approx(math.sqrt(50))


def test_gradients_that_do_not_come_and_new_ones() -> None:
    norms = GradientNorms()
    a, b, _ = params_with(3.0, 4.0, 0.0)
    norms.add([a, b])
    norms.end_step()
    (new,) = params_with(12.0)
    norms.add([new])  # says nothing of the others
    assert float(norms.estimate()) == pytest.approx(13.0)
    norms.add([a])
    assert float(norms.estimate()) == pytest.approx(13.0)
    assert float(norms.end_step()) == pytest.approx(math.sqrt(153.0))  # without b
    norms.add([b])  # whose last is 0, like a new one's
    assert float(norms.estimate()) == pytest.approx(13.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    norms, params = GradientNorms(), params_with(1.0, 1.0)
    norms.add(params)
    norms.end_step()
    again(params, value, 1.0)
    for param, read_norm in zip(params, (norms.estimate, norms.end_step), strict=True):
        norms.add([param])
        assert not math.isfinite(float(read_norm()))


def test_in_float32() -> None:
    gradients = [torch.full((300, 7), 1e-3, dtype=torch.bfloat16), torch.ones(3), torch.ones(0, 2)]
    expected = [float(x.double().square().sum()) for x in gradients]
    assert squared_norms(gradients).tolist() == pytest.approx(expected, rel=1e-6)


def test_what_a_clip_knows_is_saved():
    def steps(model, optimizer, numbers):
        for number in numbers:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            (model(x) * (number + 1)).square().mean().backward()
            optimizer.step()

    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = AdamW(model.parameters(), 1e-2)
        return model, optimizer, update_in_backward(optimizer, 500, 0.1)

    model, optimizer, handle = begun()
    steps(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    steps(model, optimizer, range(3, 6))
    again, other, loaded = begun()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    loaded.load_state_dict(saved[2])
    assert loaded.last_norm is not None
    steps(again, other, range(3, 6))
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert handle.last_norm == loaded.last_norm
    with pytest.raises(ValueError, match="more parameters than the optimizer's 1"):
        update_in_backward(AdamW([nn.Parameter(torch.ones(2))])).load_state_dict(saved[2])
