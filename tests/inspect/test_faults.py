"""The first inf or NaN is found in the place where it was put, with the rows of the steps before it."""

import contextlib
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import recipes
from octavo.inspect import Fault, FaultError
from tests.support.combinations import each_pair
from tests.support.helpers import CountOps, observers
from tests.support.passes import end_step

BEFORE = ("before first", "before mlp", "before last")  # of a model; these and others for train_spoiled


class _Spoil(torch.autograd.Function):
    """Return x with these values added to one of its elements, and to one of its gradient's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor) -> Tensor:
        ctx.save_for_backward(added)
        return _added(x, added[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _added(grads[0], ctx.saved_tensors[0][1]), None


def _added(x: Tensor, value: Tensor) -> Tensor:
    at = torch.zeros_like(x)
    at[3, 5] = 1
    return torch.where(at == 1, x + value, x)


class Spoiled(nn.Module):
    """A model of three layers; ``added`` [3, 2] is put in before each, forward and backward."""

    added: Tensor

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = octavo.nn.Linear(32, 48, recipe=recipe)
        self.mlp = octavo.nn.RMSNormMLP(48, 64, activation="silu", recipe=recipe)
        self.last = octavo.nn.LayerNormLinear(48, 16, recipe=recipe)
        self.register_buffer("added", torch.zeros(3, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(_Spoil.apply(x, self.added[0]))
        x = x + self.mlp(_Spoil.apply(x, self.added[1]))
        return self.last(_Spoil.apply(x, self.added[2]))


def train_spoiled(
    model: nn.Module,
    steps: range,
    trace: Any = None,
    faults: dict[int, tuple[str, float]] | None = None,
    called: Any = None,
    update: bool = True,
) -> list[float]:
    """Train, with a fault of a value put into a place in some steps; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for step in steps:
        place, value = (faults or {}).get(step, ("", 0.0))
        _put(model, place, value)
        torch.manual_seed(step)
        loss = (model if called is None else called)(torch.randn(40, 32)).square().mean()
        if place == "loss":
            loss = loss * value
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if update:
            optimizer.step()
        if place == "weight":
            with torch.no_grad():
                model.mlp.fc2.weight[-1, 3] = value
        optimizer.zero_grad()
        losses.append(loss.item())
        if trace is not None:
            trace.step(loss, value if place == "grad_norm" else norm)
    return losses


@torch.no_grad()
def _put(model: nn.Module, place: str, value: float) -> None:
    """Put a value into a place, or take it out again."""
    model.added.zero_()
    where, _, backward = place.partition(", ")
    if where in BEFORE:
        model.added[BEFORE.index(where), int(bool(backward))] = value
    elif place == "in mlp":
        model.mlp.fc1.bias[7] = value  # one column of what comes out of it


def spoiled_rank(mesh: Any) -> tuple[Any, ...]:
    """Return a fault's place as each rank reads it, of a training under FSDP2 in which rank 1 has the fault."""
    model = Spoiled(recipes.delayed())
    for layer in (model.first, model.mlp, model.last, model):
        fully_shard(layer, mesh=mesh)
    fault = {3: ("before mlp", torch.nan)} if mesh.get_local_rank() == 1 else None
    trace = octavo.inspect.trace_faults(model, raises=False, group=mesh.get_group())
    train_spoiled(model, range(5), trace, fault)
    trace.close()
    named = trace.fault
    return named.layer, named.role, named.step, named.rank, len(named.before), named.share


PLACES = {  # the place of a fault in step 1: the place that is reported
    "before first": ("first", "input", 1),
    "before mlp": ("mlp.fc1", "input", 1),
    "in mlp": ("mlp.fc2", "input", 1),
    "before last": ("last.linear", "input", 1),
    "before mlp, backward": ("first", "grad_output", 1),
    "before last, backward": ("mlp.fc2", "grad_output", 1),
    "weight": ("mlp.fc2", "weight", 2),  # by the step's update
    "loss": (None, "loss", 1),
    "grad_norm": (None, "grad_norm", 1),
}
RECIPES = ["dynamic", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mx"]
HOW = ["eager", "compiled", "checkpointed"]


@pytest.mark.full
@each_pair(place=list(PLACES), recipe=RECIPES, how=HOW, value=[math.nan, -math.inf])
def test_the_first_fault_is_named_by_all_recipes(case: dict[str, Any]) -> None:
    test_the_first_fault_is_named(**case)


@pytest.mark.parametrize(
    ("place", "recipe", "value", "how"),
    list(
        zip(
            PLACES,
            itertools.cycle(RECIPES),
            itertools.cycle([math.nan, -math.inf]),
            itertools.cycle(["eager", "checkpointed"]),  # compiled ones are seconds of tracing
        )
    ),
)
def test_the_first_fault_is_named(place: str, recipe: str, how: str, value: float) -> None:
    model = Spoiled(getattr(recipes, recipe)())
    called: Any = model
    if how == "compiled":
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif how == "checkpointed":
        called = functools.partial(checkpoint, model, use_reentrant=False)
    with octavo.inspect.trace_faults(model, raises=False) as trace:
        train_spoiled(model, range(4), trace, {1: (place, value)}, called)
    fault = trace.fault
    assert fault is not None
    assert (fault.layer, fault.role, fault.step) == PLACES[place]
    assert [row["step"] for row in fault.before] == list(range(fault.step + 1))
    assert not observers(model)


@pytest.mark.parametrize("raises", [True, False])
def test_a_fault_that_has_not_arrived_when_the_training_ends_is_found_at_its_end(raises: bool) -> None:
    """As on a GPU, where the host reads steps that are two steps old; nothing is summed over ranks then."""
    model = Spoiled(recipes.dynamic())
    with pytest.raises(FaultError) if raises else contextlib.nullcontext():
        with octavo.inspect.trace_faults(model, raises=raises) as trace:
            trace._late = 2
            train_spoiled(model, range(4), trace, {3: ("before mlp", math.nan)})
            assert trace.fault is None
    assert (trace.fault.layer, trace.fault.role, trace.fault.step) == ("mlp.fc1", "input", 3)
    assert [row["step"] for row in trace.fault.before] == [0, 1, 2, 3] and trace.fault.share == 1 / 40


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_rows_amax_and_scale_before_a_fault(compiled: bool) -> None:
    torch.manual_seed(0)
    layer = octavo.nn.Linear(32, 32, recipe=recipes.delayed())
    called = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    seen = []
    with pytest.raises(
        FaultError, match=r"the input of the model at step 3, on rank 0, in 2.5 % of its rows"
    ) as raised:
        with octavo.inspect.trace_faults(layer) as trace:
            for step in range(5):
                x = 2.0**step * torch.randn(40, 32)
                if step == 3:
                    x[7, 5] = math.inf
                y = called(x)
                grad = torch.randn_like(y)
                y.backward(grad)
                seen.append((float(x[x.isfinite()].abs().max()), float(grad.abs().max())))
                end_step()
                trace.step(loss=step)
    fault = raised.value.fault
    assert fault == trace.fault and fault.share == 1 / 40
    amaxes = [(row["input amax"], row["grad_output amax"]) for row in fault.before]
    assert amaxes == seen
    assert [row["loss"] for row in fault.before] == [0, 1, 2, 3]
    assert "grad_output scale_inv" in str(fault).splitlines()[1]


def test_a_training_that_diverges() -> None:
    """A training that diverges by a learning rate that float16 cannot hold for long; hooks see each tensor whole."""
    model = nn.Sequential(*(octavo.nn.Linear(16, 16, recipe=recipes.delayed()) for _ in range(3))).half()
    optimizer, seen = torch.optim.SGD(model.parameters(), 3.0), []
    for name, layer in model.named_children():
        layer.register_forward_pre_hook(lambda _, x, name=name: seen.append((name, "input", x[0])))
        layer.register_full_backward_pre_hook(lambda _, dy, name=name: seen.append((name, "grad_output", dy[0])))
    with pytest.raises(FaultError) as raised, octavo.inspect.trace_faults(model) as trace:
        for _ in range(50):
            seen.clear()
            loss = 8 * model(torch.randn(8, 16).half().requires_grad_()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.step(loss)
    fault: Fault = raised.value.fault
    assert (fault.layer, fault.role) == next((name, role) for name, role, x in seen if not x.isfinite().all())
    assert fault.before[-2]["input amax"] > 4 * fault.before[-3]["input amax"]


def test_ten_steps_before_are_kept_and_another_error_carries_the_fault() -> None:
    layer = octavo.nn.Linear(16, 16, recipe=recipes.dynamic())
    with pytest.raises(RuntimeError, match="diverged") as raised:
        with octavo.inspect.trace_faults(layer, raises=False) as trace:
            for step in range(15):
                layer(torch.full((4, 16), math.nan if step == 13 else step + 1.0)).sum().backward()
                trace.step()
            raise RuntimeError("diverged")
    assert "the input of the model at step 13" in raised.value.__notes__[0]
    assert trace.fault is not None
    assert [row["step"] for row in trace.fault.before] == list(range(3, 14))
    assert [row["input amax"] for row in trace.fault.before[:-1]] == pytest.approx(list(range(4, 14)))


def test_gradients_that_a_scaler_overflows_are_no_faults() -> None:
    model = Spoiled(recipes.dynamic())
    with octavo.inspect.trace_faults(model, gradients=False, raises=False) as trace:
        train_spoiled(model, range(2), trace, {0: ("before last, backward", math.inf)}, update=False)
    assert trace.fault is None
    with pytest.raises(ValueError, match="no layer in FP8"):
        octavo.inspect.trace_faults(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="step=-5: needs a whole number, at least 0"):
        octavo.inspect.trace_faults(octavo.nn.Linear(32, 32), step=-5)


def test_a_closed_trace_takes_no_step() -> None:
    with octavo.inspect.trace_faults(octavo.nn.Linear(32, 32), step=3) as trace:
        trace.step()
    with pytest.raises(RuntimeError, match=r"step 4 was not watched, as close\(\) was called"):
        trace.step()


def test_layers_that_are_restored_meanwhile_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    octavo.convert(model, recipes.dynamic(), lambda *_: True)
    with octavo.inspect.trace_faults(model, raises=False) as trace:
        for step in range(3):
            if step == 1:
                octavo.restore(model)
            loss = model(torch.ones(4, 32)).sum() * (math.nan if step == 2 else 1)
            trace.step(loss)
    assert trace.fault is not None and (trace.fault.step, trace.fault.role) == (2, "loss")


def test_a_watched_training_is_the_same() -> None:
    states = []
    for watched in (False, True):
        model = Spoiled(recipes.blockwise())
        trace = octavo.inspect.trace_faults(model) if watched else None
        states.append((train_spoiled(model, range(3), trace), model.state_dict()))
    assert states[0][0] == states[1][0]
    assert all(torch.equal(tensor, states[1][1][name]) for name, tensor in states[0][1].items())
    with CountOps() as ops:
        train_spoiled(model, range(1), trace)
    assert ops.calls["note_faults"] == 2 * 4  # layers


def test_ranks_name_the_one(pool: Any) -> None:

    faults: list[Any] = pool.run(spoiled_rank, (2,))
    assert faults == [("mlp.fc1", "input", 3, 1, 4, 1 / 80)] * 2
