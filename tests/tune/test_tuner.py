"""The tuner finds a table's rows, tells cases that don't read them, and lets no wrong configuration in."""

import importlib
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def test_every_row_of_the_table_is_read_by_the_cases_that_tune_it(tuner: ModuleType) -> None:
    kinds = tuner.KINDS
    assert tuner.launch.TABLE.keys() == kinds.keys()
    unread = {kind: tuner.unaffected(kind, tuner.buckets_of(kind, True)[64][0]) for kind in kinds}
    assert unread == dict.fromkeys(kinds, "")


def test_grids(tuner: ModuleType) -> None:
    for kind, (cases, configs, buckets) in tuner.KINDS.items():
        assert len(set(configs)) == len(configs) >= 7 and cases and max(buckets) == 64, kind
        assert {config.num_warps for config in configs} <= {2, 4, 8, 16}
        assert all((c.block_r * c.block_c).bit_count() == 1 for c in configs), kind


pytestmark = pytest.mark.gpu


def test_a_case_that_reads_no_row_of_its_kind_is_named(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tuner.KINDS, "amax", tuner.KINDS["amax"]._replace(cases=("amax", "cast delayed")))
    with pytest.raises(ValueError, match="cast delayed is not of this kind"):
        tuner.tune("amax", True, [], {})


def test_rows_and_their_gain(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By times that are made up: of 64 x 64 the grid's is the best, of 32 x 64 octavo's own."""
    large, small = (config for _, config in reversed(tuner.shipped("cast")))
    (first,) = set(tuner.grid_of("cast", True)) - {large, small}
    times = {(64, 64): {first: 1.0, large: 2.0, small: 3.0}, (32, 64): {first: 3.0, large: 2.0, small: 1.0}}

    def timed(kind: str, configs: Any, name: str, shape: tuple[int, int], rounds: int) -> Any:
        return tuner.Timings({str(tuple(config)): [times[shape][config]] for config in configs}, {})

    monkeypatch.setattr(tuner, "_time", timed)
    before, log = dict(tuner.launch.TABLE), list[dict[str, Any]]()
    found = tuner.tune("cast", True, log, {"amax": []})
    assert found.rows == [[20, *small], [64, *first]] and found.gain == pytest.approx(2**0.5)
    assert {row["by_fastest"] for row in log} == {"1.000", "2.000", "3.000"}
    assert tuner.launch.TABLE == before
    times[32, 64][first] = 1.01
    assert tuner.tune("cast", True, log, {}).rows == [[64, *first]]  # shared where that costs less than 2 %
    monkeypatch.setattr(tuner.cases, "wrong", lambda *case: "" if tuner.launch.config("cast", 64) != first else "wrong")
    assert tuner.tune("cast", True, log, {}).rows == [[20, *small], [64, *large]]


def test_products_that_are_torchs(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "timings", lambda variants, rounds: tuner.Timings({"torch": [1.0], "Triton": [2.0]}, {}))
    if not tuner.products.TORCH:
        pytest.skip("torch 2.11 has no FP8 product on a CPU")
    monkeypatch.setattr(tuner.products, "wrong", lambda name, shape, fast: "rows" in name and "noise")
    log: list[dict[str, Any]] = []
    found = tuner.tune(tuner.LIBRARY, True, log, {}).rows
    assert [[-1, -1], [-1, -1], True] in found and all(a != [1, -1] for a, _, _ in found)
    monkeypatch.setattr(tuner, "timings", lambda variants, rounds: tuner.Timings({"torch": [2.0], "Triton": [1.0]}, {}))
    assert tuner.tune(tuner.LIBRARY, True, log, {}).rows == []


def test_what_a_worker_does(tuner: ModuleType) -> None:
    config = tuner.grid_of("amax", True)[0]
    tuner.compile_one("amax", config, True)
    assert tuner._bound.cache_info().currsize and tuner.grid_of(tuner.LIBRARY, True) == []
    assert importlib.import_module("octavo.tune.tuner") is not tuner or tuner.ON_GPU
