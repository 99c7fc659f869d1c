"""batch_invariant(): whatever a batch's other rows hold, a row's output in forward is the same, bit for bit.

A row is a token; where tokens attend to each other it is a sequence. Rows keep their places, and experts their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import octavo
from octavo import Recipe, recipes
from tests.support.fused_cases import linear, mlp, shaken
from tests.support.helpers import to_fp8
from tests.support.tiny_models import decoder
from tests.support.triton_kernels import in_place_of_reference

K, ROWS = 64, 24
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {  # what the other rows hold instead
    "other numbers": torch.randn_like,
    "larger": lambda rows: rows * 1.37,
    "huge": lambda rows: rows * 1e30,
    "zeros": torch.zeros_like,
    "inf": lambda rows: torch.where(rows > 1, torch.inf, rows),
    "NaN": lambda rows: torch.full_like(rows, torch.nan),
}
OFFSETS = torch.tensor([5, 5, 17, 22], dtype=torch.int32)  # an expert without rows; two rows of no expert


def _experts(recipe: Recipe, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    experts, chosen = octavo.nn.Experts(4, K, 48, recipe=recipe, dtype=dtype), torch.randint(4, (ROWS, 2))
    return lambda x: experts(x, chosen, torch.full((ROWS, 2), 0.5, dtype=dtype))


def _grouped(recipe: Recipe, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    layer = shaken(octavo.nn.GroupedLinear(4, K, 48, recipe=recipe, dtype=dtype))
    return lambda x: layer(x, OFFSETS)


def _llama(recipe: Recipe, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    model = octavo.convert(decoder("Llama").to(dtype).eval(), recipe, select=lambda module, name: True, fuse=True)
    return lambda x: model(inputs_embeds=x).logits


MODULES: dict[str, Callable[[Recipe, torch.dtype], Callable[[Tensor], Any]]] = {
    "Linear": lambda recipe, dtype: octavo.nn.Linear(K, 48, recipe=recipe, dtype=dtype),
    "odd sizes": lambda recipe, dtype: nn.Sequential(
        octavo.nn.Linear(K, 45, recipe=recipe, dtype=dtype), octavo.nn.Linear(45, 3, False, recipe=recipe, dtype=dtype)
    ),
    "named splits": lambda recipe, dtype: octavo.nn.Linear(K, {"q": 32, "kv": 16}, recipe=recipe, dtype=dtype),
    "Conv1D": lambda recipe, dtype: to_fp8(Conv1D(48, K).to(dtype), recipe),
    **{
        f"{norm}, linear": lambda recipe, dtype, norm=norm: linear(norm, recipe, dtype=dtype)
        for norm in ("layer_norm", "rms_norm")
    },
    **{
        f"{norm}, {activation}": lambda recipe, dtype, norm=norm, activation=activation: mlp(
            norm, recipe, activation=activation, dtype=dtype
        )
        for norm, activation in (("layer_norm", "gelu"), ("rms_norm", "swiglu"))
    },
    "GroupedLinear": _grouped,
    "Experts": _experts,
    "TransformerBlock": lambda recipe, dtype: octavo.nn.TransformerBlock(K, 96, 4, recipe=recipe, dtype=dtype),
    "convert(fuse=True)": _llama,
}
NAMES = [pytest.param(name, marks=[pytest.mark.full] if name == "convert(fuse=True)" else []) for name in MODULES]


def changed(name: str, recipe: Recipe, dtype: torch.dtype, device: str | torch.device = "cpu") -> set[str]:
    """By what other rows changed a row's output of this module in forward."""
    module = MODULES[name](recipe, dtype)
    if isinstance(module, nn.Module):
        module.to(device)
    sequences = name in ("TransformerBlock", "convert(fuse=True)")
    x = torch.randn(*((ROWS // 4, 4) if sequences else (ROWS,)), K, dtype=dtype, device=device)
    found = set()
    with torch.no_grad():
        before = module(x)
        for kind, other in OTHERS.items():
            replaced = torch.rand(len(x), device=device) < 0.5
            replaced[0], replaced[1] = True, False
            now = module(torch.where(replaced.view(-1, *[1] * (x.ndim - 1)), other(x), x))
            pairs = zip(before, now, strict=True) if isinstance(before, tuple) else [(before, now)]
            if not all(torch.equal(old[~replaced], new[~replaced]) for old, new in pairs):
                found.add(kind)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_other_rows_change_no_bit(name: str, dtype: torch.dtype) -> None:
    assert changed(name, recipes.batch_invariant(), dtype) == set()


@pytest.mark.parametrize("name", NAMES)
def test_other_rows_change_bits_where_a_tensor_has_one_scale(name: str) -> None:
    assert changed(name, recipes.dynamic(), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Linear", "rms_norm, swiglu"])
def test_other_rows_change_no_bit_of_the_kernels_for_gpus(name: str, kernels: Any) -> None:
    with in_place_of_reference(kernels) if kernels.device.type == "cpu" else nullcontext():
        assert changed(name, recipes.batch_invariant(), torch.bfloat16, kernels.device) == set()
