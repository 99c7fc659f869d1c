"""Rows of a weight that lives in FP8, on the ranks that have them: what it was cast from goes with them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.optim import AdamW


def rest_of(mesh: Any, before: bool) -> Tensor:
    """The remainder that a master begins with; stored ``before`` it is sharded, or by a phase of a schedule later."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 37, bias=False, dtype=torch.bfloat16)
    recipe, options = octavo.recipes.dynamic(), {"select": lambda module, name: True}
    octavo.convert(layer, recipe, weight_storage="fp8" if before else None, **options)
    if mesh is not None:
        fully_shard(layer, mesh=mesh)
    optimizer = AdamW(layer.parameters(), lr=0.0, weight_decay=0.0, master="split16")
    if not before:
        octavo.schedule.PrecisionSchedule(
            layer, optimizer, [octavo.schedule.Phase(recipe, weight_storage="fp8", master="split16")]
        )
    layer(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    rest: Any = optimizer.state[layer.weight]["master_rest"]
    return rest if mesh is None else rest.full_tensor()


@pytest.mark.parametrize("before", [True, False])
def test_masters_of_parts_begin_as_that_of_the_whole(pool: Any, before: bool) -> None:
    whole = rest_of(None, before)
    assert (whole != 0).float().mean() > 0.5  # torch 2.11 draws bf16 weights of fewer bits
    # random bits, which depend on the element's place alone, round the same remainders
    assert all(torch.equal(found, whole) for found in pool.run(rest_of, (2,), before))
