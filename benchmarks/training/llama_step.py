"""A whole training step of a Llama of 1.2 billion parameters on a GPU: eager, compiled, captured; time and memory.

The model is transformers', without weights of anyone's. Speed-ups are over bf16 in the same mode and run. "octavo fp8
state" is delayed with FP8 weights, moments in FP8 and no wider master; all others have torch's fused AdamW.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.common.measure import LiveTable, write_results
from benchmarks.common.models import with_torchao
from benchmarks.common.pages import markdown, read
from octavo.tune.timing import DEVICE, ON_GPU, Deadline, describe, synchronize, timings

TAKES = "a GPU; 4 minutes"
MEASURES = ("octavo/kernels/triton", "octavo/autograd", "octavo/nn", "octavo/optim")

LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
TOY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODES = ("eager", "captured", "compiled")
COLUMNS = {"variant": 22, "mode": 9, "ms": 9, "tokens_s": 10, "peak_gib": 9, "by_bf16": 8}
WARM_UP = 3  # steps, in which delayed scales come to the host


def llama(toy: bool) -> nn.Module:
    """The model in bf16, its head as wide as Llama 3's but for a toy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = TOY if toy else LARGE
    config = LlamaConfig(**sizes, num_key_value_heads=sizes["num_attention_heads"] // 2, use_cache=False)
    config.vocab_size = 96 if toy else 128256
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[no-any-return]


def _without_head(module: nn.Module, name: str) -> bool:
    return name != "lm_head"


def _octavo(recipe: str, model: nn.Module, **options: Any) -> nn.Module:
    return octavo.convert(model, getattr(octavo.recipes, recipe)(), _without_head, **options)


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bf16": lambda model: model,
    **{f"octavo {name}": functools.partial(_octavo, name) for name in ("delayed", "dynamic", "rowwise", "blockwise")},
    "octavo fp8 state": functools.partial(_octavo, "delayed", weight_storage="fp8"),
    "torchao tensorwise": lambda model: with_torchao(model, "tensorwise"),
    "torchao rowwise": lambda model: with_torchao(model, "rowwise"),
}


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "octavo fp8 state":
        return octavo.optim.AdamW(model.parameters(), lr=1e-4, moments="fp8", master=None)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU, capturable=ON_GPU)


def make_step(name: str, mode: str, toy: bool) -> Callable[[], Tensor]:
    """A training step, warmed up; its loss, which stays on the device."""
    torch.manual_seed(0)
    batch, context = (2, 16) if toy else (8, 2048)
    model = VARIANTS[name](llama(toy))
    optimizer = _optimizer(name, model)
    tokens = torch.randint(0, 96, (batch, context), device=DEVICE)

    def loss_of(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    if mode == "compiled":
        loss_of = torch.compile(loss_of, dynamic=False, backend="inductor" if ON_GPU else "aot_eager")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=mode != "captured")
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if mode != "captured" or not ON_GPU:
        for _ in range(WARM_UP):
            step()
        return step
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    replay.keeps = model, optimizer, graph  # type: ignore[attr-defined]
    return replay


def measure(name: str, mode: str, toy: bool) -> dict[str, str]:
    """A row, without its speed-up."""
    if ON_GPU:
        gc.collect()  # a graph and what it keeps refer to each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = make_step(name, mode, toy)
    first, last = (float(step()) for _ in range(2))
    if not (math.isfinite(last) and last < first + 0.5):
        raise ArithmeticError(f"the loss goes from {first:.3f} to {last:.3f}")
    seconds = timings({"step": step}, rounds=2 if toy else 4, seconds_a_variant=3, hide_host=False).median("step")
    tokens = 2 * 16 if toy else 8 * 2048
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
    return {
        "variant": name,
        "mode": mode,
        "ms": f"{1e3 * seconds:.2f}",
        "tokens_s": f"{tokens / seconds:.0f}",
        "peak_gib": f"{peak:.2f}",
    }


def llama_table() -> str:
    """Of docs/kernels.md: steps, and their memory."""
    keys = ("variant", "mode", "ms", "by_bf16", "peak_gib")
    return markdown(
        ("step", "mode", "ms", "times bf16's speed", "peak GiB"), ([row[k] for k in keys] for row in read("llama_step"))
    )


TABLES = {"llama": llama_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks llama_step", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a tiny model, with or without a GPU")
    parser.add_argument("--minutes", type=float, default=4.0, help="what is not begun by then is left out")
    parser.add_argument("--output", type=Path, help="the CSV, instead of results/llama_step-<device>.csv")
    options = parser.parse_args(arguments)
    if not ON_GPU and not options.toy:
        parser.error("a step of this model needs an NVIDIA GPU; --toy runs the code without one")
    deadline, rows, live = Deadline(options.minutes), [], LiveTable(COLUMNS)
    base: dict[str, float] = {}
    failed = False
    for mode in MODES:
        for name in VARIANTS:
            if deadline.left() < 0:
                print(f"{name}, {mode}: left out, no time")
                continue
            try:
                row = measure(name, mode, options.toy)
            except ImportError as error:  # torchao is not everywhere
                print(f"{name}, {mode}: {describe(error)}")
                continue
            except Exception as error:
                print(f"FAILED: {name}, {mode}: {describe(error)}", flush=True)
                failed |= not name.startswith("torchao")
                continue
            seconds = float(row["ms"])
            base.setdefault(mode, seconds)  # bf16 is the first
            rows.append({**row, "by_bf16": f"{base[mode] / seconds:.3f}"})
            live.add(rows[-1])
            write_results("llama_step", rows, options.output)
            torch._dynamo.reset()
    return int(failed)
