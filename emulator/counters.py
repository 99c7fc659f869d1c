"""What accesses cost: requests of warps, 32-byte sectors or shared-memory wavefronts, and the fewest possible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SECTOR, BANKS = 32, 32


@dataclass(slots=True)
class Count:
    """Of one instruction, or a sum: ``got`` sectors or wavefronts where ``least`` would do for its ``bytes``."""

    requests: int = 0
    got: int = 0
    least: int = 0
    bytes: int = 0

    def sectors(self, warp: np.ndarray, address: np.ndarray, size: int) -> None:
        """Note global accesses: the distinct sectors of each warp, and as many as its distinct bytes would fill."""
        key = np.unique((warp << 48) | (address & ((1 << 48) - 1)))
        counts = np.unique(key >> 48, return_counts=True)[1]
        self.requests += counts.size
        self.got += np.unique(np.concatenate([key, key + size - 1]) // SECTOR).size
        self.least += int((-(-counts * size // SECTOR)).sum())
        self.bytes += int(counts.sum()) * size

    def wavefronts(self, warp: np.ndarray, lane: np.ndarray, address: np.ndarray, size: int) -> None:
        """Note shared accesses: 8 bytes by half warps, 16 by quarters, each as often as its worst bank's words."""
        phases = max(size // 4, 1)
        group = warp * phases + lane // (BANKS // phases)
        word = (address >> 2)[:, None] + np.arange(phases)
        key = np.unique((group[:, None] << 24) + word)
        bank, depth = np.unique((key >> 24) * BANKS + key % BANKS, return_counts=True)
        first = np.flatnonzero(np.diff(bank // BANKS, prepend=-1))
        words = np.unique(key >> 24, return_counts=True)[1]
        self.requests += np.unique(warp).size
        self.got += int(np.maximum.reduceat(depth, first).sum())
        self.least += int((-(-words // BANKS)).sum())
        self.bytes += address.size * size

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))
