"""A whole training step on a CPU: the trainer's model in bf16, 256 wide, 4 layers, 8 x 256 tokens, AdamW.

What bf16 costs depends on the CPU's instructions, so rows name those, and the aims are two. ``--model llama`` takes
transformers' Llama as it comes, 512 wide, 4 layers, 8 x 512 tokens, and ``--compiled`` compiles all variants. On a CPU
that multiplies bf16 slowly ``--dtype float32`` compares with what one would train there; Llama's aims are of either.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.common.measure import RESULTS, device_name, interleaved, ratio, table, write_results
from benchmarks.common.models import OCTAVO, TORCHAO, with_octavo, with_torchao
from benchmarks.training import saved_bytes
from octavo.kernels.capability import fast_dtype
from octavo.train.config import VOCABULARY, ModelConfig
from octavo.train.model import GPT, next_byte_loss

TAKES = "3 minutes"
MEASURES = ("octavo/kernels/cpu", "octavo/kernels/reference", "octavo/autograd")

SIZES = ModelConfig(width=256, layers=4, heads=4, context=256)
BATCH = 8
AIMS = {  # of bf16's step, by the dtype that the CPU multiplies fastest
    torch.bfloat16: {"dynamic": 1.5, "delayed": 1.5, "rowwise": 1.9, "blockwise": 1.9, "mx": 1.9},
    torch.float32: {"dynamic": 0.5, "delayed": 0.5, "rowwise": 0.7, "blockwise": 0.7, "mx": 0.7},
}
LLAMA = ("dynamic", "delayed", "blockwise")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "bf16", "sve")  # torch.cpu's and Linux's names


def instructions() -> str:
    """Those of INSTRUCTIONS that /proc/cpuinfo names, or torch where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^(?:flags|Features)\s*:(.*)", cpuinfo.read_text(), re.MULTILINE)
        found = set(named.group(1).split() if named else ())
    else:
        found = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    return " ".join(name for name in INSTRUCTIONS if name in found)


LLAMA_AIMS = {False: {"dynamic": 1.3, "delayed": 1.3, "blockwise": 1.5}, True: dict.fromkeys(LLAMA, 1.4)}


def step_of(
    convert: Callable[[nn.Module], nn.Module], llama: bool, compiled: bool, dtype: torch.dtype
) -> Callable[[], None]:
    """One training step of a converted model."""
    torch.manual_seed(0)
    model = convert((saved_bytes.build("Llama")[0] if llama else GPT(SIZES)).to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (8, 512) if llama else (BATCH, SIZES.context)
    tokens, targets = (torch.randint(0, VOCABULARY, shape) for _ in range(2))
    if compiled:
        model.compile(dynamic=False)

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss if llama else next_byte_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu_step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="in a row in each round, as in training")
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)

    llama, compiled = options.model == "llama", options.compiled
    ours, theirs = (LLAMA, TORCHAO[:1]) if llama else (OCTAVO, TORCHAO)
    base = {"bfloat16": "bf16"}.get(options.dtype, options.dtype)
    kinds: dict[str, Callable[[nn.Module], nn.Module]] = {base: lambda model: model}
    kinds |= {f"octavo {name}": functools.partial(with_octavo, recipe=name) for name in ours}
    if llama:
        kinds |= {f"octavo {name}, fused": functools.partial(with_octavo, recipe=name, fuse=True) for name in ours}
    kinds |= {f"torchao {name}": functools.partial(with_torchao, recipe=name) for name in theirs}
    dtype = getattr(torch, options.dtype)
    variants = {name: step_of(convert, llama, compiled, dtype) for name, convert in kinds.items()}
    fastest = fast_dtype(torch.device("cpu"))
    seconds = interleaved(variants, options.rounds, options.steps)
    rows = [
        {
            "variant": name,
            "step_ms": f"{statistics.median(seconds[name]) * 1e3:.1f}",
            f"by_{base}": f"{ratio(seconds, name, base):.3f}",
            "codes_in": str(fastest).removeprefix("torch."),
            "instructions": instructions(),
        }
        for name in variants
    ]
    print(table(rows))
    if not options.no_write:
        kind = "" if fastest == torch.bfloat16 else "-without-bf16"
        subject = "cpu_step" + "_llama" * llama + "_compiled" * compiled + f"_{base}" * (base != "bf16")
        path = RESULTS / f"{subject}-{device_name()}{kind}.csv"
        print(f"written to {write_results('cpu_step', rows, path)}")
    fastest_torchao = min(ratio(seconds, f"torchao {name}", base) for name in theirs)
    missed = False
    for name, aim in (LLAMA_AIMS[compiled] if llama else AIMS[fastest]).items():
        value = ratio(seconds, f"octavo {name}", base)
        ok = value <= aim and value < fastest_torchao
        missed |= not ok
        verdict = "ok" if ok else "MISSED"
        print(f"{verdict}: octavo {name} {value:.3f} of {base}, aim {aim}; fastest torchao {fastest_torchao:.3f}")
    return int(missed)
