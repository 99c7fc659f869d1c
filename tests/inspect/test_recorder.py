"""Records of small trainings: they change nothing in them, and note switches."""

import contextlib
import errno
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import E4M3, E5M2, Cast, Delayed, Dynamic, PerTensor, recipes
from octavo.inspect.record import np as lazy_numpy
from octavo.inspect.recorder import Recorder, arrays_of, largest_times_limit
from octavo.inspect.report import to_json
from octavo.inspect.rows import Row
from octavo.inspect.twin import Comparison
from octavo.kernels.arguments import Counted
from octavo.schedule import Phase, PrecisionSchedule, Recovery
from tests.support.combinations import in_full
from tests.support.helpers import observers


def network(recipe: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        octavo.nn.Linear(32, 48, recipe=recipe),
        octavo.nn.RMSNormMLP(48, 64, recipe=recipe),
        octavo.nn.LayerNormLinear(48, 16, recipe=recipe),
    ).to(dtype)


def train(model: nn.Module, steps: range, recorder: Any = None, called: Any = None) -> list[float]:
    optimizer = octavo.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = (model if called is None else called)(torch.randn(40, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss=loss)
    return losses


np = pytest.importorskip("numpy")


def test_a_full_disk_ends_the_record_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recorded = network(recipes.dynamic()), network(recipes.dynamic())
    called = []

    def full(*args: Any, **kwargs: Any) -> None:
        called.append(args)
        raise OSError(errno.ENOSPC, "No space left on device")

    expected = [train(plain, steps) for steps in (range(1), range(1, 3), range(3, 6))]
    with octavo.inspect.record(recorded, tmp_path, every=2) as recorder:
        losses = [train(recorded, range(1), recorder)]
        monkeypatch.setattr(lazy_numpy, "savez_compressed", full)
        with pytest.warns(UserWarning, match="cannot write .*counts-00000002.npz: No space left .*; the training"):
            losses.append(train(recorded, range(1, 3), recorder))
        losses.append(train(recorded, range(3, 6), recorder))
        recorder.event("note", "written nowhere")
        assert not recorder._noted and not observers(recorded)
    assert losses == expected and len(called) == 1
    assert octavo.inspect.load(tmp_path).steps == [0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_that_a_checkpoint_computes_again_is_counted_once(use_reentrant: bool, tmp_path: Path) -> None:
    model = octavo.nn.Linear(32, 16)
    counts = []
    for name in ("plain", "checkpointed"):
        with octavo.inspect.record(model, tmp_path / name, every=1) as recorder:
            for _ in range(2):
                x = torch.ones(8, 32, requires_grad=True)
                y = model(x) if name == "plain" else checkpoint(model, x, use_reentrant=use_reentrant)
                y.sum().backward()
                recorder.step()
        counts.append(octavo.inspect.load(tmp_path / name).measures["elements"])
    np.testing.assert_array_equal(*counts)
    assert counts[0][:, 0].tolist() == [8 * 32, 8 * 32]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (octavo.nn.Linear, "aot_eager"),
        *(pytest.param(octavo.nn.RMSNormMLP, it, marks=pytest.mark.full) for it in ("aot_eager", "inductor")),
    ],
)
def test_a_compiled_training_leaves_the_same_record(kind: Any, backend: str, tmp_path: Path) -> None:
    records = []
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = kind(32, 64, recipe=recipes.delayed())
        counter = CompileCounterWithBackend(backend)
        called = torch.compile(model, backend=counter, fullgraph=True) if name == "compiled" else model
        with octavo.inspect.record(model, tmp_path / name, every=2) as recorder:
            train(model, range(3), recorder, called)
        train(model, range(1), called=called)
        records.append(octavo.inspect.load(tmp_path / name))
    assert counter.frame_count == 2  # with counts, and without
    for name, values in records[0].measures.items():
        np.testing.assert_allclose(records[1].measures[name], values, rtol=1e-3, atol=1e-3, err_msg=name)


WAITS = {"item": Tensor.item, "tolist": Tensor.tolist, "bool": bool, "cpu": Tensor.cpu, None: lambda tensor: None}
RUNS = [("rowwise", None), *(("delayed", it) for it in WAITS), *in_full(*(("rowwise", it) for it in WAITS if it))]


@pytest.mark.parametrize(("named", "wait"), RUNS)
def test_a_recorded_step_does_not_wait_for_the_device(
    named: str, wait: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on the meta device have no values to read: a read that would wait for a GPU fails."""
    read = Recorder._count

    def count(self: Recorder, comparison: Comparison | None) -> dict[str, Tensor]:
        WAITS[wait](self._table.sums[0, 0])
        assert comparison is not None  # the twin does not wait either
        return read(self, comparison)

    monkeypatch.setattr(octavo.optim.base, "optimizer_step", lambda *_: None)  # a kernel, on a GPU
    monkeypatch.setattr(Recorder, "_count", count)
    monkeypatch.setattr(Recorder, "_write", lambda self, reading: None)  # which comes when its event has
    model = network(octavo.recipes.as_recipe(named), torch.bfloat16).to("meta")
    optimizer = octavo.optim.AdamW(model.parameters(), moments="fp8", master="split16")
    with pytest.raises((RuntimeError, NotImplementedError)) if wait else contextlib.nullcontext():
        with octavo.inspect.record(model, tmp_path, every=1, optimizer=optimizer) as recorder:
            for _ in range(2):
                loss = model(torch.randn(40, 32, device="meta", dtype=torch.bfloat16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss=loss, grad_norm=loss, lr=0.1)
    assert wait or all("master_rest" in state for p, state in optimizer.state.items() if p.ndim == 2)  # they are read


def test_a_count_is_not_rounded_to_the_losses_dtype(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(64, 64)
    with octavo.inspect.record(layer, tmp_path, twin=False) as recorder:
        layer(torch.randn(4, 64)).sum().backward()
        recorder.step(torch.tensor(2.0, dtype=torch.bfloat16), tokens=torch.tensor(20_000_003))
    assert octavo.inspect.load(tmp_path).scalars["tokens"] == ([0], [20_000_003.0])


def test_scalars_are_those_of_their_step(tmp_path: Path) -> None:
    layer, norm = octavo.nn.Linear(16, 16, recipe=recipes.dynamic()), torch.zeros(())
    with octavo.inspect.record(layer, tmp_path) as recorder:
        for step in range(3):
            x = torch.randn(4, 16, requires_grad=True)
            loss = layer(x).sum()
            loss.backward()
            recorder.step(loss=loss, grad_norm=norm.fill_(step), lr=0.5)
        graph = weakref.ref(x)
        del x, loss
        assert graph() is None
    record = octavo.inspect.load(tmp_path)
    assert record.scalars["grad_norm"] == ([0, 1, 2], [0.0, 1.0, 2.0]) and record.scalars["lr"][1] == [0.5] * 3


@pytest.mark.parametrize("make", [octavo.optim.AdamW, torch.optim.AdamW], ids=["octavo", "torch"])
def test_a_recovery_and_the_steps_it_skips_are_noted(make: Any, tmp_path: Path) -> None:
    model = network(recipes.dynamic())
    optimizer = make(model.parameters(), 1e-3)
    recovery = Recovery(Phase(recipes.high_precision()), steps=3, check_every=2)
    schedule = PrecisionSchedule(model, optimizer, [Phase(recipes.dynamic())], recovery)
    with octavo.inspect.record(model, tmp_path, every=4, optimizer=optimizer, schedule=schedule) as recorder:
        for step in range(10):
            loss = model(torch.randn(40, 32)).square().mean() * (math.nan if step in (2, 3) else 1.0)
            loss.backward()
            schedule.observe(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
    record = octavo.inspect.load(tmp_path)
    assert sorted((step, kind) for step, kind, _ in record.events) == [
        (2, "skipped"),
        (3, "recovery"),
        (3, "skipped"),
        (6, "switch"),
    ]
    assert "skipped" not in record.scalars
    assert [event["kind"] for event in json.loads(to_json(record, []))["events"]].count("recovery") == 1


def test_steps_that_an_optimizer_leaves_out_are_noted(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(16, 16)
    optimizer = octavo.optim.AdamW(layer.parameters(), skip_nonfinite=True)
    with octavo.inspect.record(layer, tmp_path, optimizer=optimizer) as recorder:
        for step in range(3):
            (layer(torch.randn(8, 16)).sum() * (math.inf if step == 1 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    record = octavo.inspect.load(tmp_path)
    ((step, kind, _),) = record.events
    assert (step, kind) == (1, "skipped") and "skipped" not in record.scalars


def test_a_scalar_may_have_the_name_of_an_event(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(16, 16)
    with octavo.inspect.record(layer, tmp_path, twin=False) as recorder:
        recorder.step(skipped=torch.tensor(1.0), twin_control=0.0)
    record = octavo.inspect.load(tmp_path)
    assert record.events == [] and record.scalars == {"skipped": ([0], [1.0]), "twin_control": ([0], [0.0])}


def test_numbers_are_handed_over_as_they_are_written(tmp_path: Path) -> None:
    layer, handed = octavo.nn.Linear(32, 32, recipe=recipes.rowwise()), []
    with octavo.inspect.record(layer, tmp_path, every=2, on_record=lambda *row: handed.append(row)) as recorder:
        for step in range(3):
            layer(torch.randn(16, 32).requires_grad_()).sum().backward()
            recorder.step(loss=float(step))
    record = octavo.inspect.load(tmp_path)
    assert [(step, values["loss"]) for step, values in handed] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert list(handed[1][1]) == ["loss"]
    at = next(i for i, row in enumerate(record.rows) if (row.role, row.products) == ("input", ("grad_weight",)))
    assert handed[2][1]["input.grad_weight.sqnr"] == record.measures["sqnr"][1, at]
    assert handed[2][1]["weight.changed"] == record.weights["changed"][1, 0] == 0


@pytest.mark.parametrize("named", [False, True])
def test_the_worst_expert_and_the_tokens_of_experts_are_handed_over(named: bool, tmp_path: Path) -> None:
    experts, handed = octavo.nn.GroupedLinear(3, 32, 16, recipe=recipes.dynamic()), dict[str, float]()
    model = nn.ModuleDict({"up": experts}) if named else experts
    x = torch.randn(12, 32)
    x[2:5] *= torch.logspace(0, -9, 32)  # the second expert's, spread wide
    with octavo.inspect.record(model, tmp_path, on_record=lambda step, numbers: handed.update(numbers)) as recorder:
        experts(x.requires_grad_(), torch.tensor([2, 5, 12], dtype=torch.int32)).sum().backward()
        recorder.step()
    record, prefix = octavo.inspect.load(tmp_path), "up." * named
    at = [row.role for row in record.rows].index("input")
    assert record.experts.worst_expert[0, at] == 1 and handed[f"{prefix}input.worst_expert.flushed"] > 0.3
    assert handed[f"{prefix}input.flushed"] == record.measures["flushed"][0, at]
    assert handed[f"{prefix}input.flushed"] * 12 == pytest.approx(handed[f"{prefix}input.worst_expert.flushed"] * 3)
    assert (handed[f"{prefix}least_tokens"], handed[f"{prefix}most_tokens"]) == (2, 7)


def test_parameters_that_modules_no_longer_share_are_noted_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(16, 32), octavo.nn.Linear(32, 16, bias=False))
    model[1].weight = model[0].weight
    with octavo.inspect.record(model, tmp_path, every=2) as recorder:
        for step in range(5):
            if step == 1:
                model[1].weight = nn.Parameter(model[0].weight.detach().clone())
            model(torch.arange(16)).sum().backward()
            recorder.step()
    assert octavo.inspect.load(tmp_path).events == [(2, "untied", "0.weight and 1.weight")]


def test_parameters_that_no_longer_require_a_gradient_are_noted(tmp_path: Path) -> None:
    model = nn.Sequential(octavo.nn.Linear(32, 32), octavo.nn.Linear(32, 16))
    with octavo.inspect.record(model, tmp_path) as recorder:
        for step in range(3):
            model[0].requires_grad_(step == 0)
            model(torch.randn(16, 32)).sum().backward()
            recorder.step()
    assert octavo.inspect.load(tmp_path).events == []  # of recorded steps
    with octavo.inspect.record(model, tmp_path / "each", 1) as recorder:
        for step in range(3):
            model(torch.randn(16, 32)).sum().backward()
            model[1].weight.requires_grad_(step < 1)
            recorder.step()
    assert octavo.inspect.load(tmp_path / "each").events == [(2, "frozen", "1.weight")]


class Late:
    """An event of a device that is behind: nothing has arrived until somebody waits for it."""

    waits = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        Late.waits += 1


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_numbers_that_are_late_are_waited_for_at_the_end(
    disk_is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, called = Recorder._send, []

    def send_late(self: Recorder, *arguments: Any) -> None:
        send(self, *arguments)
        self._sent[-1].in_flight._event = Late()

    def full(*args: Any, **kwargs: Any) -> None:
        called.append(args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Recorder, "_send", send_late)
    monkeypatch.setattr(Late, "waits", 0)
    model = network(recipes.dynamic())
    recorder = octavo.inspect.record(model, tmp_path / "late", every=2)
    losses = train(model, range(4), recorder)
    assert not (tmp_path / "late").exists() or octavo.inspect.load(tmp_path / "late").steps == []
    if disk_is_full:
        monkeypatch.setattr(lazy_numpy, "savez_compressed", full)
        with pytest.warns(UserWarning, match=r"cannot write .*counts-00000000\.npz") as said:
            recorder.close()
        assert len(said) == len(called) == 1 and Late.waits == 3
    else:
        recorder.close()
        record = octavo.inspect.load(tmp_path / "late")
        assert record.steps == [0, 2] and record.scalars["loss"] == ([0, 1, 2, 3], losses) and Late.waits == 3


def test_a_closed_recorder_takes_no_step(tmp_path: Path) -> None:
    model = network(recipes.dynamic())
    with octavo.inspect.record(model, tmp_path, every=1) as recorder:
        train(model, range(2), recorder)
    with pytest.raises(RuntimeError, match=r"the record ends before step 2, as close\(\) was called"):
        recorder.step()
    assert octavo.inspect.load(tmp_path).steps == [0, 1]


PLAIN = Row("0", "input", ("output", "grad_weight"), Cast(E4M3, PerTensor(), Dynamic()))
OF_EXPERTS = Row("1", "input", ("output", "grad_weight"), Cast(E4M3, PerTensor(), Dynamic()), 3, 10)
GRADIENT = Row("1", "grad_output", ("grad_input", "grad_weight"), Cast(E5M2, PerTensor(), Delayed()), 3, 20)


def test_sums_the_worst_and_tokens_are_kept() -> None:
    rows = [OF_EXPERTS, PLAIN, GRADIENT]
    random = np.random.default_rng(0)
    counts, extremes = (
        random.random((7, len(Counted.sums) + Counted.exponents)),
        random.random((7, len(Counted.extremes))),
    )
    for name, value in {"zeros": 0, "flushed": 0, "clipped": 0, "nonfinite": 0, "power": 1e4, "error": 1}.items():
        counts[:, Counted.sums.index(name)] = value
    counts[:, 0] = [800, 0, 400, 50, 400, 0, 200]  # elements: tokens are those of the gradient, which is cast once
    counts[[0, 2], Counted.sums.index("flushed")] = 100
    counts[6, Counted.sums.index("nonfinite")] = 1
    arrays = arrays_of(rows, counts, extremes)
    np.testing.assert_allclose(arrays["sums"][:, 0], [1200, 50, 600])
    np.testing.assert_allclose(arrays["exponents"][0], counts[:3, len(Counted.sums) :].sum(0), rtol=1e-6)
    np.testing.assert_allclose(arrays["extremes"][2], extremes[4:].max(0))
    assert arrays["worst"].tolist() == [[2, 2], [2, 1]] and arrays["tokens"].tolist() == [20, 0, 10]
    np.testing.assert_allclose(arrays["worst_sums"], counts[[2, 6], : len(Counted.sums)])
    assert "worst" not in arrays_of([PLAIN], counts[:1], extremes[:1])


def test_each_row_has_the_times_that_its_worst_measure_exceeds_its_limit() -> None:
    fine = {"nonfinite": 0.0, "assumed": 1.0, "clipped": 0.0, "flushed": 0.0, "sqnr": 31.5}
    cases = [
        (PLAIN, {"flushed": 0.02}, 2),
        (PLAIN, {"clipped": 0.005}, 5),
        (PLAIN, {"assumed": 8.0}, 10**-0.3),  # a scale that is the tensor's own
        (GRADIENT, {"assumed": 8.0}, 4),
        (PLAIN, {"sqnr": 18.5}, 10),
        (PLAIN, {"nonfinite": 1e-9}, math.inf),
        (PLAIN, dict.fromkeys(fine, math.nan), -math.inf),
    ]
    measures = {name: np.array([{**fine, **changes}[name] for _, changes, _ in cases]) for name in fine}
    times = largest_times_limit(measures, [row for row, *_ in cases]).tolist()
    assert times == pytest.approx([value for *_, value in cases])
