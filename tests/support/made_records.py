"""Records made of arrays, as large as a long training's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo import E4M3, E5M2, Cast, Delayed, Dynamic, PerTensor
from octavo.inspect import Record
from octavo.inspect.rows import Row
from octavo.kernels.arguments import EXPONENTS, LOWEST

CASTS = (  # role, products, format
    ("input", ("output", "grad_weight"), E4M3),
    ("weight", ("output", "grad_input"), E4M3),
    ("grad_output", ("grad_input", "grad_weight"), E5M2),
)
DELAYED = Delayed()


def made(layers: int = 2, records: int = 4, rule: Delayed | Dynamic = DELAYED) -> Record:
    """A record in which nothing is wrong: normal numbers under scales that fit them, one row a role."""
    random = np.random.default_rng(0)
    names = [f"model.layers.{place}.mlp" for place in range(layers)]
    rows = [
        Row(name, role, products, Cast(format, PerTensor(), rule)) for name in names for role, products, format in CASTS
    ]
    shape = (records, len(rows))
    amax = np.exp2(random.normal(0, 0.3, shape)) * np.resize([4.0, 1.0, 2.0**-12], len(rows))
    own = np.resize([31.5, 31.5, 25.5], len(rows))
    measures = {
        "flushed": random.uniform(0, 1e-3, shape),
        "clipped": random.uniform(0, 1e-5, shape),
        "nonfinite": np.zeros(shape),
        "sqnr": own + random.normal(0, 0.2, shape),
        "amax": amax,
        "scale_inv": amax / [row.largest for row in rows],
        "assumed": np.ones(shape),
    }
    moved = (records, layers)
    weights = {
        "update": 1e-4 * random.uniform(0.5, 2, moved),
        "resolution": random.uniform(50, 100, moved),
        "changed": np.ones(moved),
        "first_flushed": np.zeros(moved),
        "second_flushed": np.zeros(moved),
        **{f"master_{name}": np.full(moved, np.nan) for name in ("update", "resolution", "changed")},
    }
    steps = [50 * record for record in range(records)]
    loss = [float(4 + 6 * math.exp(-step / 9000)) for step in steps]
    scalars, events = (
        {"loss": (steps, loss), "grad_norm": (steps, loss)},
        [(step, "switch", "fp8") for step in steps[1:2]],
    )
    return Record(rows, steps, measures, _normal(amax), names, weights, scalars, events)


def _normal(amax: Any) -> Any:
    """How many of 10,000 numbers have each exponent: an octave below the amax and each further one half as many."""
    top = np.floor(np.log2(amax)).astype(int) - LOWEST
    below = top[..., None] - np.arange(EXPONENTS)
    return np.where(below >= 0, 10000 * 0.5 ** (below + 1.0), 0).round().astype("float32")


def put(record: Record, place: int, **values: Any) -> Record:
    """Give a row's measures these values from the second record on."""
    for name, value in values.items():
        record.measures[name][1:, place] = value
    return record
