"""Recording a training: in one of every few steps its casts are counted on the device; the host never waits for it.

Of a recorded step the modules' casts are counted in a Table (rows.py) as they compute. Updates (weight_updates.py)
reads the weights before and after the optimizer's update, and the Twin (twin.py) compares its gradients before it. At
the step's end ``_count`` adds these up over ranks, and ``_send`` sends them to the host, with the scalars and the two
numbers that decide events. When they have arrived, in a later step, ``_write`` hands the Twin what decides whether
later steps have an FP8 rerun, and writes them by the RecordWriter. Who writes which file stands in
record.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.distributed.files import reason_of
from octavo.distributed.ranks import Ranks
from octavo.in_flight import InFlight
from octavo.inspect.findings import largest_times_limit
from octavo.inspect.first_batch import OUTPUTS
from octavo.inspect.module_outputs import OutputChanges
from octavo.inspect.record import UNWATCHED, RecordWriter, by_layer, measures_of, np, weight_measures
from octavo.inspect.remedies import RECIPES_FILE, own_recipes
from octavo.inspect.rows import Row, Table, require_whole
from octavo.inspect.twin import LEAST_RERUN_COSINE, NO_HOOKS, NO_TWIN, OTHER_GRADIENTS, TWIN_LOSS, Comparison, Twin
from octavo.inspect.weight_updates import (
    FROZEN,
    GROUP,
    WEIGHT_STATISTICS,
    Updates,
    count_weights,
    optimizer_facts,
    other_parameters,
    tied_names,
    trained_names,
)
from octavo.kernels.arguments import Counted
from octavo.recipes import to_json
from octavo.weights.fsdp2 import whole

Scalar = float | Tensor
# The names of numbers that a step notes beside its scalars, and that decide events when they arrive from the device:
# whether the step changed nothing, and Comparison.reproduced. No scalar has such a name.
SKIPS, REPRODUCED = "(skips)", "(reproduced)"
SKIPPED = "neither the weights nor the optimizer's state were touched"


class _Sent(NamedTuple):
    """Numbers on their way to the host: the counts of a recorded step, and what the steps until then noted."""

    step: int
    table: Table
    noted: dict[int, dict[str, Scalar]]  # tensors' values are the last tensor of ``in_flight``, in this order
    names: tuple[str, ...]  # of the counts
    in_flight: InFlight  # the counts, and the values of ``noted``
    others: Sequence[str]  # names of parameters that are no layer's weight
    outputs: OutputChanges | None  # of modules, whose tensors are among the counts


class Recorder:
    """Records the effects of a training's casts on inputs, weights and gradients, in one of every few steps.

    A recorded step takes one more launch for each cast; other steps are as without a recorder, and nothing waits for
    the device. A compiled model is compiled once more, for the recorded steps. The ranks of a process group add up
    their counts, and rank 0 writes. If it can't write, say because the disk is full, it warns once, and the record
    ends there while the training goes on.

    Args:
        model: with layers that octavo.convert or octavo.nn made.
        to: a folder for the record, made if absent; see octavo.inspect.load.
        every: record the first step, and then one of so many.
        optimizer: its masters, and its moments in FP8, are recorded too.
        schedule: an octavo.schedule.PrecisionSchedule whose switches, recoveries and skipped steps are recorded.
        step: in a run that is resumed, how many steps it had done: the record of later steps is deleted.
        group: the torch.distributed process group of the ranks that train together; all ranks, by default.
        twin: compute each recorded step once more in high precision, before the optimizer's update, and record how far
            losses and weights' gradients are apart: the one measurement that tells whether FP8 is the cause. Before it
            a quarter of the first recorded batch runs again: what modules and backward compute of it tells a change of
            the program from one of the data. After it the same forward runs from weights moved along the gradients,
            which tells whether backward is that of the forward. No run leaves a trace in the training; they take two
            and a quarter forwards, one and a quarter backwards, and memory for activations, gradients and a copy of the
            weights; the first recorded step, and later ones where needed, a forward and a backward in FP8 more.
        on_record: called on rank 0 with a step and its numbers by name, as they are written: the scalars of each step,
            and for a recorded one "layer.role.measure" ("layer.role.product.measure" where a role has two casts).

    Raises:
        ValueError: for a model without FP8 layers or on several devices, for ``every`` below 1, for ``step`` below 0,
            and for a folder that has a record while ``step`` is 0. TypeError: for an ``optimizer`` that is none.

    Example:
        >>> import tempfile, torch, octavo
        >>> model = torch.nn.Sequential(octavo.nn.Linear(64, 64), octavo.nn.Linear(64, 16))
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with octavo.inspect.record(model, folder, every=2) as recorder:
        ...         for _ in range(4):
        ...             loss = model(torch.randn(8, 64)).square().mean()
        ...             loss.backward()
        ...             optimizer.step()
        ...             recorder.step(loss=loss)
        ...     found = octavo.inspect.load(folder)
        >>> found.steps, found.rows[0].layer, found.measures["flushed"].shape
        ([0, 2], '0', (2, 6))
    """

    def __init__(
        self,
        model: nn.Module,
        to: str | Path,
        every: int = 50,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: Any = None,
        step: int = 0,
        group: Any = None,
        twin: bool = True,
        on_record: Callable[[int, dict[str, float]], object] | None = None,
    ) -> None:
        require_whole("every", every, 1)
        require_whole("step", step, 0)
        if optimizer is not None and not (hasattr(optimizer, "state") and hasattr(optimizer, "param_groups")):
            raise TypeError(f"optimizer={optimizer!r}: give the optimizer of this training, or None")
        self.model, self.every, self.optimizer, self.schedule = model, every, optimizer, schedule
        self.on_record = on_record
        self._step = step
        self._is_closed = False
        self._tabulate()
        if not self._table.rows and schedule is None:
            raise ValueError("the model has no layer in FP8 to record: octavo.convert it first")
        self._ranks = Ranks.of_process() if group is None else Ranks(group)
        with self._ranks.together():
            self._writer = RecordWriter(Path(to), step) if self._ranks.rank == 0 else None
        self._table_written: Table | None = None
        self._tied, self._trained, self._updates = tied_names(model), trained_names(model), Updates(optimizer)
        self._twin = Twin(model, optimizer, self._ranks, Path(to), step > 0) if twin else None
        self._options: dict[str, Scalar] = {}  # the optimizer's options, as they were last written
        self._others: list[str] = []
        self._noted: dict[int, dict[str, Scalar]] = {}  # numbers by step and name
        self._sent: list[_Sent] = []
        self._switches = 0 if schedule is None else len(schedule.switches)
        self._begin()

    def step(self, loss: Scalar | None = None, grad_norm: Scalar | None = None, **scalars: Scalar) -> None:
        """End a step; to be called after the optimizer's step.

        Args:
            loss, grad_norm: of this step, numbers or tensors on any device.
            scalars: other numbers by name.

        Raises:
            RuntimeError: after ``close``.
        """
        if self._is_closed:
            raise RuntimeError(f"the record ends before step {self._step}, as close() was called: make a Recorder anew")
        comparison = None if self._twin is None else self._twin.take()
        if self._continues:
            numbers = self._changed_facts() | {"loss": loss, "grad_norm": grad_norm, **scalars}
            numbers[SKIPS] = self._steps_skipped()
            if comparison is not None:
                numbers |= comparison.scalars | {REPRODUCED: comparison.reproduced}
                numbers[TWIN_LOSS] = comparison.twin_loss(loss, scalars.get("loss_scale"))
            for name, value in numbers.items():  # copied without autograd's graph; sharded tensors as whole ones
                if isinstance(value, Tensor):
                    value = whole(value).detach().reshape(()).to(self._table.sums.device, non_blocking=True, copy=True)
                if value is not None:
                    self._noted.setdefault(self._step, {})[name] = value
        for switch in () if self.schedule is None else self.schedule.switches[self._switches :]:
            self.event("recovery" if switch.phase < 0 else "switch", f"{switch.name}: {switch.reason}")
            self._switches += 1
        if self._is_recorded:
            counts = self._count(comparison) if self._table.rows else {}
            self._send(counts, None if comparison is None else comparison.outputs)
        while self._sent and self._sent[0].in_flight.has_arrived:
            self._write(self._sent.pop(0))
        self._step += 1
        self._begin()

    def event(self, kind: str, text: str) -> None:
        """Record an event of this step.

        A recorder itself records each "switch" and "recovery" of its schedule, each step that is "skipped" by the
        schedule or by an optimizer of octavo.optim, parameters that modules no longer share ("untied"), those that no
        longer require a gradient ("frozen"), and steps without a twin ("no twin") or that it could not watch
        ("unwatched"). Other events are recorded by calling this.
        """
        with self._or_ends():
            if self._writer is not None:
                self._writer.add_lines(_event(self._step, kind, text))

    def close(self) -> None:
        """Write all numbers on their way to the host, and stop counting in the model; no step can follow."""
        self._is_closed = True
        self._table.attach(False)
        self._updates.close()
        if self._twin is not None:
            self._twin.close()
        if self._noted:
            self._send({})
        for sent in self._sent:
            self._write(sent)
        self._sent = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _continues(self) -> bool:
        """Whether numbers are still sent: if rank 0 cannot write any more, it still adds up counts with other ranks."""
        return self._writer is not None or self._ranks.size > 1

    @property
    def _is_recorded(self) -> bool:
        """Whether the casts of this step are counted."""
        return self._continues and self._step % self.every == 0

    @contextlib.contextmanager
    def _or_ends(self) -> Iterator[None]:
        """End the record instead of the training if a file can't be written."""
        try:
            yield
        except OSError as error:
            assert self._writer is not None
            path, self._writer = error.filename or self._writer.folder, None
            why = f"{reason_of(error)}; the training goes on, and no more of it is recorded"
            warnings.warn(f"cannot write {path}: {why}", stacklevel=4)

    def _begin(self) -> None:
        """Begin a step: of a recorded one note what changed in the model, and make its modules count."""
        if not self._is_recorded:
            return self._table.attach(False)
        if is_new := not self._table.is_of(self.model):
            self._table.attach(False)
            self._tabulate()
        for names in sorted(self._tied - tied_names(self.model)):
            self.event("untied", names)
            self._tied.discard(names)
        last_trained, self._trained = self._trained, trained_names(self.model)
        if frozen := last_trained - self._trained:
            self.event(FROZEN, ", ".join(sorted(frozen)))
        self._table.attach(True)
        if self._table.rows:
            last_others, others = self._others, other_parameters(self.model, self._table.layers)
            self._others = [*others]
            modules = [module for module, _ in self._table.layers]
            self._updates.begin([*modules, *others.values()], is_as_before=self._others == last_others and not is_new)
            if self._twin is not None:
                self._twin.begin(self._table.layers)

    def _changed_facts(self) -> dict[str, Scalar | None]:
        """Return the optimizer's facts in a recorded step; of its groups' options those that changed."""
        facts = optimizer_facts(self.optimizer) if self._is_recorded else {}
        facts = {name: x for name, x in facts.items() if isinstance(x, Tensor) or self._options.get(name) != x}
        self._options |= {name: fact for name, fact in facts.items() if GROUP in name}
        return facts

    def _steps_skipped(self) -> Scalar | None:
        """Return a number that is not 0 in a step that changed nothing; None where no optimizer or schedule counts."""
        optimizer = self.optimizer if self.schedule is None else self.schedule.optimizer
        skipped: Scalar | None = getattr(optimizer, "skip_flag", None)
        return getattr(self.schedule, "skip_flag", None) if skipped is None else skipped

    def _tabulate(self) -> None:
        """Make a table of the model's present layers and recipes."""
        self._table, self._recipes = Table(self.model), own_recipes(self.model)

    @torch.no_grad()
    def _count(self, comparison: Comparison | None) -> dict[str, Tensor]:
        """Return a recorded step's counts by name, on the device: of all ranks."""
        table = self._table
        count_weights(table.layers, self._ranks)
        weight_statistics = self._updates.end()
        sums, extremes = self._ranks.sum(table.sums).clone(), self._ranks.largest(table.extremes).clone()
        table.sums.zero_()
        table.extremes.zero_()
        counts = {"sums": sums, "extremes": extremes, "moved": self._ranks.sum(weight_statistics)}
        # rank 0 alone reads in _say_unwatched that no hook runs, and says so: then all ranks' twins end together
        if self._twin is not None and self._ranks.any(bool(self._twin.reason) or not self._updates.is_hooked):
            if self.optimizer is not None and self._twin.reason:
                self.event(NO_TWIN, self._twin.reason)
            self._twin.close()
            self._twin = None
        if comparison is None:
            return counts
        counts |= {"twin": comparison.products, "rerun_loss": comparison.rerun_loss}
        outputs = comparison.outputs
        return counts if outputs is None else counts | {"outputs": outputs.sums, "samples": outputs.values}

    def _send(self, counts: Mapping[str, Tensor], outputs: OutputChanges | None = None) -> None:
        """Send a recorded step's counts, and what the steps until it noted, on their way to the host."""
        noted, self._noted = self._noted, {}
        if self._writer is None:
            return
        # as float64: a count in a loss's dtype would be rounded
        on_device = [x.double() for of_step in noted.values() for x in of_step.values() if isinstance(x, Tensor)]
        values = torch.stack(on_device) if on_device else self._table.sums.new_zeros(0, dtype=torch.float32)
        in_flight = InFlight(*counts.values(), values)
        sent = _Sent(self._step, self._table, noted, tuple(counts), in_flight, self._others, outputs)
        self._sent.append(sent)

    def _write(self, sent: _Sent) -> None:
        """Write the numbers that were sent when they have arrived, and call ``on_record`` with them."""
        *tensors, values = sent.in_flight.wait()
        counts = dict(zip(sent.names, tensors, strict=True))
        if self._writer is None:
            return
        if self._twin is not None and "twin" in counts:
            self._twin.arrived(counts["twin"], counts["rerun_loss"])
        arrived, events, scalars = iter(values.tolist()), [], {}
        for step, noted in sent.noted.items():
            numbers = {name: next(arrived) if isinstance(x, Tensor) else x for name, x in noted.items()}
            if numbers.pop(SKIPS, 0) != 0:
                events.append(_event(step, "skipped", SKIPPED))
            if (cosine := numbers.pop(REPRODUCED, 1.0)) < LEAST_RERUN_COSINE:
                events.append(_event(step, NO_TWIN, OTHER_GRADIENTS.format(cosine)))
            if numbers:
                scalars[step] = {name: x if math.isfinite(x) else math.nan for name, x in numbers.items()}
        with self._or_ends():
            self._writer.add_lines(*events, *({"step": step, **of_step} for step, of_step in scalars.items()))
            if counts:
                arrays = self._write_counts(self._writer, sent, counts)
                if self.on_record is not None:
                    scalars.setdefault(sent.step, {}).update(_by_name(sent.table.rows, arrays))
        if self.on_record is not None:
            for step, of_step in scalars.items():
                self.on_record(step, of_step)

    def _write_counts(self, writer: RecordWriter, sent: _Sent, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Write the counts of a recorded step, and what they belong to where that changed; return its arrays."""
        self._say_unwatched(writer, sent.step, tensors["moved"])
        if self._table_written is not sent.table:
            rows = [row.as_dict() for row in sent.table.rows]
            writer.write(f"rows-{sent.step:08d}.json", json.dumps(rows, indent=1))
            self._table_written = sent.table
            if self._recipes is not None:
                writer.write(RECIPES_FILE, to_json(self._recipes))
        counts = {name: tensor.numpy() for name, tensor in tensors.items()}
        layers = len(sent.table.layers)
        arrays = arrays_of(sent.table.rows, counts["sums"], counts["extremes"])
        arrays["moved"] = counts["moved"][:layers]
        arrays |= {"twin": counts["twin"]} if "twin" in counts else {}
        if sent.outputs is not None:
            arrays |= sent.outputs.arrays(counts["outputs"])
            samples = {"lengths": sent.outputs.lengths, "values": counts["samples"], **sent.outputs.names()}
            writer.write_arrays(OUTPUTS, samples, np.savez)
        arrays |= {"others": np.array(sent.others, dtype=str), "others_moved": counts["moved"][layers:]}
        writer.write_arrays(f"counts-{sent.step:08d}.npz", arrays, np.savez_compressed)
        return arrays

    def _say_unwatched(self, writer: RecordWriter, step: int, weight_statistics: Tensor) -> None:
        """Write an event, once, if weights changed in a step that ran no hooks, unlike one that a GradScaler skips."""
        sums = dict(zip(WEIGHT_STATISTICS, weight_statistics.T, strict=True))
        if not self._updates.is_hooked or sums["sampled_before_update"].any() or not sums["changed"].any():
            return
        self._updates.is_hooked = False
        missing = "what else writes weights is not recorded, nor are gradients that are cleared before recorder.step()"
        text = f"optimizer.step() runs no hooks, as if it is compiled: {missing}"
        events = {UNWATCHED: text} | ({} if self._twin is None else {NO_TWIN: NO_HOOKS})
        writer.add_lines(*(_event(step, kind, each) for kind, each in events.items()))


def _event(step: int, kind: str, text: str) -> dict[str, Any]:
    """Return the line of an event in steps.jsonl."""
    return {"step": step, "event": kind, "text": text}


def _by_name(rows: Sequence[Row], counts: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's finite measures by "layer.role.measure".

    A layer of experts also has those of the worst expert, and the fewest and the most tokens that an expert got.
    """
    rows_of_role = Counter((row.layer, row.role) for row in rows)
    parts = ((row.layer, row.role, *row.products * (rows_of_role[row.layer, row.role] > 1)) for row in rows)
    names = [".".join(filter(None, part)) for part in parts]
    tables = [(names, measures_of(rows, counts["sums"], counts["extremes"].astype("float64")))]
    if "worst" in counts:
        rows_of_experts = [(f"{name}.worst_expert", row) for name, row in zip(names, rows, strict=True) if row.experts]
        experts = [row for _, row in rows_of_experts], counts["worst_sums"], counts["worst_extremes"].astype("float64")
        tables.append(([name for name, _ in rows_of_experts], measures_of(*experts)))
        tokens = by_layer(rows, counts["tokens"])
        ends = {"least_tokens": min, "most_tokens": max}
        tables.append((list(tokens), {name: [*map(end, tokens.values())] for name, end in ends.items()}))
    layers = [".".join(filter(None, (layer, "weight"))) for layer in dict.fromkeys(row.layer for row in rows)]
    tables.append((layers, weight_measures(counts["moved"])))
    return {
        ".".join(filter(None, (name, measure))): float(value)
        for names_of_rows, measures in tables
        for measure, values in measures.items()
        for name, value in zip(names_of_rows, values, strict=True)
        if math.isfinite(value)
    }


_TOKENS_FROM = ("grad_output", "input", "weight")  # roles, the first preferred


def arrays_of(rows: Sequence[Row], counts: Any, extremes: Any) -> dict[str, Any]:
    """Return the NumPy arrays that a record has of a step, from counts [lines, 71] and extremes [lines, 3].

    A row of experts is counted in one line for each expert, and recorded in two:

        sums, exponents, extremes    for each row, all experts together
        worst_...                    the same of the worst expert alone, for each row of experts
        worst                        [rows of experts, 2]: its index, how many experts have a measure beyond its limit
        tokens                       each expert's tokens [E], one layer after the other
    """
    line_counts = [row.experts or 1 for row in rows]
    ends = np.cumsum(line_counts)
    starts = ends - line_counts
    arrays = _counts("", np.add.reduceat(counts, starts), np.maximum.reduceat(extremes, starts))
    rows_of_experts = [(row, slice(*span)) for row, *span in zip(rows, starts, ends, strict=True) if row.experts]
    if not rows_of_experts:
        return arrays
    row_of_line = [row for row in rows for _ in range(row.experts or 1)]
    times_limit = largest_times_limit(measures_of(row_of_line, counts[:, : len(Counted.sums)], extremes), row_of_line)
    worst_lines = np.array([lines.start + times_limit[lines].argmax() for _, lines in rows_of_experts])
    beyond = [(times_limit[lines] > 1).sum() for _, lines in rows_of_experts]
    arrays |= _counts("worst_", counts[worst_lines], extremes[worst_lines])
    arrays["worst"] = np.stack([worst_lines - [lines.start for _, lines in rows_of_experts], beyond], 1)
    # Tokens are counted from a row that was cast, best grad_output's: it is cast once however often forward runs
    tokens = []
    for _, rows_of_layer in itertools.groupby(rows_of_experts, key=lambda each: each[0].layer):
        row, lines = min(rows_of_layer, key=lambda x: (not counts[x[1], 0].any(), _TOKENS_FROM.index(x[0].role)))
        tokens.append(np.rint(counts[lines, 0] / row.features))
    return arrays | {"tokens": np.concatenate(tokens).astype("int64")}


def _counts(prefix: str, counts: Any, extremes: Any) -> dict[str, Any]:
    """Return the arrays of a record from counts [rows, 71] and extremes [rows, 3], by their names behind a prefix."""
    sums, exponents = counts[:, : len(Counted.sums)], counts[:, len(Counted.sums) :].astype("float32")
    return {f"{prefix}sums": sums, f"{prefix}exponents": exponents, f"{prefix}extremes": extremes}
