"""What FP8 on the wire does to averaged gradients and to a run: docs/study/gradient-reduction.md.

A byte-level GPT of 139,000 parameters in float32, on Python's standard library; ranks are simulated in one process. Two
results and a small one:

results/fp8_reduce-<device>.csv, over 2 to 64 ranks, at weights after some steps of training:
    error        |e| / |mean|, percent, root mean square over steps: e is the result less the mean in float64
    of_a_rank    |e| by the root mean square of the ranks' |gradient|, percent
    a_tensor     the largest over parameters of |e| / |mean|, percent, root mean square over steps
    alike        ``error`` where all ranks have the first rank's gradients
    summed       |sum of e| / |sum of means| over the steps, percent
    noise        |mean less the true one| / |mean|, percent: what the ranks' batches leave, estimated from their scatter
results/fp8_reduce_training-<device>.csv: a run's final validation loss, on 4 ranks.
results/fp8_reduce_outlier-<device>.csv: the error of all other elements when the largest of one rank's is 2^octaves as
large.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.measure import UNCOMMITTED, commit, provenance, table, write_results
from benchmarks.common.pages import markdown, read, signed
from benchmarks.distributed.fp8_reduce_ranks import BASELINES, SENT_ALONE, SERVERS, WAYS, Average, in_float32, variants
from octavo.train import BASELINE, GPT, Batches, ModelConfig, load_corpus, next_byte_loss
from octavo.train.trainer import build_model

TAKES = "30 minutes"
MEASURES = (
    "octavo/distributed/fp8_reduce.py",
    "octavo/kernels/reference/cast.py",
    "octavo/numerics.py",
)

SUBJECTS = ["fp8_reduce", "fp8_reduce_outlier", "fp8_reduce_training"]
MODEL = ModelConfig(width=64, layers=2, heads=2, context=64)
WINDOWS, VALIDATION = 4, 1024  # sequences of a rank's batch; of the final validation
RANKS = (2, 4, 8, 16, 32, 64)
TRAINED_ON = 4  # ranks
COMPARED = (
    BASELINES[0],
    "E4M3",
    "E4M3, stochastic",
    "E4M3, error feedback",
    "E4M3, mean in bf16",
    "E4M3, one scale a bucket",
)
COMPARED += ("E4M3, one scale a tensor, FP8 sums", "E5M2")
TRAINED = (*COMPARED, BASELINES[1], *(f"E4M3, servers of 2{way}" for way in ("", ", stochastic", ", error feedback")))
OCTAVES = (0, 4, 8, 12, 16)
LR = 1.5e-3
Row = dict[str, Any]


class Run:
    """A model, and its gradients on as many ranks as there are batches."""

    def __init__(self, seed: int, steps: int) -> None:
        self.model: GPT = build_model(MODEL, BASELINE, seed)
        self.parameters = [*self.model.parameters()]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.batches = Batches(load_corpus(), MODEL.context, WINDOWS, seed)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
        warmup = max(steps // 10, 1)
        rule = lambda step: min((step + 1) / warmup, 0.505 + 0.495 * math.cos(math.pi * min(step / steps, 1)))  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rule)

    def gradients(self, step: int, ranks: int) -> list[Tensor]:
        """Each rank's, flat; a rank's batch is the same however many ranks there are."""
        found = []
        for rank in range(ranks):
            inputs, targets = self.batches.training(step * max(RANKS) + rank)
            loss = next_byte_loss(self.model(inputs), targets)
            found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.parameters)]))
        return found

    def update(self, flat: Tensor) -> None:
        for parameter, part in zip(self.parameters, flat.split(self.sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.schedule.step()

    def validation_loss(self, windows: int) -> float:
        with torch.no_grad():
            losses = [(len(x), float(next_byte_loss(self.model(x), y))) for x, y in self.batches.validation(windows)]
        return sum(count * loss for count, loss in losses) / sum(count for count, _ in losses)


class Errors:
    """What a variant's results differ from float64's."""

    def __init__(self, average: Average, alike: Average) -> None:
        self.average, self.on_alike = average, alike
        self.squares: dict[str, float] = dict.fromkeys(("error", "of_a_rank", "a_tensor", "alike"), 0.0)
        self.summed: Tensor | float = 0.0

    def add(self, flats: Sequence[Tensor], mean: Tensor, a_rank: float, sizes: Sequence[int]) -> None:
        error = self.average(flats).double() - mean
        self.summed = self.summed + error
        first = flats[0].double()
        alike = float((self.on_alike([flats[0]] * len(flats)).double() - first).norm() / first.norm())
        square = float(error.norm()) ** 2
        self.squares["error"] += square / float(mean.norm()) ** 2
        self.squares["of_a_rank"] += square / a_rank**2
        self.squares["alike"] += alike**2
        tensors = zip(error.split([*sizes]), mean.split([*sizes]), strict=True)
        self.squares["a_tensor"] += max(float(own.norm() / of.norm()) ** 2 for own, of in tensors)


def errors(steps: int, warmup: int, all_ranks: Sequence[int], names: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of the first result, of some variants or of all."""
    run = Run(0, 4 * (warmup + steps))
    for step in range(warmup):
        run.update(in_float32(run.gradients(step, TRAINED_ON)))
    kinds = {name: make for name, make in variants(run.sizes).items() if name in names or not names}
    found = {(ranks, name): Errors(make(), make()) for ranks in all_ranks for name, make in kinds.items()}
    means: dict[int, Tensor | float] = dict.fromkeys(all_ranks, 0.0)
    noise = dict.fromkeys(all_ranks, 0.0)
    for step in range(warmup, warmup + steps):
        drawn = run.gradients(step, max(all_ranks))
        for ranks in all_ranks:
            flats = drawn[:ranks]
            exact = torch.stack(flats).double()
            mean, a_rank = exact.mean(0), float(exact.square().sum(1).mean().sqrt())
            means[ranks] = means[ranks] + mean
            scatter = float((exact - mean).square().sum()) / (ranks * (ranks - 1))
            noise[ranks] += scatter / float(mean.square().sum())
            for name in kinds:
                found[ranks, name].add(flats, mean, a_rank, run.sizes)
        run.update(in_float32(drawn))
        print(f"step {step + 1 - warmup} of {steps}", flush=True)
    for (ranks, name), own in found.items():
        numbers = {key: 100 * math.sqrt(square / steps) for key, square in own.squares.items()}
        numbers["summed"] = 100 * float(torch.as_tensor(own.summed).norm() / torch.as_tensor(means[ranks]).norm())
        numbers["noise"] = 100 * math.sqrt(noise[ranks] / steps)
        yield {"ranks": ranks, "variant": name, "steps": steps} | {k: f"{v:.4g}" for k, v in numbers.items()}


def outliers(warmup: int) -> Iterator[Row]:
    """Rows of the third result."""
    run = Run(0, warmup)
    for step in range(warmup):
        run.update(in_float32(run.gradients(step, TRAINED_ON)))
    flats = run.gradients(warmup, TRAINED_ON)
    mean, largest = torch.stack(flats).double().mean(0), int(flats[0].abs().argmax())
    mean[largest] = 0
    for name, make in variants(run.sizes).items():
        for octaves in OCTAVES:
            spoiled = [flats[0].clone(), *flats[1:]]
            spoiled[0][largest] *= 2.0**octaves
            found = make()(spoiled).double()
            found[largest] = 0
            error = f"{100 * float((found - mean).norm() / mean.norm()):.4g}"
            yield {"variant": name, "octaves": octaves, "ranks": TRAINED_ON, "error": error}


def trained(name: str, seed: int, steps: int, windows: int) -> Row:
    """A row of the second result."""
    run = Run(seed, steps)
    average = variants(run.sizes)[name]()
    for step in range(steps):
        run.update(average(run.gradients(step, TRAINED_ON)))
    loss = run.validation_loss(windows)
    return {"variant": name, "seed": seed, "ranks": TRAINED_ON, "steps": steps, "val_loss": f"{loss:.6f}"}


# --- the page ---------------------------------------------------------------------------------------------------------


def gaps(rows: Sequence[Mapping[str, str]]) -> dict[str, tuple[float, float, int]]:
    """By variant: (mean over seeds of the gap from bf16, percent; its standard error; seeds).

    All runs are taken to scatter alike about effects of variant and seed that add, bf16's two ways being one variant.
    """
    # a seed on another device is another: sums there differ in their last bits
    logs = {(row["variant"], row["seed"] + row.get("device", "")): math.log(float(row["val_loss"])) for row in rows}
    effects = [{"bf16" if name in BASELINES else name, f"seed {seed}"} for name, seed in logs]
    columns = sorted(set[str]().union(*effects))
    design = torch.tensor([[float(column in own) for column in columns] for own in effects], dtype=torch.float64)
    values = torch.tensor([*logs.values()], dtype=torch.float64)
    freedom = len(values) - int(torch.linalg.matrix_rank(design))
    rest = values - design @ torch.linalg.pinv(design) @ values
    deviation = 100 * math.sqrt(float(rest.square().sum()) / freedom) if freedom else math.nan
    found = {}
    for name in dict.fromkeys(name for name, _ in logs):
        seeds = [seed for own, seed in logs if own == name and ("bf16", seed) in logs]
        bases = [[logs[base, seed] for base in BASELINES if (base, seed) in logs] for seed in seeds]
        differences = [
            100 * (math.exp(logs[name, seed] - sum(base) / len(base)) - 1)
            for seed, base in zip(seeds, bases, strict=True)
        ]
        if name not in BASELINES and seeds:
            variance = sum(1 + 1 / len(base) for base in bases) / len(seeds) ** 2
            found[name] = sum(differences) / len(seeds), deviation * math.sqrt(variance), len(seeds)
    return found


def across(column: str, names: Sequence[str] = (), subject: str = SUBJECTS[0], by: str = "ranks") -> str:
    """A column of the first result, ranks across, or of another; of some variants, or of those at one level."""
    found = {(row["variant"], row[by]): float(row[column]) for row in read(subject)}
    places = sorted({place for _, place in found}, key=int)
    return markdown(
        [by, *places], [[name, *(f"{found[name, own]:.3g}" for own in places)] for name in names or COMPARED]
    )


def beside_one_level(*ways: str) -> list[str]:
    """Variants at one level and at two."""
    return [f"E4M3{servers}{way}" for way in ways for servers in ("", *(f", servers of {n}" for n in SERVERS))]


def noise_table() -> str:
    """What the batches leave, beside the error of E4M3."""
    found = {row["ranks"]: row for row in read(SUBJECTS[0]) if row["variant"] == "E4M3"}
    cells = [[f"{float(row[column]):.3g}" for row in found.values()] for column in ("noise", "error")]
    return markdown(["ranks", *found], [["the batches", *cells[0]], ["E4M3", *cells[1]]])


def training_table() -> str:
    """Gaps from bf16."""
    found = sorted(gaps(read(SUBJECTS[2])).items(), key=lambda own: TRAINED.index(own[0]))
    lines = [[name, str(seeds), f"{signed(gap, 3)} ± {error:.3f}"] for name, (gap, error, seeds) in found]
    return markdown(["reduction", "seeds", "validation loss above bf16's, %"], lines)


TABLES = {
    "error": lambda: across("error"),
    "of a rank": lambda: across("of_a_rank", SENT_ALONE),
    "alike": lambda: across("alike", ("bf16", "E4M3", "E4M3, stochastic", *SENT_ALONE)),
    "tensor": lambda: across("a_tensor"),
    "summed": lambda: across("summed"),
    "noise": noise_table,
    "levels": lambda: across("error", beside_one_level(*(way for way, _ in WAYS))),
    "levels, summed": lambda: across("summed", beside_one_level("", ", error feedback")),
    "outlier": lambda: across("error", (), SUBJECTS[1], "octaves"),
    "training": training_table,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fp8_reduce", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5), help="of runs")
    parser.add_argument("--part", choices=("errors", "training", "outliers"), help="one result alone")
    parser.add_argument("--variants", nargs="+", default=(), help="these alone, of errors and of runs")
    parser.add_argument("--toy", action="store_true", help="a few steps, written nowhere but to --output")
    parser.add_argument("--output", type=Path, help="another folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = options.output or (UNCOMMITTED if options.toy or commit().endswith("+") else None)
    if options.part in (None, "outliers"):
        _write(SUBJECTS[1], [*outliers(2 if options.toy else 100)], folder)
    if options.part in (None, "errors"):
        sizes = (2, 2, (2, 4)) if options.toy else (4, 100, RANKS)
        made = [*errors(*sizes, options.variants)]
        print(table(made))
        _write(SUBJECTS[0], made, folder)
    if options.part in (None, "training"):
        steps, windows = (3, 8) if options.toy else (options.steps, VALIDATION)
        made = []
        for seed in options.seeds:
            for name in options.variants or TRAINED:
                made.append(trained(name, seed, steps, windows))
                print(*made[-1].values(), flush=True)
                _write(SUBJECTS[2], made, folder)
    return 0


def _write(subject: str, rows: Sequence[Row], folder: Path | None) -> None:
    origin = provenance()
    path = None if folder is None else folder / f"{subject}-{origin['device']}.csv"
    write_results(subject, rows, path, None)
