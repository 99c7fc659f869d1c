"""Whose kernels make a recipe's products: what is said of an architecture, what is done there, what a user is told."""

import contextlib
import dataclasses
import logging
from typing import Any
from unittest import mock

import pytest
import torch

import octavo
from octavo import PerBlock, recipes
from octavo.kernels import capability
from octavo.kernels.arguments import OperandPair, ProductArguments
from octavo.nn.where import ARCHITECTURES, REFERENCE, TORCH, TRITON, described, warn_once_if_slower, ways
from octavo.scaling.recipe import PRODUCTS, Cast

matmul = pytest.importorskip("octavo.kernels.triton.matmul")
FINE = Cast(octavo.E4M3, PerBlock(1, 16))  # of blocks that no kernel has
OTHER = dataclasses.replace(recipes.mx(), output=(FINE, FINE), name="fine blocks")
FP8 = {name: getattr(recipes, name)() for name in recipes.NAMED if name != "high_precision"} | {"fine blocks": OTHER}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, request: Any) -> torch.device:
    """A GPU of a capability, the parameter."""
    monkeypatch.setattr(capability, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("sm_80", "CPU")])
def test_a_product_goes_where_the_table_says(architecture: str, name: str) -> None:
    """By the kernels' own choice, on a GPU whose torch has blocks if it is a Hopper."""
    said = {way.product: way.kernel for way in ways(FP8[name], ARCHITECTURES[architecture])}
    made: list[str] = []
    with contextlib.ExitStack() as stack:
        has = mock.Mock(side_effect=lambda pairs, *rest: architecture == "sm_90" or pairs.a.tile[1] == -1)
        stack.enter_context(mock.patch.object(matmul, "is_right", has))
        for function, kernel in (("library", TORCH), ("triton", TRITON), ("reference", REFERENCE)):
            chosen = mock.Mock(side_effect=lambda *arguments, kernel=kernel: made.append(kernel))
            stack.enter_context(mock.patch.object(matmul, f"{function}_matmul", chosen))
        for product in said:
            a, b = (OperandPair(torch.empty(0), torch.empty(0), cast.tile) for cast in getattr(FP8[name], product))
            matmul.matmul(ProductArguments(a, b, None), torch.bfloat16, product in FP8[name].fast_accum)
    assert list(said.values()) == made
    assert list(said) == [product for product in PRODUCTS if getattr(FP8[name], product) is not None]


def test_what_is_lost() -> None:
    assert described(recipes.high_precision(), (9, 0)) == ("high precision", "nothing")
    assert described(recipes.blockwise(), (9, 0)) == described(recipes.rowwise(), (12, 1)) == (TORCH, "nothing")
    assert described(recipes.rowwise(), (8, 0)) == (REFERENCE, "FP8's speed and bfloat16's: emulated in float32")
    assert described(recipes.batch_invariant(), None) == (REFERENCE, "FP8's speed: emulated")
    assert described(recipes.mx(), (9, 0))[1] == "an FFMA and an FMUL an element for each 32 of the contraction"
    assert described(recipes.mx(), (10, 0))[1].endswith("the contraction instead of the tensor cores' own scales")


@pytest.mark.parametrize(
    ("device", "slow", "faster"),
    [
        ((8, 0), (), ""),
        ((8, 9), ("blockwise", "mx", "fine blocks"), "rowwise"),
        ((9, 0), ("mx", "fine blocks"), "blockwise"),
        ((10, 0), ("blockwise", "mx", "fine blocks"), "rowwise"),
    ],
    indirect=["device"],
)
def test_one_warning_where_another_recipe_is_faster(device: Any, slow: Any, faster: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="octavo"):
        for recipe in [*FP8.values(), recipes.high_precision()] * 2:
            warn_once_if_slower(recipe, device)
            warn_once_if_slower(recipe, torch.device("cpu"))
    found = [record.getMessage() for record in caplog.records]
    assert [message.partition(" on cuda:0 (sm_")[0] for message in found] == list(slow)
    assert all(f"octavo.recipes.{faster}()" in message for message in found)


@pytest.mark.parametrize("device", [(9, 0)], indirect=True)
def test_a_module_that_is_moved_is_warned_of_but_not_one_that_is_traced(device: Any, caplog: Any) -> None:
    module = octavo.nn.Linear(32, 32, recipe=recipes.mx())
    caplog.clear()
    with mock.patch("octavo.nn.recipe_module.device_of", lambda module: device):
        with mock.patch("torch.compiler.is_compiling", lambda: True):
            module.float()
        assert not caplog.records
        module.float()
    assert caplog.records[0].getMessage().startswith("mx on cuda:0 (sm_90): output is made by octavo's Triton kernel")
