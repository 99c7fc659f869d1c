"""The measures of weights and moments in a record."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo import recipes
from octavo.distributed.ranks import Ranks
from octavo.inspect.report import table
from octavo.inspect.rows import Table
from octavo.inspect.twin import NO_HOOKS, NO_TWIN
from octavo.inspect.weight_updates import Updates, count_weights, optimizer_facts
from octavo.optim.state import for_kernel

np = pytest.importorskip("numpy")


def test_moments_that_flush_and_weights_that_stand_still(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(128, 8, bias=False, recipe=recipes.dynamic(), dtype=torch.bfloat16)
    optimizer = octavo.optim.AdamW(layer.parameters(), 1e-7, moments="fp8", master=None)
    with octavo.inspect.record(layer, tmp_path, optimizer=optimizer) as recorder:
        (layer(torch.randn(4, 128, dtype=torch.bfloat16)) * torch.logspace(0, -12, 8)).sum().backward()
        before = layer.weight.detach().double()
        optimizer.step()
        recorder.step()
    record = octavo.inspect.load(tmp_path)
    changed = (layer.weight.detach().double() - before) != 0
    assert record.weights["changed"][0, 0] == pytest.approx(changed.double().mean().item())
    assert record.weights["resolution"][0, 0] < 0.3
    codes = [optimizer.state[layer.weight][f"{name}_codes"] for name in ("exp_avg", "exp_avg_sq")]
    flushed = ((codes[1] == 0) & (codes[0] & 0x7F != 0)).double().mean().item()
    assert record.weights["second_flushed"][0, 0] == pytest.approx(flushed)


def test_the_largest_rate_of_groups_waits_for_no_device() -> None:
    """A rate on the meta device has no value to read: a comparison in Python, which would wait for a GPU, fails."""

    def largest(*rates: Any) -> Any:
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
        return optimizer_facts(torch.optim.SGD(groups, lr=0.5))["lr"]

    assert all(largest(*rates) == 0.1 for rates in [(0.1,), (0.01, 0.1), (torch.tensor(0.01), 0.1)])
    low, high = (torch.tensor(rate) for rate in (0.01, 0.1))
    assert all(largest(*rates) == high for rates in [(high,), (low, high), (high, 0.01, low)])
    on_device = torch.ones((), device="meta")
    assert all(largest(*rates).is_meta for rates in [(on_device,) * 2, (0.1, on_device), (on_device, low, 0.1)])
    assert optimizer_facts(None) == {}


@pytest.mark.parametrize("how", ["traced", pytest.param("compiled", marks=pytest.mark.full)])
def test_a_compiled_step_of_the_optimizer_is_said_to_be_unwatched(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled step is said to be unwatched; what it changed is recorded, and gradients that are left."""
    model = nn.Sequential(octavo.nn.Linear(32, 16), octavo.nn.Linear(16, 16).requires_grad_(False))
    optimizer, gradients = torch.optim.AdamW(model[0].parameters(), 1e-2), []
    step = torch.compile(lambda: optimizer.step(), backend="eager") if how == "compiled" else optimizer.step
    with octavo.inspect.record(model, tmp_path, every=1, optimizer=optimizer) as recorder:
        for _ in range(3):
            model(torch.randn(8, 32)).square().sum().backward()
            with monkeypatch.context() as patch:
                if how == "traced":
                    patch.setattr(torch.compiler, "is_compiling", lambda: True)
                step()
            gradients.append(model[0].weight.grad.square().mean().sqrt().item())
            recorder.step()
            optimizer.zero_grad()
        assert not model._forward_hooks  # nothing is noted for a twin
    record = octavo.inspect.load(tmp_path)
    assert [(at, text) for at, kind, text in record.events if kind == NO_TWIN] == [(0, NO_HOOKS)]
    ((at, kind, text),) = [event for event in record.events if event[1] != NO_TWIN]
    assert (at, kind) == (0, "unwatched") and f"From step 0: {text}." in table(record, [], 1)
    assert record.weights["gradient"][:, 0] == pytest.approx(gradients)
    assert np.isnan(record.weights["gradient"][:, 1]).all() and np.isnan(record.weights["outside"]).all()
    assert (record.weights["update"][:, 0] > 0).all()


class Launches(TorchDispatchMode):
    """Counts ops that compute: all but views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def masters_of(model: nn.Module, optimizer: octavo.optim.AdamW) -> list[torch.Tensor]:
    values = []
    for layer in model:  # type: ignore[attr-defined]
        master, _ = for_kernel(layer.weight, layer.weight.detach(), optimizer.state[layer.weight], optimizer.settings)
        values.append(master.read_all(master.weight).double())  # type: ignore[union-attr]
    return values


@pytest.mark.parametrize(
    ("storage", "master"),
    [
        *((None, master) for master in ("split32", "split24")),
        *(("fp8", master) for master in ("split16", "split24", "fp16_scaled", "fp32")),
        ("fp8 blocks", "split24"),
    ],
)
def test_masters_and_what_is_seen_of_them(storage: str | None, master: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(136, 7, bias=False), nn.Linear(7, 136, bias=False)).bfloat16()  # two blocks each
    recipe = recipes.blockwise() if storage == "fp8 blocks" else recipes.dynamic()
    octavo.convert(model, recipe, lambda *_: True, weight_storage=storage and "fp8")  # type: ignore[arg-type]
    optimizer = octavo.optim.AdamW(model.parameters(), 1e-6, master=master)  # type: ignore[arg-type]
    values = []
    with octavo.inspect.record(model, tmp_path, every=1, optimizer=optimizer) as recorder:
        for _ in range(3):
            model(torch.randn(16, 136, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            recorder.step()
            values.append(masters_of(model, optimizer))
    record = octavo.inspect.load(tmp_path)
    if storage is not None:  # the codes are the weight
        assert np.isposinf(record.measures["sqnr"][0, [row.role == "weight" for row in record.rows]]).all()
    weights = record.weights
    assert np.isnan(weights["master_update"][0]).all()  # the first step makes it
    for step in (1, 2):
        moved = [after - before for before, after in zip(*values[step - 1 : step + 1], strict=True)]
        expected = [change.square().mean().sqrt().item() for change in moved]
        assert weights["master_update"][step] == pytest.approx(expected, rel=1e-6)
        changed = [(change != 0).double().mean().item() for change in moved]
        assert weights["master_changed"][step] == pytest.approx(changed)
        assert (weights["changed"][step] < changed).all()


def test_a_weight_that_is_its_own_master_has_no_other(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(16, 16)
    optimizer = octavo.optim.AdamW(layer.parameters())
    with octavo.inspect.record(layer, tmp_path, every=1, optimizer=optimizer) as recorder:
        for _ in range(2):
            layer(torch.randn(8, 16)).sum().backward()
            optimizer.step()
            recorder.step()
    weights = octavo.inspect.load(tmp_path).weights
    assert np.isnan(weights["master_changed"]).all() and (weights["changed"] > 0.9).all()


def test_a_weight_that_others_compute_has_no_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(*(octavo.nn.Linear(16, 16, bias=False) for _ in range(2)))
    nn.utils.parametrizations.weight_norm(model[0])
    optimizer = octavo.optim.AdamW(model.parameters())
    with octavo.inspect.record(model, tmp_path, every=1, optimizer=optimizer, twin=False) as recorder:
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        recorder.step()
    record = octavo.inspect.load(tmp_path)
    assert np.isnan(record.weights["update"][0, 0]) and record.weights["update"][0, 1] > 0
    counted = {
        (row.layer, row.role): count for row, count in zip(record.rows, record.measures["elements"][0], strict=True)
    }
    assert np.isnan(counted["0", "weight"]) and counted["1", "weight"] == 256 and counted["0", "input"] == 8 * 16


def test_a_rank_without_rows_counts_nothing_of_a_weight() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        layer = octavo.convert(nn.Linear(16, 2, bias=False), recipes.rowwise(), lambda *_: True)
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (4,)))
        table = Table(layer)
        count_weights(table.layers, Ranks())
        assert layer.weight.to_local().numel() == 0 and not table.sums.any()
    finally:
        dist.destroy_process_group()


def test_frozen_weights_in_fp8_do_not_move(tmp_path: Path) -> None:
    """Frozen weights, one with E8M0's scales, one with a scale a row, stand still; one trained beside them moves."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    model[:2].requires_grad_(False)
    recipe = octavo.RecipeMap(recipes.mx(), {"1": recipes.rowwise()})
    octavo.convert(model, recipe, lambda _, name: name != "2", weight_storage="fp8")
    octavo.convert(model, recipe, lambda _, name: name == "2")
    optimizer = octavo.optim.AdamW(model.parameters())
    with octavo.inspect.record(model, tmp_path, every=1, optimizer=optimizer) as recorder:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        recorder.step()
    weights = octavo.inspect.load(tmp_path).weights
    assert weights["changed"][0].tolist() == [0, 0, pytest.approx(1, abs=0.1)]


def test_a_sample_lies_in_all_columns(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(64, 1024, bias=False)
    with octavo.inspect.record(layer, tmp_path) as recorder:
        layer(torch.randn(8, 64)).sum().backward()
        with torch.no_grad():
            layer.weight[:, :16] += 1
        recorder.step()
    assert octavo.inspect.load(tmp_path).weights["changed"][0, 0] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("storage", [None, "fp8"])
def test_more_layers_are_no_more_launches(storage: str | None) -> None:
    counted = []
    for layers in (2, 5):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).bfloat16()
        octavo.convert(model, recipes.dynamic(), lambda *_: True, weight_storage=storage)  # type: ignore[arg-type]
        optimizer = octavo.optim.AdamW(model.parameters(), moments="fp8")
        model(torch.randn(8, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        layers_of, updates = [module for module, _ in Table(model).layers], Updates(optimizer)
        with Launches() as launches:
            for _ in range(2):
                before, launches.count = launches.count, 0
                updates.begin(layers_of, is_as_before=True)
                updates.end()
        assert before >= launches.count  # made once
        counted.append(launches.count)
    assert counted[0] == counted[1] < 100


def test_what_the_optimizer_changed_and_what_else_did(tmp_path: Path) -> None:
    """The optimizer's change and others' are told apart, of a layer's weight and bias: here a write before its step."""
    layer = octavo.nn.Linear(32, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-3)
    with octavo.inspect.record(layer, tmp_path, every=1, optimizer=optimizer) as recorder:
        for step in range(2):
            layer(torch.randn(8, 32)).square().sum().backward()
            layer.weight.data[:8] += step
            layer.bias.data += step
            before, gradients = (
                [of.detach().clone() for of in these]
                for these in ((layer.weight, layer.bias), (layer.weight.grad, layer.bias.grad))
            )
            optimizer.step()
            updates = [p.detach() - was for p, was in zip((layer.weight, layer.bias), before, strict=True)]
            optimizer.zero_grad()
            recorder.step()
    record = octavo.inspect.load(tmp_path)
    rms = lambda of: of.square().mean().sqrt().item()  # noqa: E731
    assert record.others == ["bias"]
    for weights, update, gradient, outside in zip(
        (record.weights, record.of_others), updates, gradients, (0.5**0.5, 1), strict=True
    ):
        assert weights["outside"][:, 0].tolist() == pytest.approx([0, outside])
        assert weights["update"][1, 0] == pytest.approx(rms(update), rel=1e-3)
        assert weights["gradient"][1, 0] == pytest.approx(rms(gradient))
    moment = optimizer.state[layer.weight]["exp_avg_sq"].mean().item()
    assert record.weights["second_moment"][1, 0] == pytest.approx(moment)
    assert record.scalars["betas 1 of group 0"] == ([0], [0.999])
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
