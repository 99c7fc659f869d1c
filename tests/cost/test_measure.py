"""A measurement gives every rate that a plan asks for."""

from __future__ import annotations

import importlib

import pytest
import torch

from octavo.cost.rates import FORMS, HIGH_PRECISION

module = importlib.import_module("octavo.cost.measure")  # the package has a function of this name


def test_all_rates_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON_CPU", ((64, 32, 48), (16, 16, 16)))
    monkeypatch.setattr(module, "_CAST", {False: (64, 64)})
    rates = module.measure(torch.device("cpu"), seconds=0.001)
    assert rates.source == "measured" and rates.copy > 0 and rates.launch > 0
    assert set(rates.products) == {HIGH_PRECISION, *FORMS}
    for points in rates.products.values():
        assert [flop for flop, _ in points] == [2 * 16**3, 2 * 64 * 32 * 48]
        assert all(rate > 0 for _, rate in points)
    assert set(rates.casts) == {*FORMS, "delayed"} and min(rates.casts.values()) > 0
