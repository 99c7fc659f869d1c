import pytest

from tests.optim import sharded_tasks as tasks


@pytest.mark.parametrize("master", ["split16", "split24", "fp16_scaled", "fp32", None])
@pytest.mark.parametrize("recipe", tasks.RECIPES)
def test_sharded_steps_equal_whole_ones(pool, recipe, master):
    assert pool.run(tasks.beside_whole, (2,), recipe, "fp8", master) == [[]] * 2
