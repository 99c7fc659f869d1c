"""How tensor cores add: here exactly, rounded once; the hardware's own rules are to follow."""

from __future__ import annotations

import numpy as np


class Rule:
    """Of an architecture's instruction."""


def rule_of(target: str, instruction: str, a: str, b: str) -> Rule:
    """The rule for ``sm_90a``, ``wgmma`` and ``f8`` and their like."""
    return Rule()


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, rule: Rule) -> np.ndarray:
    """a [G, M, K] . b [G, N, K]^T + c [G, M, N] in float32."""
    return (np.matmul(a, b.transpose(0, 2, 1)) + c.astype(np.float64)).astype(np.float32)
