"""Sequence parallelism with inputs gathered in FP8: what one rank computes, in half of the bytes."""

import pytest
import torch

from tests.support import parallel_tasks as tasks

BF16 = 2 * 512 * 256  # of what the three layers read
EXACT = ("power of two", "rowwise", "blockwise", "mx", "gw_hp", "high_precision")
IN_BF16 = ("gw_hp", "high_precision")


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("recipe", tasks.RECIPES)
def test_equal_to_one_rank(pool, recipe, shared, shape):
    """Bit for bit where sums are exact, which scales that are powers of two make them."""
    for (first, second), *_ in pool.run(tasks.sequence_parallel, shape, recipe, shared, torch.float32):
        assert max(second.values()) <= (0.0 if recipe in EXACT else 1e-3)  # a code more or less of what o reads
        assert max(first.values()) <= (0.1 if recipe == "delayed" else 1e-3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", tasks.RECIPES)
@pytest.mark.parametrize("shared", [True, False])
def test_bytes(pool, recipe, shared):
    """Forward's gathers, and backward's beside that of o's gradient, which is in bf16."""
    found = pool.run(tasks.sequence_parallel, (2,), recipe, shared, torch.bfloat16)[0]
    (_, forward), (_, backward) = found[1:]
    times = 1 if shared else 3
    if recipe in IN_BF16:
        assert (forward, backward) == (times * BF16, BF16)
        return
    assert 0.5 * BF16 <= forward / times <= 0.52 * BF16
    later = (backward - BF16) / times
    assert later == 0 if recipe in ("dynamic", "power of two", "delayed") else 0.5 * BF16 <= later <= 0.52 * BF16


def test_bytes_of_torchs_own_styles(pool):
    """What the test above is held against."""
    (_, forward), (_, backward) = pool.run(tasks.sequence_parallel, (2,), "dynamic", True, torch.bfloat16, 2, True)[0][
        1:
    ]
    assert (forward, backward) == (BF16, BF16)


@pytest.mark.parametrize(
    ("recipe", "sequence"),
    [
        pytest.param(recipe, sequence, marks=() if (recipe, sequence) == ("delayed", False) else pytest.mark.full)
        for recipe in tasks.RECIPES
        for sequence in (False, True)
    ],
)
def test_compiled(pool, recipe, sequence):
    """One graph under torch's styles; it ends where an input is gathered in FP8."""
    for difference, breaks in pool.run(tasks.compiled, (2,), recipe, sequence):
        assert difference == 0.0
        assert all("_gathered" in reason for reason in breaks)
        assert sequence or not breaks


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", ["power of two", "rowwise", "blockwise", "mx"])
def test_features_that_do_not_divide(pool, recipe, shape):
    for found in pool.run(tasks.uneven, shape, recipe):
        assert max(found.values()) == 0.0


@pytest.mark.parametrize("recipe", ["power of two", "high_precision"])
def test_tied_embeddings_and_a_loss_over_parts_of_the_vocabulary(pool, recipe):
    """51 bytes on 2 ranks."""
    for same, difference, said in pool.run(tasks.tied, (2,), recipe):
        assert same and difference < 1e-5
        assert "tied to another module's, which is sharded S(0)" in said or "sharded Shard(dim=0)" in said


@pytest.mark.parametrize(("before", "message"), [(True, "sharded by fully_shard"), (False, "leave it out by select=")])
def test_weights_that_live_in_fp8_are_refused(pool, before, message):
    assert message in pool.run(tasks.stored, (2,), before)[0]


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["dynamic", "rowwise"])
def test_llama_of_transformers(pool, recipe):
    """Within float32's addition, and the code that it changes here and there."""
    assert max(pool.run(tasks.llama, (2,), recipe)) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("recipe", tasks.RECIPES)
def test_with_fsdp2_in_the_other_dimension(pool, recipe):
    """Halves of a batch have exact sums, and where scales are powers of two those of all of it; else their own."""
    limits = {"dynamic": 0.1, "delayed": 0.1}
    assert max(pool.run(tasks.two_dimensions, (2, 2), recipe)) <= limits.get(recipe, 0.0)
