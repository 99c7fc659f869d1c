"""Tensors on their way to the host: they travel while work goes on, and the host waits for none until it needs them."""

from __future__ import annotations

import torch
from torch import Tensor


class InFlight:
    """Tensors of one device that are copied to the host after the work launched so far.

    ``has_arrived`` and ``wait`` ask for the end of that work and of the copies, and for no later work.
    """

    def __init__(self, *tensors: Tensor) -> None:
        devices = [tensor.device for tensor in tensors if tensor.is_cuda]
        # into pinned memory; of other devices' tensors, whose numbers are there, nothing is copied
        self._tensors = [tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor for tensor in tensors]
        self._event = torch.cuda.current_stream(devices[0]).record_event() if devices else None

    @property
    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host, when they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
