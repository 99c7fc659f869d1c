"""The type of a ``granularity`` argument."""

from __future__ import annotations

from octavo.granularity import PerRow, PerTensor

FP8Granularity = PerTensor | PerRow
"""The type of torchao's ``granularity=``: octavo.PerTensor() or octavo.PerRow()."""
