"""The study of gradients reduced in FP8: its ranks are what processes are, it runs, and its page says what it found."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import E5M2
from tests.distributed.test_fp8_reduce import gradients, hooked

study = importlib.import_module("benchmarks.distributed.fp8_reduce")
simulated = importlib.import_module("benchmarks.distributed.fp8_reduce_ranks")


@pytest.mark.covering(1)
@pytest.mark.parametrize("servers", [(2,), pytest.param((4,), marks=pytest.mark.full), (2, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stochastic": True},
        {"format": E5M2},
        {"format": E5M2, "stochastic": True},
        {"gather_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_simulated_ranks_are_real_ones_bit_for_bit(pool, servers, options):
    ranks, options = math.prod(servers), {"ranks_per_server": servers[0], **options}
    in_fp8 = simulated.InFp8(**options)
    expected = [in_fp8([gradients(3001, rank, step) for rank in range(ranks)]).double().numpy() for step in range(3)]
    for found in pool.run(hooked, (ranks,), 3001, torch.float32, options, 3):
        np.testing.assert_array_equal(found, expected)


def test_what_others_do():
    """Sums of one scale in FP8 fit; a ring in bf16 is off by bf16's rounding."""
    flats = [gradients(3001, rank) for rank in range(8)]
    mean = torch.stack(flats).double().mean(0)

    def error(average):
        return float((average(flats).double() - mean).norm() / mean.norm())

    assert error(simulated.in_float32) < 1e-6 < error(simulated.in_bf16) < 0.01
    own = error(simulated.InFp8())
    assert 0.02 < own < error(simulated.SumsInFp8([3000, 1])) < 0.1


def test_gaps():
    """Two ways of bf16 are one baseline; a variant's gap is over seeds, its error from what no effects explain."""
    losses = {"bf16": (1.0, 2.0), "bf16, ranks reversed": (1.0, 2.0), "E4M3": (1.01, 2.02)}
    rows = [
        {"variant": name, "seed": str(seed), "val_loss": str(loss)}
        for name, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    gap, error, seeds = study.gaps(rows)["E4M3"]
    assert math.isclose(gap, 1.0, rel_tol=1e-6) and error < 1e-6 and seeds == 2
    rows[-1]["val_loss"] = "2.03"
    gap, error, _ = study.gaps(rows)["E4M3"]
    assert math.isclose(gap, 1.25, rel_tol=1e-6) and 0.05 < error < 0.5
    elsewhere = [row | {"device": "another", "val_loss": str(3 * float(row["val_loss"]))} for row in rows]
    assert math.isclose(study.gaps(rows + elsewhere)["E4M3"][0], 1.25, rel_tol=1e-6)  # each beside its own bf16


@pytest.mark.full
def test_it_runs_at_toy_size(tmp_path: Path) -> None:
    assert study.main(["--toy", "--seeds", "0", "--output", str(tmp_path)]) == 0
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == study.SUBJECTS
