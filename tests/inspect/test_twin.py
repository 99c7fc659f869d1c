"""A recorded step's twin measures what FP8 changes, and leaves no trace in the training."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import recipes
from octavo.inspect.record import Record
from octavo.inspect.twin import NO_TWIN
from octavo.weights.fsdp2 import on_this_rank
from tests.support.freed import Zero3

np = pytest.importorskip("numpy")


class Model(nn.Module):
    """Tokens to logits, or to their loss: with dropout, running statistics, a checkpointed block and experts."""

    def __init__(self, returns_loss: bool = True) -> None:
        super().__init__()
        self.returns_loss, self.embedding, self.norm = returns_loss, nn.Embedding(32, 64), nn.BatchNorm1d(64)
        self.first = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 64))
        self.second, self.head = octavo.nn.RMSNormMLP(64, 128, activation="swiglu"), nn.Linear(64, 32)
        self.experts, self.router = octavo.nn.Experts(4, 64, 64), nn.Linear(64, 4)

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.embedding(tokens).flatten(0, 1)
        x = self.norm(x + checkpoint(self.first, x, use_reentrant=False))
        x = x + self.second(x)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        logits = self.head(x + self.experts(x, chosen, weights.to(x.dtype)))
        loss = F.cross_entropy(logits.float(), targets.flatten())
        return {"logits": logits, "loss": loss} if self.returns_loss else logits


def built(recipe: str, returns_loss: bool = True) -> Model:
    torch.manual_seed(0)
    return octavo.convert(Model(returns_loss), getattr(recipes, recipe)(), lambda _, name: name != "router")


def train(model: Any, every: int, folder: Path, steps: int = 3, rank: int = 0, **options: Any) -> list[Any]:
    """Train with accumulation, autocast and clipping; return losses, weights, states and random numbers."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    data = torch.Generator().manual_seed(rank)
    with octavo.inspect.record(model, folder, every, optimizer=optimizer, **options) as recorder:
        for _ in range(steps):
            total = torch.zeros(())
            for _ in range(2):
                tokens = torch.randint(32, (4, 8), generator=data)
                with torch.autocast("cpu", torch.bfloat16):
                    result = model(tokens, tokens * 5 % 32)
                of_logits = lambda y, targets: F.cross_entropy(y.float(), targets.flatten())  # noqa: E731
                loss = result["loss"] if isinstance(result, dict) else of_logits(result, tokens * 5 % 32)
                (loss / 2).backward()
                total += loss.detach() / 2
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=total)
            losses.append(total)
    states = [getattr(module, "fp8", None) for module in model.modules()]
    delayed = [tensor for fp8 in states if fp8 is not None and fp8.state is not None for tensor in fp8.state[:2]]
    tensors = [*model.state_dict().values(), *(s for state in optimizer.state.values() for s in state.values())]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor)]
    return [*losses, *local, *delayed, torch.get_rng_state()]


def on_ranks(mesh: Any, wrap: str, recipe: str, folder: str, twin: bool) -> list[Any]:
    """Train on the ranks of a mesh, each with its own batches."""
    model: Any = built(recipe)
    if wrap == "ddp":
        model = DistributedDataParallel(model, process_group=mesh.get_group())
    else:
        fully_shard(model, mesh=mesh)
    return train(model, 2, Path(folder), rank=mesh.get_local_rank(), twin=twin, group=mesh.get_group())


def twins(folder: Path) -> tuple[Record, Any, Any]:
    """Return (record, the twin's losses, the step's at the same steps)."""
    record = octavo.inspect.load(folder)
    steps, losses = record.scalars["twin_loss"]
    of_step = dict(zip(*record.scalars["loss"], strict=True))
    return record, np.array(losses), np.array([of_step[step] for step in steps])


@pytest.mark.parametrize(
    ("recipe", "returns_loss"),
    [
        ("dynamic", True),
        ("delayed", False),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("delayed", True), ("dynamic", False))),
        *(pytest.param("blockwise", returns_loss, marks=pytest.mark.full) for returns_loss in (True, False)),
    ],
)
def test_a_training_with_twins_has_the_bits_of_one_without(recipe: str, returns_loss: bool, tmp_path: Path) -> None:
    with_twins = train(built(recipe, returns_loss), 2, tmp_path / "with")
    without = train(built(recipe, returns_loss), 2, tmp_path / "without", twin=False)
    assert len(with_twins) == len(without) and all(map(torch.equal, with_twins, without))
    record, losses, of_step = twins(tmp_path / "with")
    assert len(losses) == len(record.steps) == 2
    np.testing.assert_allclose(losses, of_step, rtol=0.02)
    assert (losses != of_step).all()
    assert record.weights["twin_cosine"].shape == (2, len(record.layers))
    assert (record.weights["twin_cosine"] > 0.9).all()
    assert np.isnan(octavo.inspect.load(tmp_path / "without").weights["twin_cosine"]).all()


def test_weights_that_its_last_forward_frees_keep_the_steps_gradients(tmp_path: Path) -> None:
    """As DeepSpeed ZeRO-3 frees them: they have no elements then, and gather before the update."""
    model = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.dynamic(), lambda *_: True)
    freed, optimizer = Zero3(model), torch.optim.SGD(model.parameters(), 0.1)
    with octavo.inspect.record(model, tmp_path, optimizer=optimizer) as recorder:
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        gradients, freed.writes_back = [p.grad.clone() for p in model.parameters()], False
        optimizer.register_step_pre_hook(lambda *_: freed.gather())
        optimizer.step()
        recorder.step(loss)
    assert len(twins(tmp_path)[1]) == 1
    assert all(map(torch.equal, [p.grad for p in model.parameters()], gradients))


@pytest.mark.parametrize("returns_loss", [True, False])
def test_a_twin_is_the_same_model_in_high_precision(returns_loss: bool, tmp_path: Path) -> None:
    """Compare with a copy that is not converted, for which autograd computes loss and gradients."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96), nn.Dropout(0.5), nn.Linear(96, 32)]
    plain, scale = nn.Sequential(*layers), 3.0
    loss_of = lambda y: scale * F.mse_loss(y, torch.ones_like(y))  # noqa: E731
    model = octavo.convert(nn.Sequential(*layers), recipes.dynamic(), lambda *_: True)
    if returns_loss:
        model.append(Loss(loss_of))
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(16, 64)
    start = torch.get_rng_state()
    with octavo.inspect.record(model, tmp_path, optimizer=optimizer) as recorder:
        result = model(x)
        loss = result if returns_loss else loss_of(result)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        torch.set_rng_state(start)
        with octavo.using(model, recipes.high_precision()):
            y = plain(x)
            expected = loss_of(y).detach()
            twin_gradients = torch.autograd.grad(loss_of(y), [*plain.parameters()], retain_graph=True)
        if not returns_loss:  # to first order, and with the step's gradient of y
            y_grad = torch.autograd.grad(loss_of(z := result.detach().requires_grad_()), z)[0]
            expected = loss.detach() + (y_grad * (y.detach() - result.detach())).sum()
            twin_gradients = torch.autograd.grad(y, [*plain.parameters()], y_grad)
        optimizer.step()
        recorder.step(loss=loss)
    record, (loss_of_twin,), _ = twins(tmp_path)
    assert loss_of_twin == pytest.approx(float(expected), rel=1e-6)
    pairs = [(g.double(), t.double()) for g, t in zip(gradients, twin_gradients, strict=True) if g.ndim == 2]
    for place, (g, t) in enumerate(pairs):
        cosine = float((g * t).sum() / (g.norm() * t.norm()))
        assert record.weights["twin_cosine"][0, place] == pytest.approx(cosine, rel=1e-6)


def test_a_closure_that_computes_the_gradients_leaves_the_same_record(tmp_path: Path) -> None:
    """As Lightning's Trainer gives it to each step: gradients of the step before are left when the step begins."""
    records = []
    for name in ("plain", "closure"):
        torch.manual_seed(0)
        model = octavo.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipes.delayed(), lambda *_: True)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        with octavo.inspect.record(model, tmp_path / name, 1, optimizer=optimizer) as recorder:
            for _ in range(3):

                def closure(x: Tensor) -> Tensor:
                    optimizer.zero_grad()  # noqa: B023
                    (loss := (model(x) - x).square().mean()).backward()  # noqa: B023
                    return loss

                run = partial(closure, torch.randn(16, 64))
                loss = run() if name == "plain" else optimizer.step(run)
                if name == "plain":
                    optimizer.step()
                recorder.step(loss=loss)
        records.append(octavo.inspect.load(tmp_path / name))
    plain, closed = records
    assert plain.events == closed.events == [] and plain.scalars == closed.scalars
    for name, values in plain.weights.items():
        np.testing.assert_array_equal(closed.weights[name], values, err_msg=name)


class SharpnessAware(torch.optim.SGD):
    """Moves weights along their gradients before it calls the closure, and back after it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        weights = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad, alpha=0.1)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, weight in zip(params, weights, strict=True):
            p.copy_(weight)
        super().step()


def test_a_closure_at_moved_weights_has_a_twin_at_these(tmp_path: Path) -> None:
    weights = []
    for twin in (True, False):
        torch.manual_seed(0)
        model = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.delayed(), lambda *_: True)
        optimizer = SharpnessAware(model.parameters(), 0.1)
        with octavo.inspect.record(model, tmp_path / str(twin), 1, optimizer=optimizer, twin=twin) as recorder:
            for _ in range(3):

                def closure(x: Tensor) -> Tensor:
                    (loss := (model(x) - x).square().mean()).backward()  # noqa: B023
                    return loss

                run = partial(closure, torch.randn(16, 64))
                loss = run()
                optimizer.step(run)
                optimizer.zero_grad()
                recorder.step(loss=loss)
        weights.append([p.tolist() for p in model.parameters()])
    assert weights[0] == weights[1]
    record, losses, of_step = twins(tmp_path / "True")
    assert record.events == [] and (record.weights["twin_cosine"] > 0.99).all()
    np.testing.assert_allclose(losses, of_step, rtol=0.01)
    np.testing.assert_array_equal(record.weights["outside"], 0)  # the optimizer itself moved them


def tensor_parallel(mesh: Any, folder: str) -> list[list[float]]:
    """Train under tensor and sequence parallelism; return root mean squares of the norm's gradients, [steps, 2]."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 32)
    )
    octavo.convert(model, recipes.dynamic(), lambda *_: True)
    styles = [
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        SequenceParallel(),
        ColwiseParallel(input_layouts=Shard(1)),
        RowwiseParallel(output_layouts=Replicate()),
    ]
    parallelize_module(model, mesh, {str(place): style for place, style in enumerate(styles)})
    optimizer, sizes = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False), list[list[float]]()
    with octavo.inspect.record(model, folder, 1, optimizer=optimizer, group=mesh.get_group()) as recorder:
        for step in range(2):
            tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(step))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            sizes.append([float(p.grad.full_tensor().square().mean().sqrt()) for p in (model[1].weight, model[1].bias)])
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
    return sizes


def test_gradients_that_are_not_sharded_as_their_weights_have_a_twin(pool: Any, tmp_path: Path) -> None:
    """Those of a norm under sequence parallelism are addends, that of an embedding is whole."""
    sizes, _ = pool.run(tensor_parallel, (2,), str(tmp_path))
    record, losses, of_step = twins(tmp_path)
    assert record.events == [] and len(losses) == 2
    np.testing.assert_allclose(losses, of_step, rtol=0.01)
    np.testing.assert_allclose(record.scalar("twin_slope"), 1, atol=0.02)
    places = [record.others.index(name) for name in ("1.weight", "1.bias")]
    np.testing.assert_allclose(record.of_others["gradient"][:, places], sizes, rtol=1e-5)


class Loss(nn.Module):
    def __init__(self, loss_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.loss_of = loss_of

    def forward(self, y: Tensor) -> Tensor:
        return self.loss_of(y)


@pytest.mark.parametrize(
    ("wrap", "recipe"), [("ddp", "delayed"), ("fsdp", "delayed"), pytest.param("fsdp", "mx", marks=pytest.mark.full)]
)
def test_ranks_run_one_twin_without_a_trace(wrap: str, recipe: str, pool: Any, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("with", "without")]
    results = [pool.run(on_ranks, (2,), wrap, recipe, str(f), f.name == "with") for f in folders]
    for with_twins, without in zip(*results, strict=True):
        assert len(with_twins) == len(without) and all(map(torch.equal, with_twins, without))
    record, losses, of_step = twins(folders[0])
    assert len(losses) == 2
    np.testing.assert_allclose(losses, of_step, rtol=0.2)  # rank 0's loss, and the change of all
    assert (record.weights["twin_cosine"] > 0.9).all()
    np.testing.assert_allclose(record.scalar("twin_slope"), 1, atol=0.1)  # 32 tokens in bfloat16, and experts


def resumed_on_ranks(mesh: Any, wrap: str, folder: str) -> None:
    """Train, and go on with another model object."""
    for step in (0, 4):
        model: Any = built("delayed")
        if wrap == "ddp":
            model = DistributedDataParallel(model, process_group=mesh.get_group())
        else:
            fully_shard(model, mesh=mesh)
        train(model, 2, Path(folder), 4, rank=mesh.get_local_rank(), step=step, group=mesh.get_group())


@pytest.mark.full
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_ranks_that_go_on_compare_with_those_before(wrap: str, pool: Any, tmp_path: Path) -> None:
    pool.run(resumed_on_ranks, (2,), wrap, str(tmp_path))
    record, batches = octavo.inspect.load(tmp_path), sorted(path.name for path in tmp_path.glob("batch-*"))
    assert record.steps == [0, 2, 4, 6] and batches == ["batch-0.npz", "batch-1.npz"]
    assert np.isfinite(record.of_modules["output"][:, 0]).tolist() == [False, True, True, True]


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_of_an_earlier_step_are_no_error_of_fp8(clears: bool, tmp_path: Path) -> None:
    """Clearing them between forward and backward, and several backwards in a step, are as usual."""
    model = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.dynamic(), lambda *_: True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with octavo.inspect.record(model, tmp_path, every=1, optimizer=optimizer) as recorder:
        for step in range(6):
            for batch in range(2):
                loss = (model(torch.randn(16, 64)) - 1).square().mean()
                if batch == 0 and (clears or step < 2):
                    optimizer.zero_grad(set_to_none=False)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            recorder.step(loss=loss)
    record = octavo.inspect.load(tmp_path)
    left = record.scalars["left_gradient"][1]
    first = octavo.inspect.verdict(record, octavo.inspect.diagnose(record))
    assert "FP8 is the cause" not in first and ("call optimizer.zero_grad()" in first) is not clears
    assert left[:2] == [0, 0] and all((share == 0) is clears for share in left[2:])
    assert (np.isfinite(record.weights["twin_cosine"][2:]) == clears).all()


def train_two_layers(
    folder: Path, twin: bool, late: bool = False, scale: float = 1.0, inside: float = 0.0
) -> list[Any]:
    """Train six steps whose batches use other features each; return weights and delayed states.

    From the fourth step on it steps with the gradients of the step before (``late``), or multiplies a delayed scale.
    The loss has ``inside`` times the first layer's output, of which the recorded model's output says nothing.
    """
    torch.manual_seed(0)
    model: Any = octavo.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipes.delayed(), lambda *_: True)
    optimizer, features, kept = torch.optim.SGD(model.parameters(), 0.1), torch.eye(64).split(8), list[Any]()

    def change(*_: object) -> None:
        kept.append([p.grad.clone() for p in model.parameters()])
        for p, grad in zip(model.parameters(), kept[-2], strict=True) if late and len(kept) > 3 else ():
            p.grad.copy_(grad)

    optimizer.register_step_pre_hook(change)
    hidden: dict[str, Tensor] = {}
    model[0].register_forward_hook(lambda _, __, output: hidden.update(output=output))
    with octavo.inspect.record(model, folder, every=1, optimizer=optimizer, twin=twin) as recorder:
        for step in range(6):
            if step > 2:
                model[0].delayed_scale[2] *= scale
            loss = (model(torch.randn(16, 8) @ features[step]) - features[step].sum(0)).square().mean()
            (loss + inside * hidden["output"].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
    return [t.tolist() for t in (*model.parameters(), *octavo.nn.delayed_state_dict(model).values())]


def test_gradients_that_are_changed_after_backward_are_no_error_of_fp8(tmp_path: Path) -> None:
    with_twins, without = (train_two_layers(tmp_path / str(twin), twin, late=True) for twin in (True, False))
    assert with_twins == without
    record = octavo.inspect.load(tmp_path / "True")
    (steps, lowest), findings = record.scalars["twin_control"], octavo.inspect.diagnose(record)
    assert steps == [4, 5] and max(lowest) < 0.8
    assert [(finding.kind, finding.begins) for finding in findings if finding.level != "note"] == [("gradients", 4)]
    cosines = record.weights["twin_cosine"]
    assert (cosines[3] < 0.9).any() and (np.delete(cosines, 3, axis=0) > 0.99).all()  # from the next recorded step on


def test_gradients_that_are_cleared_before_the_update_are_not_lost_by_fp8(tmp_path: Path) -> None:
    """A step whose gradients are all 0 is no step of FP8: it runs once more from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(octavo.nn.Linear(64, 64), octavo.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizer) as recorder:
        for step in range(8):
            (loss := model(torch.randn(32, 64)).square().mean()).backward()
            if step > 2:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
    record = octavo.inspect.load(tmp_path)
    cosines = record.weights["twin_cosine"]
    assert (cosines[3] == 0).all() and (np.delete(cosines, 3, axis=0) > 0.95).all()
    assert record.scalars["twin_control"] == ([4, 5, 6, 7], [0.0] * 4)
    assert octavo.inspect.verdict(record, octavo.inspect.diagnose(record)).startswith("FP8 is not the cause")


def test_where_gradients_come_by_another_way_too_no_step_is_said_to_have_others(tmp_path: Path) -> None:
    train_two_layers(tmp_path, True, scale=2.0**12, inside=0.2)
    record = octavo.inspect.load(tmp_path)
    assert min(record.scalars["twin_control"][1]) > 0.9999 and record.events == []
    assert "gradients" not in {finding.kind for finding in octavo.inspect.diagnose(record) if finding.level != "note"}


def test_a_step_that_runs_once_more_in_fp8_has_the_scales_of_the_step(tmp_path: Path) -> None:
    """So an error that a scale makes in one backward is in that run too, whose amax is in the history by then."""
    with_twins, without = (train_two_layers(tmp_path / str(twin), twin, scale=2.0**12) for twin in (True, False))
    assert with_twins == without
    record = octavo.inspect.load(tmp_path / "True")
    assert min(record.scalars["twin_control"][1]) > 0.9999
    cosines = record.weights["twin_cosine"]
    assert (cosines[:3] > 0.99).all() and (cosines[3:, 0] < 0.95).all() and (cosines[3:, 1] > 0.99).all()


def test_a_loss_at_moved_weights_is_no_error_of_fp8(tmp_path: Path) -> None:
    """Weights are moved for forward and backward and back before the update, as sharpness-aware minimisation does."""
    model: Any = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.dynamic(), lambda *_: True)
    optimizer, x, weight = torch.optim.SGD(model.parameters(), 0.1), torch.randn(16, 64), model[0].weight
    optimizer.register_step_pre_hook(lambda *_: setattr(weight, "data", weight.data / 1.5))
    with octavo.inspect.record(model, tmp_path, every=1, optimizer=optimizer) as recorder:
        for _ in range(4):
            weight.data.mul_(1.5)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
    record, losses, of_step = twins(tmp_path)
    np.testing.assert_allclose(losses, of_step, rtol=5e-3)
    assert octavo.inspect.verdict(record, octavo.inspect.diagnose(record)).startswith("FP8 changes little")


def test_where_no_twin_can_run_the_record_says_why(tmp_path: Path) -> None:
    model = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.dynamic(), lambda *_: True)

    def why(name: str, optimizer: Any, forward: Callable[[], Any] = lambda: model(torch.randn(16, 64))) -> str:
        model.zero_grad()
        with octavo.inspect.record(model, tmp_path / name, every=1, optimizer=optimizer) as recorder:
            for _ in range(2):
                forward().sum().backward()
                if optimizer is not None:
                    optimizer.step()
                recorder.step()
        return "; ".join(text for _, kind, text in octavo.inspect.load(tmp_path / name).events if kind == NO_TWIN)

    sgd = torch.optim.SGD(model.parameters(), 0.1)
    assert why("runs", sgd) == ""
    assert why("none", None) == ""
    none = octavo.inspect.load(tmp_path / "none")
    assert "give octavo.inspect.record the optimizer" in octavo.inspect.verdict(none, octavo.inspect.diagnose(none))
    handle = model.register_forward_pre_hook(lambda *_: 1 // 0 if model[0].recipe.is_high_precision else None)
    assert "the twin failed: ZeroDivisionError" in why("fails", sgd)
    handle.remove()
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / 4))
    assert why("divides", sgd) == ""
    handle.remove()
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    bias = model[0].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert "update in backward" in why("in backward", sgd)
    handle.remove(), bias.remove()
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with_others = lambda: torch.func.functional_call(model, others, (torch.randn(16, 64),))  # noqa: E731
    assert "compute with other parameters" in why("other parameters", sgd, with_others)
    outside = lambda: model(torch.randn(16, 64)).mean() + 99 * model[0].weight.square().sum()  # noqa: E731
    assert "another way than the model's outputs" in why("a penalty of weights", sgd, outside)
    assert "no gradient came through the outputs" in why("another module", sgd, lambda: model[0](torch.randn(16, 64)))

    def written() -> Tensor:
        y = model(torch.randn(16, 64)).square()
        torch.autograd.backward(y.sum(), retain_graph=True)
        torch.optim.SGD(model.parameters(), 0.1).step()
        return y.detach().requires_grad_()

    assert "weights were written between" in why("two optimizers", sgd, written)
    sgd.step = lambda: model[0].weight.data.mul_(0.9)  # type: ignore[assignment, method-assign]
    assert "runs no hooks" in why("no hooks", sgd)


# --- The ways in which a training loop may use a model: x [16, 64] to a loss.


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor


class Net(nn.Module):
    """Returns its loss as ``returned`` has it; writes attributes, a buffer and generators in each forward."""

    def __init__(self, returned: Callable[[Tensor, Tensor], Any] = lambda loss, hidden: loss) -> None:
        super().__init__()
        self.up, self.down, self.returned = nn.Linear(64, 96), nn.Linear(96, 64), returned
        self.calls, self.seen, self.scale = 0, list[int](), torch.ones((), requires_grad=True)
        self.register_buffer("mean", torch.zeros(()))
        self.outside = [nn.Linear(64, 64)]  # is trained too, and no part of this module

    def forward(self, x: Tensor) -> Any:
        x = x + 0.1 * self.outside[0](x)
        hidden = F.dropout(self.up(x).relu(), 0.1 * random.random() * np.random.rand(), self.training) * self.scale
        loss = (self.down(hidden) - x).square().mean()
        self.calls, self.mean = self.calls + 1, 0.9 * self.mean + loss.detach()
        self.seen.append(self.calls)
        return self.returned(loss, hidden)


def in_place(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    loss /= 2
    return loss


def twice(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x) + 0.5 * model(-x)
    loss.backward(retain_graph=True)
    return loss


def evaluating(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    model.eval()
    model(x)  # with a graph, and without
    with torch.no_grad():
        model(x)
    return loss


def overwriting(model: Any, x: Tensor) -> Tensor:
    rows = x.clone()
    model(x=rows).backward()
    rows.zero_()
    return model(x)  # type: ignore[no-any-return]


def with_func(model: Any, x: Tensor) -> Tensor:
    with octavo.using(model, recipes.high_precision()):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (x,)))(weights)
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,))  # type: ignore[no-any-return]


Step = Callable[[Any, Tensor], Tensor]
WAYS: dict[str, tuple[Callable[[], Net], Step]] = {
    "tuple": (lambda: Net(lambda loss, hidden: (loss, hidden)), lambda model, x: model(x)[0]),
    "losses": (lambda: Net(lambda loss, hidden: [loss, loss**2]), lambda model, x: sum(model(x), torch.zeros(()))),
    "dataclass": (lambda: Net(Output), lambda model, x: model(x).loss + model(x).hidden.mean()),
    "in place": (Net, in_place),
    "two backwards": (Net, twice),
    "evaluation": (Net, evaluating),
    "training in eval": (lambda: Net().eval(), lambda model, x: model(x)),
    "overwritten": (Net, overwriting),
    "torch.func": (Net, with_func),
}


def losses_and_bits(build: Callable[[], Net], step: Step, folder: Path, twin: bool) -> list[Any]:
    """Train two recorded steps; return all that they leave."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model: Any = octavo.convert(build(), recipes.delayed(), lambda *_: True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    mode = model.training
    with octavo.inspect.record(model, folder, 1, optimizer=optimizer, twin=twin) as recorder:
        for _ in range(2):
            loss = step(model.train(mode), torch.randn(16, 64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
            losses.append(float(loss.detach()))
    python = [model.calls, model.seen, model.training, random.random(), np.random.rand(), float(torch.rand(()))]
    tensors = [*model.state_dict().values(), *octavo.nn.delayed_state_dict(model).values(), model.scale.grad]
    tensors.append(model.outside[0].weight.grad)
    return [*losses, *python, *(tensor.tolist() for tensor in tensors)]


@pytest.mark.parametrize("way", WAYS)
def test_a_twin_follows_the_training_loop(way: str, tmp_path: Path) -> None:
    with_twins, without = (losses_and_bits(*WAYS[way], tmp_path / str(twin), twin) for twin in (True, False))
    assert with_twins == without
    record, losses, of_step = twins(tmp_path / "True")
    assert record.weights["twin_cosine"].min() > 0.95 and record.events == []
    np.testing.assert_allclose(losses, of_step, rtol=0.02)
    assert (losses != of_step).all()


@pytest.mark.parametrize("returns_loss", [True, False])
def test_a_loss_scale_that_is_not_given_makes_no_false_loss(returns_loss: bool, tmp_path: Path) -> None:
    model: Any = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.dynamic(), lambda *_: True)
    loss_of = lambda y: y.float().square().mean()  # noqa: E731
    if returns_loss:
        model.append(Loss(loss_of))
    scaler, optimizer = torch.amp.GradScaler("cpu", 2.0**12), torch.optim.SGD(model.parameters(), 0.1)
    with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizer) as recorder:
        for scales in ({}, {"loss_scale": 2.0**12}):
            with torch.autocast("cpu", torch.float16):
                y = model(torch.randn(16, 64))
            loss = y if returns_loss else loss_of(y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorder.step(loss=loss, **scales)
    record, losses, of_step = twins(tmp_path)
    assert np.isfinite(losses).tolist() == [returns_loss, True]
    assert losses[-2 * returns_loss or -1 :] == pytest.approx(of_step[-2 * returns_loss or -1 :], rel=0.01)
    assert record.weights["twin_cosine"].min() > 0.95


@pytest.mark.parametrize(("dtype", "is_enabled"), [("float32", True), ("float32", False), ("float16", False)])
def test_a_small_loss_scale_makes_no_false_loss(dtype: str, is_enabled: bool, tmp_path: Path) -> None:
    """By a GradScaler, whose clipped gradients do not show it, or by hand; a scaler that is off has none."""
    model: Any = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.dynamic(), lambda *_: True)
    model.to(getattr(torch, dtype))
    scaler, optimizer = torch.amp.GradScaler("cpu", 32.0, enabled=is_enabled), octavo.optim.AdamW(model.parameters())
    scale = 32.0 if dtype == "float16" else 1.0
    with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizer) as recorder:
        for scales in ({}, {"loss_scale": 32.0 if is_enabled else scale}):
            loss = (model(torch.randn(16, 64, dtype=model[0].weight.dtype)).float() - 1).square().mean()
            (scaler.scale(loss) * scale).backward()
            scaler.unscale_(optimizer)
            for p in model.parameters():
                p.grad.div_(scale)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorder.step(loss=loss, **scales)
    record, losses, of_step = twins(tmp_path)
    assert np.isfinite(losses).tolist() == [dtype == "float32" and not is_enabled, True]
    np.testing.assert_allclose(losses[-1], of_step[-1], rtol=2e-3)
    assert record.events == [] and record.weights["twin_cosine"].min() > 0.95


class Hidden(nn.Module):
    """Returns its second layer's output, and keeps its first one's as an attribute, of which a loss has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x)
        return self.third(self.second(x + 0.1 * self.hidden))  # type: ignore[no-any-return]


def recipe_of(*names: str) -> octavo.RecipeMap:
    """Return a map with FP8 in these layers alone."""
    return octavo.RecipeMap(recipes.high_precision(), dict.fromkeys(names, recipes.dynamic()))


THREE = ["first", "second", "third"]
CHANGES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {  # and the layers that are in FP8 in the end
    "one less": (lambda model: octavo.set_recipe(model, recipe_of("second")), ["second"]),
    "one more": (lambda model: octavo.set_recipe(model, recipe_of(*THREE)), THREE),
    "others": (lambda model: octavo.set_recipe(model, recipe_of("second", "third")), ["second", "third"]),
    "replaced": (lambda model: setattr(model, "first", octavo.nn.Linear(64, 64)), ["first", "second"]),
    "replaced by torch's": (lambda model: setattr(model, "first", nn.Linear(64, 64)), ["second"]),
    "restored": (octavo.restore, []),
    "converted anew": (lambda model: octavo.convert(octavo.restore(model), recipes.mx(), lambda *_: True), THREE),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("when", ["before the step's end", "after it"])
@pytest.mark.parametrize("change", CHANGES)
def test_layers_may_change_between_recorded_steps(change: str, when: str, tmp_path: Path) -> None:
    """The first layer's gradient comes by another way too, so it is never compared: by its name, not by its place."""
    changes, layers = CHANGES[change]
    results = []
    for twin in (True, False):
        torch.manual_seed(0)
        model: Any = octavo.convert(Hidden(), recipe_of("first", "second"), lambda *_: True)
        optimizer, folder = torch.optim.SGD(model.parameters(), 0.01), tmp_path / str(twin)
        with octavo.inspect.record(model, folder, 1, optimizer=optimizer, twin=twin) as recorder:
            for step in range(4):
                if step == 2 and when == "after it":
                    changes(model)
                loss = model(torch.randn(16, 64)).square().mean()
                (loss + 0.05 * model.hidden.square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1 and when != "after it":
                    changes(model)
                recorder.step(loss=loss)
        results.append([p.tolist() for p in model.parameters()])
    assert results[0] == results[1]
    record = octavo.inspect.load(tmp_path / "True")
    assert [kind for _, kind, _ in record.events if kind == NO_TWIN] == []
    assert record.rows[-1].layer == (layers or ["second"])[-1]
    cosines = dict(zip(record.layers, record.weights["twin_cosine"].T, strict=True))
    assert np.isfinite(cosines["second"][:2]).all() and np.isnan(cosines["first"]).all()
    assert all((cosines[name][3:] > 0.99).all() for name in layers if name != "first")


def test_an_error_of_the_comparison_ends_it_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squares", "products"):
        model = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.dynamic(), lambda *_: True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with monkeypatch.context() as patch:
            patch.setattr(f"octavo.inspect.products.RankSums.{name}", lambda *_, **__: 1 // 0)
            with octavo.inspect.record(model, tmp_path / name, 1, optimizer=optimizer) as recorder:
                for _ in range(2):
                    (loss := model(torch.randn(16, 64)).square().mean()).backward()
                    optimizer.step()
                    recorder.step(loss)
        ((step, kind, text),) = octavo.inspect.load(tmp_path / name).events
        assert (step, kind) == (0, NO_TWIN) and text.startswith("the twin failed: ZeroDivisionError")


# before torch 2.13 FSDP2 can't forget a pass that failed, and the error ends the training
WRAPS_OF_FAILURES = ("fsdp", "ddp") if hasattr(FSDPModule, "reset_iter_state") else ("ddp",)


def fail_on_ranks(mesh: Any, folder: str) -> list[Any]:
    """Train a sharded model whose twins fail, and a replicated one whose twins fail on rank 1."""
    results = []
    for wrap in WRAPS_OF_FAILURES:
        for twin in (True, False):
            torch.manual_seed(0)
            model: Any = octavo.convert(
                nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipes.delayed(), lambda *_: True
            )
            fails = lambda layer, _: 1 // 0 if layer.recipe.is_high_precision else None  # noqa: E731
            if wrap == "fsdp" or mesh.get_local_rank() == 1:
                model[1].register_forward_pre_hook(fails)
            first = model[0]
            if wrap == "fsdp":
                fully_shard(fully_shard(first, mesh=mesh) and model, mesh=mesh)
            else:
                model = DistributedDataParallel(model, process_group=mesh.get_group())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            path = Path(folder, wrap, str(twin))
            with octavo.inspect.record(
                model, path, 1, optimizer=optimizer, twin=twin, group=mesh.get_group()
            ) as recorder:
                for _ in range(3):
                    model(torch.randn(16, 64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    recorder.step()
            results.append([on_this_rank(p).tolist() for p in model.parameters()])
    return results


def test_a_twin_that_fails_on_ranks_ends_no_training(pool: Any, tmp_path: Path) -> None:
    for results in pool.run(fail_on_ranks, (2,), str(tmp_path)):
        assert results[::2] == results[1::2]
    reasons = {"fsdp": "the twin failed: ZeroDivisionError", "ddp": "it failed on another rank"}
    for wrap in WRAPS_OF_FAILURES:
        ((_, kind, text),) = octavo.inspect.load(tmp_path / wrap / "True").events
        assert kind == NO_TWIN and text.startswith(reasons[wrap])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
@pytest.mark.parametrize("where", ["model", "full graph", "in place", "block"])
def test_a_compiled_model_has_a_twin_in_eager(where: str, tmp_path: Path) -> None:
    def build() -> Any:
        model = Loss(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)))
        return octavo.convert(model, recipes.dynamic(), lambda *_: True)

    results = []
    for twin in (True, False):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = build()
        if where == "in place":
            model.compile(backend="eager")
        elif where == "block":
            model.loss_of.compile(backend="eager")
        else:
            model = torch.compile(model, backend="eager", fullgraph=where == "full graph")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        with octavo.inspect.record(model, tmp_path / str(twin), 2, optimizer=optimizer, twin=twin) as recorder:
            for _ in range(3):
                loss = model(torch.randn(16, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss=loss)
        results.append([p.tolist() for p in model.parameters()])
    assert results[0] == results[1]
    record = octavo.inspect.load(tmp_path / "True")
    if where == "in place":
        assert "a model.compile() cannot be noted" in record.events[0][2]
    else:
        assert record.weights["twin_cosine"].min() > 0.95 and len(record.scalars["twin_loss"][0]) == 2
