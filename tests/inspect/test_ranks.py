"""What ranks record together is what one records of all their work."""

from pathlib import Path
from typing import Any

import pytest

import octavo
from tests.support import inspected

np = pytest.importorskip("numpy")


@pytest.mark.parametrize("recipe", ["dynamic", pytest.param("blockwise", marks=pytest.mark.full)])
def test_a_sharded_training_leaves_the_record_of_one_rank(recipe: str, pool: Any, tmp_path: Path) -> None:
    inspected.record_alone(recipe, str(tmp_path / "alone"))
    pool.run(inspected.record_sharded, (2,), recipe, str(tmp_path / "ranks"))
    alone, ranks = (octavo.inspect.load(tmp_path / name) for name in ("alone", "ranks"))
    assert (ranks.steps, ranks.rows) == (alone.steps, alone.rows)
    first_input, weights = 0, [at for at, row in enumerate(alone.rows) if row.role == "weight"]
    for name, values in alone.measures.items():  # the scale of a rank's own rows is not that of all
        np.testing.assert_allclose(ranks.measures[name][0, weights], values[0, weights], rtol=1e-6, err_msg=name)
    assert ranks.measures["amax"][:, first_input].tolist() == alone.measures["amax"][:, first_input].tolist()
    assert (ranks.exponents[:, first_input] == alone.exponents[:, first_input]).all()
