"""Experts on the ranks of a mesh, beside the same on one rank with all ranks' tokens."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.distributed import expert_parallel
from tests.support.expert_models import Mixture, batch, built, whole

SIZES = [24, 0, 7, 13]  # tokens of each rank


@functools.cache
def alone() -> Any:
    """A mesh of this rank, made without the others: not all of the pool's may run the task."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return dist.DeviceMesh.from_group(group, "cpu")


def parts(mesh: Any) -> list[slice]:
    """Where each rank's tokens are among all."""
    ends = torch.tensor([0, *SIZES[: mesh.size()]]).cumsum(0).tolist()
    return [slice(*both) for both in itertools.pairwise(ends)]


def steps(net: Mixture, ranks: range, on: int = 1, how: str = "eager", count: int = 3) -> dict[str, Tensor]:
    """Results and gradients of steps with these ranks' tokens; gradients are averages over ``on`` ranks."""
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(net.experts.parameters(), lr=0.1 * on)
    for step in range(count):
        x = torch.cat([batch(step, rank, SIZES[rank]) for rank in ranks]).requires_grad_()
        if how == "eager":
            y = net(x)
        elif how == "compiled":
            y = torch.compile(net, backend="aot_eager")(x)
        else:
            y = checkpoint(net, x, use_reentrant=how == "reentrant")
        y.square().sum().backward()
        found |= {f"y {step}": y.detach(), f"x {step}": whole(x.grad)}
        found |= {f"{name} {step}": whole(p.grad) * on for name, p in net.experts.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        net.router.weight.grad = None
    found |= {name: whole(p) for name, p in net.experts.named_parameters()}
    return found | octavo.nn.delayed_state_dict(net)


def compare(
    mesh: Any,
    kind: str,
    recipe: str,
    how: str = "eager",
    chosen: int | None = None,
    exact: bool = False,
    average: bool = True,
) -> tuple[dict[str, float], ...]:
    """What differs from one rank without expert parallelism; and from one rank that exchanges with itself."""
    size, rank = mesh.size(), mesh.get_rank()
    net, lone, plain = (built(kind, recipe, 8, chosen=chosen) for _ in range(3))
    expert_parallel(net, mesh, exact, average)
    expert_parallel(lone, alone(), exact)
    found, own = steps(net, range(rank, rank + 1), size if average else 1, how), parts(mesh)[rank]
    differences = []
    for other in (plain, lone):
        expected = steps(other, range(size))
        of_rank = {name: value[own] if name[:2] in ("x ", "y ") else value for name, value in expected.items()}
        differences.append(off(found, of_rank))
    return tuple(differences)


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The tensors that differ, each with the norm of the difference by the norm of the value."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {
        name: float((found[name] - value).norm() / value.norm().clamp(min=1e-30))
        for name, value in expected.items()
        if not torch.equal(found[name], value)
    }
