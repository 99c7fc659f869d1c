"""octavo::grouped_matmul on a GPU, for now by the reference's loop over groups, which waits for their sizes."""

from __future__ import annotations

from typing import Any

from octavo.kernels.reference.grouped_matmul import grouped_matmul as reference_grouped_matmul


def grouped_matmul(*arguments: Any) -> Any:
    """``octavo::grouped_matmul``."""
    return reference_grouped_matmul(*arguments)
