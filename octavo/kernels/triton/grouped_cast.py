"""octavo::grouped_cast on a GPU, for now by the reference's loop over groups, which waits for their sizes."""

from __future__ import annotations

from typing import Any

from octavo.kernels.reference.grouped_cast import grouped_cast as reference_grouped_cast


def grouped_cast(*arguments: Any) -> Any:
    """``octavo::grouped_cast``."""
    return reference_grouped_cast(*arguments)
