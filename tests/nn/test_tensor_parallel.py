"""Linear layers under torch's own parallelize_module compute what one rank computes, for every recipe."""

import pytest
import torch

from tests.support import parallel_tasks as tasks


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("recipe", tasks.RECIPES)
def test_equal_to_one_rank(pool, recipe, before, bias, shape):
    """Bit for bit, as all sums are exact; a first delayed step, without history, takes each part's own amax."""
    for steps, evaluated, same_state in pool.run(tasks.compare, shape, recipe, before, bias):
        first, *others = [max(found.values()) for found in steps]
        assert others == [0.0, 0.0] and evaluated == 0.0 and same_state
        assert first < 0.1 if recipe == "delayed" else first == 0.0


@pytest.mark.covering(1)
@pytest.mark.parametrize("layouts", tasks.LAYOUTS)
@pytest.mark.parametrize("recipe", ["power of two", "blockwise"])
def test_inputs_that_lie_otherwise(pool, recipe, layouts):
    """Sharded by tokens where all are wanted, replicated where features are, replicated weights."""
    for found in pool.run(tasks.lies_otherwise, (2,), recipe, layouts):
        assert max(found.values()) == 0.0


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
