import dataclasses

import pytest
import torch

import octavo
from octavo import E4M3, Cast, PerBlock, PerRow, PerTensor, recipes
from octavo.autograd.casts import CastRequest, cast_role
from octavo.scaling.recipe import WEIGHT
from octavo.weights.fsdp2 import rows_on_each_rank
from octavo.weights.shard_cast import ShardCast, is_cast_in_one_launch
from tests.support.definitions import same_bits


@pytest.mark.parametrize(
    ("granularity", "shape", "in_one_launch"),
    [
        (PerTensor(), (3, 96), True),
        (PerBlock(128, 128), (512, 96), True),
        (PerBlock(128, 128), (500, 96), False),  # a block would lie on two ranks
        (PerBlock(1, 128), (512, 96), False),  # it serves both layouts, but a launch with others has square blocks
        (PerRow(), (512, 96), False),
        (PerBlock(32, 32), (8, 48, 96), True),
        (PerBlock(32, 32), (6, 64, 96), False),  # experts, of which ranks have different numbers
    ],
)
def test_which_shards_are_cast_with_other_weights(granularity, shape, in_one_launch):
    transposed = granularity if granularity == PerRow() else granularity.transposed()
    recipe = octavo.Recipe(*[(Cast(E4M3, PerRow()), Cast(E4M3, of_weight)) for of_weight in (granularity, transposed)])
    assert is_cast_in_one_launch(recipe.weight_casts.shared_tile, torch.Size(shape), 4) is in_one_launch


# --- what ranks cast of their rows and send is together what the whole weight is cast into, bit for bit

WIDE = Cast(E4M3, PerBlock(1, 128))  # of a weight's columns: 128 rows of one column
SENT_BY = {
    "rowwise": recipes.rowwise(),
    "rowwise, powers of two": recipes.rowwise(power_of_two=True),
    "one scale transposed": dataclasses.replace(recipes.rowwise_with_gw_hp(), name=""),
    "blockwise": recipes.blockwise(),
    "mx": recipes.mx(),
    "rows, and blocks of columns": octavo.Recipe(
        (Cast(E4M3, PerRow()),) * 2, (Cast(E4M3, PerRow()), WIDE), name="rows, and blocks of columns"
    ),
}


def gathered_from(whole, recipe, ranks):
    """Return (the pairs that products read, bytes sent an element) where so many ranks have a weight's rows."""
    part, casts = rows_on_each_rank(len(whole), ranks), recipe.weight_casts
    shards = [whole[rank * part : (rank + 1) * part].clone() for rank in range(ranks)]
    shard_casts = [ShardCast(casts, whole.shape, ranks, rank) for rank in range(ranks)]
    amax = torch.stack([one.amax(shard) for one, shard in zip(shard_casts, shards, strict=True)]).amax(0)
    codes = [one.cast(shard, amax) for one, shard in zip(shard_casts, shards, strict=True)]
    sent = [one.sent for one in codes]
    assert len({tuple(tensor.shape for tensor in scales) for scales in sent}) == 1  # FSDP2 gathers equally many rows
    received = [torch.cat(parts) for parts in zip(*sent, strict=True)]
    read = [one.read(received, own_codes, recipe.may_pad) for one, own_codes in zip(shard_casts, codes, strict=True)]
    for other in read[1:]:
        for pair, expected in zip(other[:2], read[0][:2], strict=True):
            assert all(map(same_bits, pair, expected))
    return read[0], (sum(tensor.numel() for tensor in received) + 4 * len(amax)) / (ranks * part * whole.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", SENT_BY)
@pytest.mark.parametrize(
    ("rows", "columns", "ranks"),
    [(512, 256, 4), (512, 64, 16), (500, 96, 4), (130, 33, 2), (97, 49, 8), (3, 40, 4), (1, 1, 2), (260, 130, 3)],
)
def test_equal_to_the_whole_weight(rows, columns, ranks, recipe, dtype):
    whole = torch.randn(rows, columns, dtype=dtype) * torch.exp2(4 * torch.randn(rows, columns, dtype=dtype))
    whole[: rows // 3, : columns // 2] = 0  # blocks of zeros, and ranks that know nothing of their columns
    whole[rows // 2, columns // 2] = float("nan")
    if rows > 100:
        whole[5, 3], whole[rows - 1, 0] = float("inf"), -float("inf")
    operands, _ = gathered_from(whole, SENT_BY[recipe], ranks)
    expected = cast_role(whole, CastRequest(SENT_BY[recipe], WEIGHT, True, True), None)
    for pair, other in zip(operands[:2], expected[:2], strict=True):
        assert all(map(same_bits, pair, other))
        assert [tensor.stride() for tensor in pair] == [tensor.stride() for tensor in other] or 1 in pair[1].shape
