"""A recorded step's twin measures what FP8 changes, and leaves no trace in the training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import recipes
from octavo.inspect.record import Record
from octavo.inspect.recorder import NO_TWIN

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


def train(model: Any, every: int, folder: Path, steps: int = 5, rank: int = 0, **options: Any) -> list[Any]:
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


@pytest.mark.parametrize("returns_loss", [True, False])
@pytest.mark.parametrize("recipe", ["dynamic", "delayed", pytest.param("blockwise", marks=pytest.mark.full)])
def test_a_training_with_twins_has_the_bits_of_one_without(recipe: str, returns_loss: bool, tmp_path: Path) -> None:
    with_twins = train(built(recipe, returns_loss), 2, tmp_path / "with")
    without = train(built(recipe, returns_loss), 2, tmp_path / "without", twin=False)
    assert len(with_twins) == len(without) and all(map(torch.equal, with_twins, without))
    record, losses, of_step = twins(tmp_path / "with")
    assert len(losses) == len(record.steps) == 3
    np.testing.assert_allclose(losses, of_step, rtol=0.02)
    assert (losses != of_step).all()
    assert record.weights["twin_cosine"].shape == (3, len(record.layers))
    assert (record.weights["twin_cosine"] > 0.9).all() and (record.weights["twin_error"] < 0.4).all()
    assert np.isnan(octavo.inspect.load(tmp_path / "without").weights["twin_cosine"]).all()


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
    factor = sum((g * t).sum() for g, t in pairs) / sum((t * t).sum() for _, t in pairs)
    for place, (g, t) in enumerate(pairs):
        cosine = float((g * t).sum() / (g.norm() * t.norm()))
        assert record.weights["twin_cosine"][0, place] == pytest.approx(cosine, rel=1e-6)
        error = float((g - factor * t).norm() / (factor * t).norm())
        assert record.weights["twin_error"][0, place] == pytest.approx(error, rel=1e-4)


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
    assert len(losses) == 3
    np.testing.assert_allclose(losses, of_step, rtol=0.2)  # rank 0's loss, and the change of all
    assert (record.weights["twin_cosine"] > 0.9).all()


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


def test_where_no_twin_can_run_the_record_says_why(tmp_path: Path) -> None:
    model = octavo.convert(nn.Sequential(nn.Linear(64, 64)), recipes.dynamic(), lambda *_: True)

    def why(name: str, optimizer: Any, forward: Callable[[], Any] = lambda: model(torch.randn(16, 64))) -> str:
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
    assert "failed in high precision: ZeroDivisionError" in why("fails", sgd)
    handle.remove()
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    assert "update in backward" in why("in backward", sgd)
    handle.remove()
