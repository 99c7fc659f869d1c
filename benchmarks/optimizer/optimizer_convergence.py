"""Every format of an optimizer's state, on one small byte-level GPT: final loss over seeds and betas.

Beside torch's AdamW in float32: octavo's schemes, and by octavo's own parts the schemes of the field, each with and
without the clip to R_t; torchao's and bitsandbytes' 8-bit optimizers where these are installed; FlashOptim's scheme as
optimizer_rivals.py writes it down, for its own kernels need CUDA. A seed fixes weights and data, so runs pair up. Each
run's loss is the mean of its last 50 steps' (nats a byte). Written to results/optimizer_convergence-<device>.csv.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import markdown, read
from benchmarks.optimizer.optimizer_rivals import FlashAdamW
from octavo import E4M3, E5M2, PerTensor
from octavo.optim import E4M4, AdamW, Moment
from octavo.train import GPT, Batches, ModelConfig, load_corpus, next_byte_loss

TAKES = "an hour"
MEASURES = ("octavo/optim", "octavo/kernels/reference")

SIZES = ModelConfig(width=64, layers=2, heads=2, context=64)
BATCH, STEPS, LR, AVERAGED = 16, 1200, 3e-3, 50
BETAS = ((0.9, 0.95), (0.9, 0.999))
LIMIT = 0.02  # nats/byte above float32's
Optimizer = Callable[[Iterable[Any], tuple[float, float]], Any]


def ours(moments: Any, **options: Any) -> Optimizer:
    return lambda params, betas: AdamW(params, LR, betas, 1e-8, 0.1, moments=moments, **options)


def linear_v(fmt: Any, **options: Any) -> tuple[Moment, Moment]:
    return Moment(E4M3, **options), Moment(fmt, **options)


def root_v(fmt: Any, **options: Any) -> tuple[Moment, Moment]:
    return Moment(E4M3, **options), Moment(fmt, root=True, **options)


def library(module: str, name: str) -> Optimizer:
    def build(params: Iterable[Any], betas: tuple[float, float]) -> Any:
        return getattr(importlib.import_module(module), name)(params, lr=LR, betas=betas, weight_decay=0.1)

    return build


PREVIOUS: dict[str, Any] = {"granularity": PerTensor(), "scale": "previous"}
BASE = "torch AdamW, fp32"
SCHEMES: dict[str, Optimizer] = {
    BASE: lambda params, betas: torch.optim.AdamW(params, lr=LR, betas=betas, weight_decay=0.1),
    "fp8 (the default)": ours("fp8"),
    "fp8, to nearest": ours((Moment(E4M3), Moment(E4M4, root=True))),
    "fp8, not clipped": ours("fp8", clip_update=False),
    "bf16, stochastic": ours("bf16"),
    "bf16, to nearest": ours((Moment("bf16"), Moment("bf16"))),
    "v in E4M3, blocks": ours(linear_v(E4M3), clip_update=False),
    "v in E4M3, blocks, clipped": ours(linear_v(E4M3)),
    "v in E4M3, per tensor": ours(linear_v(E4M3, granularity=PerTensor()), clip_update=False),
    "v in E4M3, per tensor, clipped": ours(linear_v(E4M3, granularity=PerTensor())),
    "sqrt(v) in E4M3, previous amax": ours(root_v(E4M3, **PREVIOUS), clip_update=False),
    "sqrt(v) in E4M3, previous amax, clipped": ours(root_v(E4M3, **PREVIOUS)),
    "sqrt(v) in E5M2, previous amax": ours(root_v(E5M2, **PREVIOUS), clip_update=False),
    "sqrt(v) in E5M2, previous amax, clipped": ours(root_v(E5M2, **PREVIOUS)),
    "torchao AdamWFp8": library("torchao.optim", "AdamWFp8"),
    "torchao AdamW8bit": library("torchao.optim", "AdamW8bit"),
    "bitsandbytes AdamW8bit": library("bitsandbytes.optim", "AdamW8bit"),
    "FlashOptim's scheme": lambda params, betas: FlashAdamW(params, LR, betas, 1e-8, 0.1),
}
INSTALLED = [name for name in SCHEMES if not name.startswith(("torchao", "bitsandbytes")) or find_spec(name.split()[0])]


def one_run(task: tuple[str, int, tuple[float, float], int]) -> float:
    """Return the mean loss of a run's last steps; inf where it is not finite."""
    scheme, seed, betas, steps = task
    torch.set_num_threads(1)
    model = model_of(seed)
    return trained(model, SCHEMES[scheme](model.parameters(), betas), seed, steps)


def model_of(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(SIZES)


def trained(model: torch.nn.Module, optimizer: Any, seed: int, steps: int) -> float:
    """Train on a seed's data, and return the mean loss of the last steps; inf where it is not finite."""
    batches, losses = Batches(load_corpus(None), SIZES.context, BATCH, seed), []
    for step in range(steps):
        for group in optimizer.param_groups:
            rate = LR * min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)))
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        loss = next_byte_loss(model(batches.training(step)[0]), batches.training(step)[1])
        if not math.isfinite(float(loss.detach())):
            return math.inf
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return statistics.mean(losses[-AVERAGED:])


def summary(losses: dict[tuple[Any, ...], float], schemes: list[str], seeds: list[int]) -> list[dict[str, str]]:
    """Return a row for each scheme and beta2: mean loss, and its differences from float32's of the same seed."""
    rows = []
    for scheme in schemes:
        for betas in BETAS:
            finals = [losses[scheme, betas, seed] for seed in seeds]
            gaps = [losses[scheme, betas, seed] - losses[BASE, betas, seed] for seed in seeds]
            row = {"scheme": scheme, "beta2": str(betas[1]), "loss": f"{statistics.mean(finals):.4f}"}
            row |= {"mean_gap": f"{statistics.mean(gaps):+.4f}", "largest_gap": f"{max(gaps):+.4f}"}
            rows.append(row | {f"seed_{seed}": f"{loss:.4f}" for seed, loss in zip(seeds, finals, strict=True)})
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimizer_convergence", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--schemes", nargs="+", default=INSTALLED, choices=SCHEMES)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    schemes, losses = list(dict.fromkeys([BASE, *options.schemes])), {}
    tasks = [(scheme, seed, betas, options.steps) for scheme in schemes for betas in BETAS for seed in options.seeds]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for (scheme, seed, betas, _), loss in zip(tasks, pool.map(one_run, tasks), strict=True):
            losses[scheme, betas, seed] = loss
            print(f"{scheme}, betas {betas}, seed {seed}: {loss:.4f}", flush=True)
    rows = summary(losses, schemes, options.seeds)
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('optimizer_convergence', rows)}")
    default = [row for row in rows if "default" in row["scheme"]]
    missed = [row for row in default if float(row["largest_gap"]) > LIMIT]
    print(f"{'MISSED' if missed else 'ok'}: the default is within {LIMIT} nats/byte of float32 in every run")
    return int(bool(missed))


def convergence_table() -> str:
    """Return a table of mean and largest gaps from float32's losses, by scheme and beta2."""
    texts: dict[str, dict[str, str]] = {}
    for row in read("optimizer_convergence"):
        text = f"{row['loss']}, {row['mean_gap']}, {row['largest_gap']}".replace("-", "\N{MINUS SIGN}")
        texts.setdefault(row["scheme"], {})[row["beta2"]] = text
    betas = sorted({beta2 for by_beta2 in texts.values() for beta2 in by_beta2})
    cells = ([scheme, *(by_beta2.get(beta2, "") for beta2 in betas)] for scheme, by_beta2 in texts.items())
    return markdown(["", *(f"β2 = {beta2}: loss, mean gap, largest" for beta2 in betas)], cells)


TABLES = {"convergence": convergence_table}
