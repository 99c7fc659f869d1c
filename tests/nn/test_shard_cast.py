"""What ranks cast of their rows and send is together what the whole weight is cast into, bit for bit."""

import dataclasses

import pytest
import torch

import octavo
from octavo import E4M3, Cast, PerBlock, PerRow, recipes
from octavo.autograd.casts import WEIGHT, cast_role
from octavo.nn.gather import ShardCast
from octavo.tensor.fsdp2 import rows_on_each_rank

WIDE = Cast(E4M3, PerBlock(1, 128))  # of a weight's columns: 128 rows of one column
RECIPES = {
    "rowwise": recipes.rowwise(),
    "rowwise, powers of two": recipes.rowwise(power_of_two=True),
    "one scale transposed": dataclasses.replace(recipes.rowwise_with_gw_hp(), name=""),
    "blockwise": recipes.blockwise(),
    "mx": recipes.mx(),
    "rows, and blocks of columns": octavo.Recipe(
        (Cast(E4M3, PerRow()),) * 2, (Cast(E4M3, PerRow()), WIDE), name="rows, and blocks of columns"
    ),
}


SENT = ("rowwise", "blockwise", "mx")


def gathered(whole, recipe, ranks):
    """(What products read, bytes sent an element) where so many ranks have the rows of a weight."""
    part, casts = rows_on_each_rank(len(whole), ranks), recipe.weight_casts
    shards = [whole[rank * part : (rank + 1) * part].clone() for rank in range(ranks)]
    made = [ShardCast(casts, whole.shape, ranks, rank) for rank in range(ranks)]
    amax = torch.stack([one.amax(shard) for one, shard in zip(made, shards, strict=True)]).amax(0)
    sent, known = zip(*[one.cast(shard, amax) for one, shard in zip(made, shards, strict=True)], strict=True)
    assert len({tuple(tensor.shape for tensor in own) for own in sent}) == 1  # FSDP2 gathers equally many rows
    received = [torch.cat(parts) for parts in zip(*sent, strict=True)]
    found = [one.read(received, own, recipe.pads) for one, own in zip(made, known, strict=True)]
    for other in found[1:]:
        for pair, expected in zip(other[:2], found[0][:2], strict=True):
            assert all(map(same, pair, expected))
    return found[0], (sum(tensor.numel() for tensor in received) + 4 * len(amax)) / (ranks * part * whole.shape[1])


def same(found, expected):
    if found.itemsize == 1:
        found, expected = found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    return torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
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
    found, _ = gathered(whole, RECIPES[recipe], ranks)
    expected = cast_role(whole, RECIPES[recipe], WEIGHT, True, True, None)
    for pair, other in zip(found[:2], expected[:2], strict=True):
        assert all(map(same, pair, other))
        assert [tensor.stride() for tensor in pair] == [tensor.stride() for tensor in other] or 1 in pair[1].shape


def test_bytes():
    """Two pairs are bf16's bytes, and their scales; one is half of that, in blocks that reach over ranks too."""
    whole = torch.randn(1024, 256)
    share = {(name, ranks): gathered(whole, RECIPES[name], ranks)[1] / 2 for name in SENT for ranks in (8, 16)}
    assert all(share["rowwise", ranks] <= 1.01 and share["mx", ranks] == 1.03125 for ranks in (8, 16))
    assert all(share["blockwise", ranks] <= 0.5003 for ranks in (8, 16))  # 16 have half a block each
