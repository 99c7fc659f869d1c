"""What is kept of counts by expert: sums over experts, the worst expert's own counts, and everyone's tokens.

A row of a layer of experts is counted in a line an expert. A record of all lines would be as many times larger as there
are experts, and nobody reads them all; what hurts a training is in the worst.

    sums, exponents, extremes    a row of the record each: of all experts together
    worst_...                    the same of the worst expert alone, for each row of experts
    worst                        its number, and how many experts have a measure beyond its limit: [rows of experts, 2]
    tokens                       of each layer of experts [E], one behind the other
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.inspect.files import numpy
from octavo.inspect.findings import LIMITS, OWN_SQNR
from octavo.inspect.record import measures_of
from octavo.inspect.rows import Row
from octavo.kernels.arguments import SUMS

_TOLD_BY = ("grad_output", "input", "weight")


def kept(rows: Sequence[Row], counts: Any, extremes: Any) -> dict[str, Any]:
    """What a record keeps of a step, as NumPy arrays.

    Args:
        rows: at least one.
        counts: [lines, 71] of all rows.
        extremes: [lines, 3].
    """
    np = numpy()
    starts = np.cumsum([0, *(row.lines for row in rows)])[:-1]
    found = _named("", np.add.reduceat(counts, starts), np.maximum.reduceat(extremes, starts))
    of_experts = [
        (row, slice(start, start + row.experts)) for row, start in zip(rows, starts, strict=True) if row.experts
    ]
    if not of_experts:
        return found
    lines = np.concatenate([np.arange(own.start, own.stop) for _, own in of_experts])
    each = [row for row, _ in of_experts for _ in range(row.experts)]
    limits = np.array([row.largest for row in each])
    severity = np.full(len(counts), -np.inf)
    severity[lines] = severities(measures_of(np, counts[lines, : len(SUMS)], extremes[lines], limits), each)
    worst = [(own.start + int(severity[own].argmax()), own) for _, own in of_experts]
    at = [line for line, _ in worst]
    numbers = [(line - own.start, int((severity[own] > 1).sum())) for line, own in worst]
    tokens = [np.rint(counts[own, 0] / row.features) for row, own in _one_a_layer(of_experts, counts[:, 0])]
    return (
        found
        | _named("worst_", counts[at], extremes[at])
        | {
            "worst": np.array(numbers),
            "tokens": np.concatenate(tokens).astype("int64"),
        }
    )


def severities(measures: Mapping[str, Any], rows: Sequence[Row]) -> Any:
    """How many times its limit the worst measure of each row is, of MEASURES [rows]; -inf where nothing was counted."""
    np = numpy()
    room = np.array([2.0**row.cast.margin if row.cast.is_delayed else math.inf for row in rows])
    lost = np.array([OWN_SQNR[row.cast.format.name] for row in rows]) - measures["sqnr"]
    found = [
        np.where(measures["nonfinite"] > 0, math.inf, np.where(measures["nonfinite"] == 0, 0, np.nan)),
        measures["assumed"] / room / LIMITS["stale"],
        *(measures[kind] / LIMITS[kind] for kind in ("clipped", "flushed")),
        10 ** ((lost - LIMITS["rounded"]) / 10),
    ]
    return np.stack([np.where(np.isnan(part), -math.inf, part) for part in found]).max(axis=0)


def _named(prefix: str, counts: Any, extremes: Any) -> dict[str, Any]:
    sums, exponents = counts[:, : len(SUMS)], counts[:, len(SUMS) :].astype("float32")
    return {f"{prefix}sums": sums, f"{prefix}exponents": exponents, f"{prefix}extremes": extremes}


def _one_a_layer(of_experts: Sequence[tuple[Row, slice]], elements: Any) -> Iterator[tuple[Row, slice]]:
    """The row of each layer that tells of its tokens: of grad_output, which is cast once however often forward runs.

    Of two such rows, or where there is none, one that was counted: a first layer computes no grad_input.
    """
    layers: dict[str, list[tuple[Row, slice]]] = {}
    for row, own in of_experts:
        layers.setdefault(row.layer, []).append((row, own))
    for found in layers.values():
        of_rows = [(not elements[own].any(), _TOLD_BY.index(row.role), at) for at, (row, own) in enumerate(found)]
        yield found[min(of_rows)[-1]]
