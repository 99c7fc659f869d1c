"""Predictions of a training step's time and memory on a device, and whether FP8 pays there."""

from octavo.cost.estimate import Estimate, estimate
from octavo.cost.rates import PUBLISHED, Rates, measure, rates_of

__all__ = ["PUBLISHED", "Estimate", "Rates", "estimate", "measure", "rates_of"]
