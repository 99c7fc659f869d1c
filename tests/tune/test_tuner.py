"""The tuner finds a table's rows, and lets no wrong configuration in."""

import importlib
import math
from types import ModuleType
from typing import Any

import pytest

from octavo.tune.timing import ON_GPU, Timings
from tests.support import triton_kernels
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


def test_every_row_of_the_table_is_read_by_the_cases_that_tune_it(tuner: ModuleType, kernels: TritonKernels) -> None:
    launch = kernels.module("launch")
    assert tuner.LARGE == launch.LARGE
    assert launch.TABLE.keys() == tuner.cases.CASES_OF_KIND.keys() - {tuner.LIBRARY}
    for kind in launch.TABLE:
        if kind == "matmul_scaled" and kernels.module("matmul")._architecture() // 10 not in (0, 10):
            continue  # the interpreter and sm_100 alone read it
        for case in tuner.cases.CASES_OF_KIND[kind].values():
            call = case.call_of(tuner.TOY.buckets_of(kind)[64][0])
            with tuner.TileTable.using({kind: []}), pytest.raises(IndexError):
                call()


def test_grids(tuner: ModuleType) -> None:
    for kind in tuner.cases.CASES_OF_KIND.keys() - {tuner.LIBRARY}:
        assert max(tuner.FULL.buckets_of(kind)) == 64, kind
        for bucket in tuner.FULL.buckets_of(kind):
            configs = tuner.grid_of(kind, bucket, tuner.FULL)
            assert configs[0] == tuner.TileTable.read(None).config(kind, bucket), kind
            assert len(set(configs)) == len(configs) >= 18, kind
            assert {config.num_warps for config in configs} <= {1, 2, 4, 8, 16} and min(c.depth for c in configs) > 0
            assert all((c.tile_r * c.tile_c).bit_count() == 1 for c in configs), kind
            assert "transpose" not in kind or min(c.tile_r for c in configs) >= 16 + 16 * (bucket == 64), kind


def test_rows_and_their_gain(tuner: ModuleType, kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is tuned where another configuration is faster: of 64 x 64 a neighbour, of 32 x 32 octavo's own."""
    large, small = (tuner.TileTable.read(None).config("cast", bucket) for bucket in (64, 20))
    (first,) = set(tuner.grid_of("cast", 64, tuner.TOY)) - {large}
    (other,) = set(tuner.grid_of("cast", 20, tuner.TOY)) - {small}
    times = {(64, 64): {first: 1.0, large: 2.0}, (32, 64): {other: 3.0, small: 1.0}}

    def calling(kind: str, config: Any, name: str, shape: tuple[int, int]) -> Any:
        return lambda: times[shape][config]

    def timings(variants: dict[str, Any], rounds: int) -> Any:
        return Timings({k: [call()] for k, call in variants.items()}, {})

    monkeypatch.setattr(tuner, "_calling", calling)
    monkeypatch.setattr(tuner, "timings", timings)
    launch = kernels.module("launch")
    before = dict(launch.TABLE)
    tuned_rows = tuner.tune("cast", tuner.TOY, {"amax": []})
    assert tuned_rows.rows == [[20, *small], [64, *first]] and tuned_rows.gain == pytest.approx(2**0.5)
    assert before == launch.TABLE
    monkeypatch.setattr(tuner.cases.Case, "wrong", lambda *case: "" if launch.config("cast", 64) != first else "wrong")
    assert tuner.tune("cast", tuner.TOY, {}).rows == [[20, *small], [64, *large]]


def test_a_kind_of_which_no_configuration_runs_has_no_row(
    tuner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(tuner, "timings", lambda variants, rounds: Timings({}, dict.fromkeys(variants, "no room")))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(True))
    tuned = tuner.tune("cast", tuner.TOY, {})
    assert tuned.rows == [] and math.isnan(tuned.gain) and emptied == [True]
    assert "  some failed: no room\n" in capsys.readouterr().out


def test_products_that_are_torchs(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if tuner.LIBRARY not in tuner.cases.CASES_OF_KIND:
        pytest.skip("torch 2.11 has no FP8 product on a CPU")
    monkeypatch.setattr(tuner, "timings", lambda variants, rounds: Timings({"torch": [1.0], "Triton": [2.0]}, {}))
    monkeypatch.setattr(tuner.cases.Case, "wrong", lambda case, shape: case.product[0] == (1, -1) and "noise")
    rows = tuner.tune(tuner.LIBRARY, tuner.TOY, {}).rows
    assert [[-1, -1], [-1, -1], True] in rows and all(a != [1, -1] for a, _, _ in rows)
    monkeypatch.setattr(tuner, "timings", lambda variants, rounds: Timings({"torch": [2.0], "Triton": [1.0]}, {}))
    assert tuner.tune(tuner.LIBRARY, tuner.TOY, {}).rows == []
    for runs, failed in (("torch", "Triton"), ("Triton", "torch")):
        monkeypatch.setattr(
            tuner, "timings", lambda *_, runs=runs, failed=failed: Timings({runs: [1.0]}, {failed: "no"})
        )
        assert bool(tuner.tune(tuner.LIBRARY, tuner.TOY, {}).rows) == (runs == "torch")


def test_what_a_worker_does(tuner: ModuleType) -> None:
    assert tuner.tasks([tuner.LIBRARY], tuner.TOY) == []
    tuner.compile_one(*tuner.tasks(["amax"], tuner.TOY)[0])
    assert tuner.call_of.cache_info().currsize
    assert importlib.import_module("octavo.tune.tuner") is not tuner or ON_GPU or triton_kernels.compiled_for
