"""Rows of a weight that lives in FP8, on the ranks that have them: what it was cast from goes with them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import octavo
from octavo import PerBlock, PerTensor
from octavo.errors import UnsupportedOpError
from octavo.optim import AdamW
from octavo.tensor.stored_weight import FlatWeights, StoredWeight


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


def parameters():
    values = [torch.randn(shape) for shape in ((130, 40), (7,), (3, 20, 16), (256, 256))]
    granularities = [PerTensor(), None, PerTensor(), PerBlock(128, 128)]
    return [
        nn.Parameter(one if how is None else StoredWeight.cast(one, how, keep_rest=True))
        for one, how in zip(values, granularities, strict=True)
    ]


def equal(weights, others):
    pairs = zip(weights, others, strict=True)
    return all(a.equals(b) if isinstance(a, StoredWeight) else torch.equal(a, b) for a, b in pairs)


def test_what_is_written_to_a_flat_view_reaches_the_weight():
    weight, values = parameters()[0], torch.randn(130 * 40)
    with torch.no_grad():
        for flat in (weight.view(-1), weight.flatten(), weight.data.reshape(130 * 40)):
            flat.copy_(values)
            assert weight.equals(StoredWeight.cast(values.view(130, 40), keep_rest=True))
            flat.zero_()
            assert not weight.dequantize().any()
    flat = weight.view(-1)
    assert flat.requires_grad and flat.shape == (5200,) and flat.view(130, 40).shape == (130, 40)
    with pytest.raises(UnsupportedOpError, match=r"aten.sin.default of a vector of parameters.*\.dequantize\(\)"):
        flat.sin()


def test_parameters_go_to_a_vector_and_back():
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    vector = parameters_to_vector(weights)
    values = [weight.dequantize() if isinstance(weight, StoredWeight) else weight for weight in weights]
    assert isinstance(vector, FlatWeights) and torch.equal(vector.dequantize(), parameters_to_vector(values))
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
        start = 0
        for weight in weights:
            weight.copy_(vector[start : start + weight.numel()].view_as(weight))
            start += weight.numel()
    assert equal(weights, before)
    with pytest.raises(UnsupportedOpError, match="of a vector of parameters"):
        vector[5:]
    with pytest.raises(UnsupportedOpError, match=r"weight.data = \.\.\."):
        vector_to_parameters(torch.zeros(vector.shape), weights)
