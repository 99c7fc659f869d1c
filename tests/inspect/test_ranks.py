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


def test_a_full_disk_of_one_rank_holds_up_no_other(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(inspected.record_on_a_full_disk, (2,), str(tmp_path / "ranks"))
    assert len(first) == 1 and "No space left on device; the training goes on" in first[0] and second == []


@pytest.mark.parametrize(
    "recipe",
    [
        "power of two",
        "rowwise",
        pytest.param("mx", marks=pytest.mark.full),
    ],
)
def test_tensor_parallel_ranks_leave_the_record_of_one(recipe: str, pool: Any, tmp_path: Path) -> None:
    """Inputs that are gathered in FP8 are counted by each rank's own tokens; what each rank has whole, by each rank."""
    inspected.record_whole(recipe, str(tmp_path / "alone"))
    pool.run(inspected.record_tensor_parallel, (2,), recipe, str(tmp_path / "ranks"))
    alone, ranks = (octavo.inspect.load(tmp_path / name) for name in ("alone", "ranks"))
    assert ranks.rows == alone.rows
    same = [
        at for at, row in enumerate(alone.rows) if recipe == "power of two" or (row.layer, row.role) == ("up", "input")
    ]
    assert len(same) == (6 if recipe == "power of two" else 2)
    for name, values in alone.measures.items():
        np.testing.assert_allclose(ranks.measures[name][0, same], values[0, same], rtol=1e-9, err_msg=name)
    gathered = [at for at in same if (alone.rows[at].layer, alone.rows[at].role) == ("up", "input")]
    assert (ranks.exponents[0, gathered] == alone.exponents[0, gathered]).all()
    assert np.isfinite(ranks.measures["amax"]).all()


@pytest.mark.parametrize(
    ("recipe", "storage"),
    [
        ("dynamic", None),
        ("mx", None),
        pytest.param("delayed", None, marks=pytest.mark.full),
        pytest.param("dynamic", "fp8", marks=pytest.mark.full),
    ],
)
def test_experts_on_ranks_leave_the_record_of_one(recipe: str, storage: Any, pool: Any, tmp_path: Path) -> None:
    inspected.record_all_experts(recipe, str(tmp_path / "alone"), storage)
    faults = pool.run(inspected.record_experts, (2,), recipe, str(tmp_path / "ranks"), False, storage)
    alone, ranks = (octavo.inspect.load(tmp_path / name) for name in ("alone", "ranks"))
    assert ranks.rows == alone.rows
    for one, other in zip((alone, alone.of_worst), (ranks, ranks.of_worst), strict=True):
        for name, values in one.measures.items():
            np.testing.assert_allclose(other.measures[name], values, rtol=1e-9, err_msg=name)
        assert (other.exponents == one.exponents).all()
    assert (ranks.experts.worst == alone.experts.worst).all()
    for layer, tokens in alone.experts.tokens.items():
        assert (ranks.experts.tokens[layer] == tokens).all()
    assert faults == [("experts.gate_up", "input", True)] * 2


def test_experts_under_fsdp_have_their_weights_counted_once(pool: Any, tmp_path: Path) -> None:
    inspected.record_all_experts("rowwise", str(tmp_path / "alone"))
    faults = pool.run(inspected.record_experts, (2,), "rowwise", str(tmp_path / "ranks"), True)
    alone, ranks = (octavo.inspect.load(tmp_path / name) for name in ("alone", "ranks"))
    as_they_lie = [at for at, row in enumerate(alone.rows) if row.role == "weight" or row.products == ("output",)]
    assert len(as_they_lie) == 6
    for name, values in alone.of_worst.measures.items():
        found = ranks.of_worst.measures[name][0, as_they_lie]
        np.testing.assert_allclose(found, values[0, as_they_lie], rtol=1e-9, err_msg=name)
    assert (ranks.exponents[0, as_they_lie] == alone.exponents[0, as_they_lie]).all()
    for layer, tokens in alone.experts.tokens.items():
        assert (ranks.experts.tokens[layer] == tokens).all()
    assert faults == [("experts.gate_up", "input", True)] * 2


def test_a_fault_in_a_matrix_that_one_rank_has(pool: Any) -> None:
    assert pool.run(inspected.faulty_matrix, (2,)) == [("", "weight", 0)] * 2
