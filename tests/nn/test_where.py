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
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> torch.device:
    """A GPU of the capability that the test's parameter says."""
    monkeypatch.setattr(capability, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("sm_80", "CPU")])
def test_a_product_goes_where_the_table_says(architecture: str, name: str) -> None:
    """The table's way for each product is the one that the kernels' own choice takes, asked of a GPU of that kind."""
    major = ARCHITECTURES[architecture][0]
    said = {way.product: way.kernel for way in ways(FP8[name], ARCHITECTURES[architecture])}
    made: list[str] = []
    has_blocks = lambda operands, *rest: major == 9 or operands.a.tile[1] == operands.b.tile[1] == -1  # noqa: E731
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(matmul, "is_right", has_blocks))
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
    assert [name for name in FP8 if described(FP8[name], None)[1] == "FP8's speed: emulated"] == [
        name for name in FP8 if name != "rowwise" and name != "fine blocks"
    ]
    assert described(recipes.mx(), (9, 0))[1] == "an FFMA and an FMUL an element for each 32 of the contraction"
    assert described(recipes.mx(), (10, 0))[1].endswith("the contraction instead of the tensor cores' own scales")
    assert described(recipes.rowwise_with_gw_hp(), (8, 9))[0] == (
        "output: torch's, grad_input: octavo's Triton kernel, grad_weight: high precision"
    )


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
def test_tracing_and_modules(device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="octavo"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            warn_once_if_slower(recipes.mx(), device)
        assert not caplog.records
        module = octavo.nn.Linear(32, 32)
        with mock.patch("octavo.nn.recipe_module.device_of", lambda module: device):
            module.recipe = module.recipe = recipes.mx()
    assert [record.getMessage().partition(" ")[0] for record in caplog.records][-1:] == ["mx"]
