"""The first minute on a GPU: every case of ``kernels`` once against its reference, then a training step of each recipe.

Codes, scales, sums and products must be what octavo/kernels/triton/agreement.py permits; of a step the loss, the
gradients and the update must be finite and near those in bf16.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import octavo
from benchmarks.common.models import OCTAVO, with_octavo
from benchmarks.common.rehearsal import rehearsed
from octavo.kernels.triton import cases
from octavo.kernels.triton.agreement import sqnr
from octavo.tune.timing import DEVICE, ON_GPU, describe, precompile

TAKES = "a GPU; 1 minute"
MEASURES = ("octavo/kernels/triton",)
SHAPE = (512, 768)
PRODUCT = (256, 384, 512)
LEAST_SQNR = 15.0  # dB of a layer's gradients beside bf16's: E5M2 alone is at about 25


def check(name: str) -> str:
    """Return the fault of a case, a product or a recipe's step; "" for none."""
    try:
        if name in OCTAVO:
            return step(name)
        if name in cases.PRODUCTS:
            return cases.ALL_CASES[name].wrong(PRODUCT if ON_GPU else (32, 48, 64))
        return cases.ALL_CASES[name].wrong(SHAPE if ON_GPU else (32, 48))
    except Exception as error:
        return describe(error)


def step(recipe: str) -> str:
    """Take a step of two layers in FP8 and an update with FP8 moments, and compare with the same layers in bf16."""
    torch.manual_seed(0)
    size = 512 if ON_GPU else 32
    model = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)).to(DEVICE, torch.bfloat16)
    x = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    gradients = []
    for convert in (False, True):
        if convert:
            with_octavo(model, recipe)
        for _ in range(2):  # the second by delayed scales that are there
            model.zero_grad()
            model(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for index, (true, gradient) in enumerate(zip(*gradients, strict=True)):
        if not (quality := sqnr(gradient.float(), true.float())) > LEAST_SQNR:
            return f"gradient {index} is {quality:.1f} dB beside bf16's"
    before = [p.detach().clone() for p in model.parameters()]
    octavo.optim.AdamW(model.parameters(), lr=1e-2, moments="fp8", master="split16").step()
    changed = (bool(p.isfinite().all()) and not p.equal(old) for p, old in zip(model.parameters(), before, strict=True))
    return "" if all(changed) else "an update is not finite, or changes nothing"


@rehearsed()
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks smoke", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.7, help="for compiling ahead, in a process a core")
    options = parser.parse_args(arguments)
    names = [*OCTAVO, *cases.PRODUCTS, *cases.CASES]
    start = time.perf_counter()
    if ON_GPU:
        failures = precompile(check, [(name,) for name in names], options.minutes)
        print(f"compiled in {time.perf_counter() - start:.0f} s; {len(failures)} failed", flush=True)
    wrong = {name: problem for name in names if (problem := check(name))}
    for name, problem in wrong.items():
        print(f"FAILED: {name}: {problem}")
    print(f"{len(names) - len(wrong)} of {len(names)} right, {time.perf_counter() - start:.0f} s")
    return int(bool(wrong))
