"""The weights that forwards multiply, as the products see them; and a sharded model whose tensors are iterated."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo import recipes
from octavo.export.layouts import LAYOUTS
from tests.support.helpers import to_fp8
from tests.support.memory import peak_bytes

LAYOUT_OF = {
    "blockwise": "fine-grained",
    "dynamic": "compressed-tensors",
    "rowwise": "compressed-tensors",
    "delayed": "per-tensor",
}


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.octavo.matmul.default, torch.ops.octavo.grouped_matmul.default):
            self.operands.append((args[3].clone(), args[4].clone()))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def seen_operands() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The second operands of all FP8 products within: of forwards, the weights in order."""
    with _Seen() as seen:
        yield seen.operands


def same_codes(pairs: list[tuple[str, Tensor, Tensor]], operands: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether named pairs of a model, in the order of its forward, are what its products multiplied, bit for bit."""
    return len(pairs) == len(operands) and all(
        torch.equal(codes.view(torch.uint8), q.view(torch.uint8)) and torch.equal(scale_inv.reshape(s.shape), s)
        for (_, codes, scale_inv), (q, s) in zip(pairs, operands, strict=True)
    )


def fp8(model: nn.Module, layout: str) -> list[tuple[str, Tensor, Any]]:
    """Copies of a model's named pairs."""
    found = octavo.export.iterate_fp8(model, layout, fp8_only=True)  # type: ignore[arg-type]
    return [(name, codes.clone(), scale_inv.clone()) for name, codes, scale_inv in found]  # type: ignore[union-attr]


def layers(recipe: str, stored: bool = False, sizes: tuple[int, ...] = (256, 512, 256, 512)) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(k, n) for k, n in itertools.pairwise(sizes)]
    net = nn.Sequential(*linears, nn.LayerNorm(sizes[-1]))
    if stored:
        return octavo.convert(net, getattr(recipes, recipe)(), lambda module, name: True, "fp8")  # type: ignore[return-value]
    return to_fp8(net, getattr(recipes, recipe)())  # type: ignore[return-value]


def step(net: Any, optimizer: Any) -> None:
    net(torch.randn(32, net[0].in_features)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def compare_sharded(mesh: Any, recipe: str, stored: bool, mixed: bool, training: bool) -> list[str]:
    """What is wrong with what this rank iterates of a model under FSDP2, after two steps."""
    net, wrong = layers(recipe, stored), []
    options: Any = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
    for layer in net[:-1]:  # the last group also holds the norm
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    optimizer = octavo.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(2):
        step(net, optimizer)
    net.train(training)
    pairs = fp8(net, LAYOUT_OF[recipe])
    with seen_operands() as operands:
        net(torch.randn(32, 256))
    if not same_codes(pairs, operands):
        wrong.append("codes")
    everything = {name: (tensor, scale) for name, tensor, scale in octavo.export.iterate_fp8(net, LAYOUT_OF[recipe])}
    if set(everything) != set(net.state_dict()) - {f"{i}.weight_scale_inv" for i in range(3)}:
        wrong.append("names")
    for name, parameter in net.named_parameters():
        if everything[name][1] is None and not torch.equal(everything[name][0], parameter.full_tensor()):
            wrong.append(name)
    step(net.train(), optimizer)  # training goes on
    return wrong


def sharded_peak(mesh: Any) -> tuple[int, int]:
    """(what iterating a sharded model holds at most, its codes' bytes)."""
    net = layers("blockwise", True, (1024,) * 9)
    for layer in net[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def iterate() -> None:
        for _ in octavo.export.iterate_fp8(net):
            pass

    iterate()
    return peak_bytes(iterate), 8 * 1024 * 1024


assert set(LAYOUT_OF.values()) == set(LAYOUTS)
