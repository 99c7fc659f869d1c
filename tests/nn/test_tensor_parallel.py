"""Linear layers under torch's own parallelize_module compute what one rank computes, for every recipe."""

import pytest
import torch

from tests.support import fused_parallel as fused
from tests.support import parallel_tasks as tasks

EXACT = ("power of two", "rowwise", "gw_hp", "blockwise", "mx", "high_precision")  # where sums of few bits are exact


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("recipe", tasks.RECIPES)
def test_equal_to_one_rank(pool, recipe, before, bias, shape):
    """From the first step on; bit for bit where scales are powers of two, which all sums are exact with."""
    most = 1e-6 if recipe in ("dynamic", "delayed") else 0.0
    for steps, evaluated, same_state in pool.run(tasks.compare, shape, recipe, before, bias):
        assert max(max(found.values()) for found in steps) <= most and evaluated <= most and same_state


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.full)])
def test_compiled_equal_to_one_rank(pool, bias):
    """From the first step on, for which there is no delayed scale yet."""
    for steps, evaluated, same_state in pool.run(tasks.compare, (2,), "delayed", True, bias, True):
        assert max(max(found.values()) for found in steps) <= 1e-6 and evaluated <= 1e-6 and same_state


@pytest.mark.covering(1)
@pytest.mark.parametrize("layouts", tasks.LAYOUTS)
@pytest.mark.parametrize("recipe", ["power of two", "blockwise"])
def test_inputs_that_lie_otherwise(pool, recipe, layouts):
    """Sharded by tokens where all are wanted, replicated where features are, replicated weights."""
    for found in pool.run(tasks.lies_otherwise, (2,), recipe, layouts):
        assert max(found.values()) == 0.0


ONE_AFTER_THE_OTHER = {("high_precision", False), ("high_precision", True), ("gw_hp", True)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", fused.KINDS)
@pytest.mark.parametrize("recipe", tasks.RECIPES)
def test_fused_modules_stay_fused_and_equal_one_rank(pool, recipe, kind, sequence, shape):
    """Bit for bit where sums are exact, with the bytes of their parts."""
    for as_one, (first, second), (sent, of_parts), same_state in pool.run(fused.fused, shape, recipe, kind, sequence):
        assert as_one == ((recipe, sequence) not in ONE_AFTER_THE_OTHER)
        limit = 0.0 if kind.startswith("RMS") and recipe in EXACT else 2e-6
        assert max(*first.values(), *second.values()) <= limit
        assert sent == of_parts and same_state


@pytest.mark.parametrize("why", ["torch's styles", "another layout", "a hook"])
def test_what_wants_to_see_parts_run_one_after_the_other(pool, why):
    assert pool.run(fused.not_fused, (2,), why) == [False, False]


def test_made_on_the_meta_device(pool):
    assert pool.run(tasks.from_meta, (2,)) == [(True, True)] * 2


def test_refusals(pool):
    plain, mesh, strided = pool.run(tasks.refused, (2, 2))[0]
    assert "the input is a plain tensor: give it through ColwiseParallel" in plain
    assert "want one mesh of one dimension" in mesh
    assert "placement _S" in strided and "want Shard(0), Shard(1) or Replicate()" in strided


def test_a_bias_that_another_rank_adds_has_its_gradient():
    from octavo.nn.tensor_parallel import _Elsewhere

    bias = torch.ones(3, requires_grad=True)
    _Elsewhere.apply(bias).backward(torch.arange(3.0))
    assert torch.equal(bias.grad, torch.arange(3.0))
