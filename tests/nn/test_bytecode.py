"""Reading of bytecode: functions that compute the same, and what methods do with layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octavo.nn.bytecode import code_within, same_code, uses_in
from octavo.nn.known_forwards import rotate_half


def test_functions_without_docstrings_are_the_same() -> None:
    source = "def rotate_half(x):\n    x1 = x[..., : x.shape[-1] // 2]\n    x2 = x[..., x.shape[-1] // 2 :]\n"
    names: dict[str, Any] = {}
    exec(f"import torch\n{source}    return torch.cat((-x2, x1), dim=-1)", names)
    assert same_code(names["rotate_half"], rotate_half)
    exec(f"import torch\n{source}    return torch.cat((x2, -x1), dim=-1)", names)
    assert not same_code(names["rotate_half"], rotate_half)


def test_code_lies_within_code_to_any_depth() -> None:
    def outer() -> Callable[[], Any]:
        def middle() -> Callable[[], int]:
            return lambda: 1

        return middle

    assert [code.co_name for code in code_within(outer.__code__)] == ["outer", "middle", "<lambda>"]


class Reader(nn.Module):
    """Calls a, reads b's values, asks c for its dtype, and both calls and reads d."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).to(self.c.weight.dtype)
        return self.d(x) + (lambda: self.b.weight.sum() + self.d.weight.sum())()


def test_uses_of_layers_are_calls_and_reads_of_values() -> None:
    expected = {"a": {"called"}, "b": {"read"}, "c": set(), "d": {"called", "read"}}
    assert uses_in((Reader.forward.__code__,)) == expected
