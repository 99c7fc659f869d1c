"""Host time of one eager Linear: 16 x 16 bf16 on one CPU thread, where arithmetic costs next to nothing.

"kept" has its weight cast by KeptWeights, outside of what is timed. "cloned scale_inv" is what a library must do whose
scale_inv lives in its recipe: copy the input's and the weight's in each forward, lest the recipe move on before
backward; the difference is what the pair saves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks.common.measure import interleaved, ratio, table, write_results
from benchmarks.common.models import OCTAVO, TORCHAO, with_torchao
from octavo import recipes
from octavo.tensor.pair import Operands

TAKES = "1 minute"
MEASURES = ("octavo/kernels/reference", "octavo/autograd", "octavo/nn/recipe_module.py")

SIZE = 16
TARGET = 0.45  # of torchao's tensorwise, forward and forward + backward


class ClonedScaleInv(octavo.nn.Linear):
    """Copies both scale_inv in each forward."""

    def _weight_operands(self, *arguments: Any) -> Operands:
        operands = super()._weight_operands(*arguments)
        assert operands.as_is is not None
        q, scale_inv = operands.as_is
        scale_inv.clone()  # stands for the input's
        return operands._replace(as_is=(q, scale_inv.clone()))


def layers() -> dict[str, nn.Module]:
    """Each variant's layer."""
    found: dict[str, nn.Module] = {"nn.Linear": nn.Linear(SIZE, SIZE, dtype=torch.bfloat16)}
    for name in OCTAVO:
        found[f"octavo {name}"] = octavo.nn.Linear(SIZE, SIZE, recipe=getattr(recipes, name)(), dtype=torch.bfloat16)
    for name in ("dynamic", "delayed"):
        recipe = getattr(recipes, name)()
        found[f"octavo {name}, kept"] = octavo.nn.Linear(SIZE, SIZE, recipe=recipe, dtype=torch.bfloat16)
        octavo.nn.KeptWeights(found[f"octavo {name}, kept"]).cast()
        found[f"octavo {name}, cloned scale_inv"] = ClonedScaleInv(SIZE, SIZE, recipe=recipe, dtype=torch.bfloat16)
    for name in TORCHAO:
        found[f"torchao {name}"] = with_torchao(nn.Linear(SIZE, SIZE, dtype=torch.bfloat16), name)
    return found


def steps(layer: nn.Module) -> tuple[Callable[[], object], Callable[[], object]]:
    """(forward, forward + backward) of a layer whose gradients accumulate."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    layer(x).backward(grad)

    return lambda: layer(x), lambda: layer(x).backward(grad)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks host_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)

    pairs = {name: steps(layer) for name, layer in layers().items()}
    forward = interleaved({name: f for name, (f, _) in pairs.items()}, options.rounds, options.calls)
    both = interleaved({name: b for name, (_, b) in pairs.items()}, options.rounds, options.calls)
    rows = [
        {
            "layer": name,
            "forward_us": f"{statistics.median(forward[name]) * 1e6:.1f}",
            "forward_backward_us": f"{statistics.median(both[name]) * 1e6:.1f}",
            "forward_by_torchao_tensorwise": f"{ratio(forward, name, 'torchao tensorwise'):.3f}",
            "forward_backward_by_torchao_tensorwise": f"{ratio(both, name, 'torchao tensorwise'):.3f}",
        }
        for name in pairs
    ]
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('host_overhead', rows)}")
    missed = False
    for name in ("octavo dynamic", "octavo delayed"):
        for what, seconds in (("forward", forward), ("forward + backward", both)):
            value = ratio(seconds, name, "torchao tensorwise")
            missed |= value > TARGET
            print(f"{'ok' if value <= TARGET else 'MISSED'}: {name} {what} {value:.3f} of torchao, aim {TARGET}")
    return int(missed)
