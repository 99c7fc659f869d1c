"""The kernels of a recipe's products: the table of architectures, the products' own choice, the user's warning."""

import contextlib
import dataclasses
import logging
from typing import Any
from unittest import mock

import pytest
import torch

import octavo
from octavo import Cast, PerBlock, recipes
from octavo.kernels import capability
from octavo.kernels.arguments import OperandPair, ProductArguments
from octavo.nn.where import ARCHITECTURES, REFERENCE, TORCH, TRITON, makers, warn_once_if_slower

matmul = pytest.importorskip("octavo.kernels.triton.matmul")
FINE = Cast(octavo.E4M3, PerBlock(1, 16))  # of blocks that no kernel has
FP8 = {name: getattr(recipes, name)() for name in recipes.NAMED}
FP8["fine"] = dataclasses.replace(recipes.mx(), output=(FINE, FINE), name="fine")


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("sm_80", "CPU")])
def test_a_product_goes_where_the_table_says(architecture: str, name: str) -> None:
    """Products go where the table says, on a GPU whose torch has blocks of 128 if it is a Hopper, later of 32."""
    said, called = list(makers(FP8[name], ARCHITECTURES[architecture])), []
    columns = {"sm_89": -1, "sm_90": 128}.get(architecture, 32)
    has = mock.Mock(side_effect=lambda pairs, *others: pairs.a.tile[1] in (-1, columns))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(matmul, "is_right", has))
        for function, kernel in (("library", TORCH), ("triton", TRITON), ("reference", REFERENCE)):
            chosen = mock.Mock(side_effect=lambda *arguments, kernel=kernel: called.append(kernel))
            stack.enter_context(mock.patch.object(matmul, f"{function}_matmul", chosen))
        for maker in said:
            a, b = (OperandPair(torch.empty(0), torch.empty(0), c.tile) for c in getattr(FP8[name], maker.product))
            matmul.matmul(ProductArguments(a, b, None), torch.bfloat16, maker.product in FP8[name].fast_accum)
    assert [maker.kernel for maker in said] == called


@pytest.mark.parametrize(
    ("sm", "slow", "faster"),
    [
        ((8, 0), [], ""),
        ((8, 9), ["blockwise", "mx", "nvfp4", "fine"], "rowwise"),
        ((9, 0), ["mx", "nvfp4", "fine"], "blockwise"),
        ((10, 0), ["blockwise", "nvfp4", "fine"], "rowwise"),
        ((12, 1), ["blockwise", "nvfp4", "fine"], "rowwise"),
    ],
)
def test_one_warning_where_another_recipe_is_faster(sm: Any, slow: Any, faster: str, caplog: Any, monkeypatch: Any):
    monkeypatch.setattr(capability, "_warned", {"cpu"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: sm)
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        with mock.patch("torch.compiler.is_compiling", lambda: True):
            warn_once_if_slower(recipes.mx(), device)
        for recipe in list(FP8.values()) * 2:
            warn_once_if_slower(recipe, torch.device("cpu"))
            warn_once_if_slower(recipe, device)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(" on cuda:0 (sm_")[0] for message in messages] == slow
    assert all(f"octavo.recipes.{faster}()" in message for message in messages)


def test_a_module_that_is_moved_tells_where_it_is() -> None:
    module = octavo.nn.Linear(32, 32, recipe=recipes.mx())
    with mock.patch("octavo.nn.recipe_module.warn_once_if_slower") as warn:
        module.to("meta")
        module.recipe = recipes.dynamic()
    meta = torch.device("meta")
    assert warn.mock_calls == [mock.call(recipes.mx(), meta), mock.call(recipes.dynamic(), meta)]
