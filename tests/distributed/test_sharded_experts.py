"""Experts under FSDP2: their 3-D weights are gathered as linear layers' are, and training equals that of one copy."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import octavo
from octavo.errors import UnsupportedOpError
from tests.support.combinations import in_full
from tests.support.expert_models import batch, built, off_by_maximum, train
from tests.support.sharded_weights import average

PER_TENSOR = ("short history", "dynamic")
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in ("mx", "gw_hp", "high_precision")]


def loss(net, step):
    return net(batch(step, dist.get_rank())).square().mean()


def sharded(net, mesh, dim=0, **options):
    fully_shard(net.experts, mesh=mesh, shard_placement_fn=(lambda p: Shard(dim)) if dim else None, **options)
    return fully_shard(net, mesh=mesh, **options)


def compare(mesh, kind, recipe, experts, dim=0, storage=None):
    """Return what differs from the model replicated, its gradients averaged; and how weights were gathered."""
    net, replicated = (built(kind, recipe, experts, storage=storage) for _ in range(2))
    adamw = {"adamw": torch.optim.AdamW if storage is None else octavo.optim.AdamW}
    sharded(net, mesh, dim)
    actual = train(net, loss, **adamw)
    ways = {row.gathered for row in octavo.summary(net).converted}
    return off_by_maximum(actual, train(replicated, loss, lambda: average(replicated, mesh), **adamw)), ways


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["octavo", "octavo bias", "stored", "stored transposed"])
@pytest.mark.parametrize("recipe", [*PER_TENSOR, "blockwise", "rowwise", *OTHERS])
@pytest.mark.parametrize("experts", [4, 3])
def test_equal_to_the_replicated_model(pool, kind, recipe, experts):
    for differences, ways in pool.run(compare, (2,), kind, recipe, experts):
        assert not differences
        in_fp8 = recipe in PER_TENSOR or (recipe == "blockwise" and experts == 4)
        way = "as it is" if recipe == "high_precision" else "in FP8" if in_fp8 else "cast after"
        assert {way_of_weight.partition(" (")[0] for way_of_weight in ways} == {way}, ways


@pytest.mark.parametrize("kind", ["octavo", pytest.param("stored transposed", marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", ["short history", pytest.param("rowwise", marks=pytest.mark.full)])
def test_sharded_by_another_dimension_they_are_cast_after(pool, kind, recipe):
    """Experts sharded by another dimension, as where there are more ranks than experts, are cast after their gather."""
    for differences, ways in pool.run(compare, (2,), kind, recipe, 3, 1):
        assert not differences
        assert all(way.startswith("cast after") for way in ways)


def made_on_meta(mesh):
    """Return what differs from the sharded model that was made on the device."""
    net = sharded(built("stored", "short history"), mesh)
    with torch.device("meta"):
        from_meta = built("stored", "short history")
    sharded(from_meta, mesh).to_empty(device="cpu")
    with torch.no_grad():  # a load would move the delayed state by itself
        for parameter, value in zip(from_meta.parameters(), net.parameters(), strict=True):
            parameter.copy_(value)
    return off_by_maximum(train(from_meta, loss), train(net, loss))


def test_made_on_meta_they_train_as_those_made_on_the_device(pool):
    assert pool.run(made_on_meta, (2,)) == [{}] * 2


STORED = [("stored transposed", "blockwise"), *in_full(("octavo", "dynamic"), ("stored", "short history"))]


@pytest.mark.parametrize(("kind", "recipe"), STORED)
def test_weights_that_live_in_fp8(pool, kind, recipe):
    """Weights that live in FP8, with masters and moments in few bytes, are equal where random bits are."""
    for differences, ways in pool.run(compare, (2,), kind, recipe, 4, 0, "fp8"):
        assert not differences and ways == {"as stored"}


def refused(mesh, experts, dim):
    with pytest.raises(UnsupportedOpError, match=f"{experts} experts .* ranks that have as many each"):
        sharded(built("octavo", "dynamic", experts, storage="fp8"), mesh, dim)
    return True


@pytest.mark.parametrize(("experts", "dim"), [(3, 0), (1, 0), (4, 1)])
def test_uneven_shards_of_weights_that_live_in_fp8_are_refused(pool, experts, dim):
    assert pool.run(refused, (2,), experts, dim) == [True] * 2


def restarted(mesh, recipe):
    """Whether sharded codes go to a whole model and back, by state dicts."""
    net, other = (sharded(built("stored", recipe, storage="fp8"), mesh) for _ in range(2))
    whole = built("stored", recipe, storage="fp8")
    train(net, loss, adamw=octavo.optim.AdamW)
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    whole.load_state_dict(dict(full))
    set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
    same = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    values = octavo.restore(copy.deepcopy(whole)).state_dict()
    other.load_state_dict({name: like_sharded_as(p, values[name]) for name, p in other.named_parameters()})
    whole.load_state_dict(get_model_state_dict(other, options=StateDictOptions(full_state_dict=True)))
    # values: the optimizer's scale may be half of what values alone give
    pairs = (full, same), (values, octavo.restore(whole).state_dict())
    return [all(torch.equal(wanted[name], read[name]) for name in wanted) for wanted, read in pairs]


def like_sharded_as(param, value):
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


@pytest.mark.parametrize("recipe", ["dynamic", pytest.param("blockwise", marks=pytest.mark.full)])
def test_state_dicts_of_codes_move(pool, recipe):
    assert pool.run(restarted, (2,), recipe) == [[True, True]] * 2
