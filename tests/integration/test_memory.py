"""What is kept for backward, and the most that a step needs at once."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.formats import FORMATS
from octavo.kernels.cpu import cast, codes
from tests.support.fused_cases import SAVED
from tests.support.helpers import FP8_RECIPES
from tests.support.memory import peak_bytes, saved_tensors

T = 4096


def saved_bytes(net: nn.Module, x: Tensor) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved_tensors(net, x)}
    return sum(storages.values())


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_only_codes_and_scales_are_saved(name):
    layer = octavo.nn.Linear(256, 128, recipe=FP8_RECIPES[name](), dtype=torch.bfloat16)
    saved = saved_tensors(layer, torch.randn(T, 256, dtype=torch.bfloat16, requires_grad=True))
    codes = [t for t in saved if t.dtype in FORMATS]
    scales = [t for t in saved if t.dtype in (torch.float32, torch.float8_e8m0fnu)]
    assert len(codes) == 2
    assert sum(t.numel() for t in codes) == T * 256 + 128 * 256
    assert len(codes) + len(scales) == len(saved)
    if name in ("dynamic", "delayed"):
        assert all(t.numel() == 1 for t in scales)


@pytest.mark.parametrize(
    ("frozen", "x_requires_grad", "numel"),
    [("weight", True, 128 * 256), ("none", False, T * 256), ("weight", False, 0)],
)
def test_nothing_is_saved_for_a_gradient_that_nobody_asked_for(frozen, x_requires_grad, numel):
    layer = octavo.nn.Linear(256, 128)
    layer.weight.requires_grad_(frozen != "weight")
    saved = saved_tensors(layer, torch.randn(T, 256, requires_grad=x_requires_grad))
    assert sum(t.numel() for t in saved if t.dtype.itemsize == 1) == numel


FEW = [pytest.param(n, marks=[] if n == "mx" else pytest.mark.full) for n in FP8_RECIPES]  # mx needs most


def block(recipe: octavo.Recipe, norm: str, width: int) -> nn.Module:
    options = {"recipe": recipe, "norm": norm, "dtype": torch.bfloat16}
    return octavo.nn.TransformerBlock(width, 7 * width // 2, width // 32, **options)


# In high precision a block is plain PyTorch. On a CPU torch's RMSNorm in bf16 saves and needs float32 copies; its
# LayerNorm needs none, as on a GPU neither does.
@functools.cache
def block_saves_in_bf16(norm: str) -> int:
    return saved_bytes(block(recipes.high_precision(), norm, 128), torch.zeros(8, 128, 128).bfloat16().requires_grad_())


@pytest.mark.covering(1)
@pytest.mark.parametrize(("saved", "most"), [(None, 0.80), (SAVED, 0.65)], ids=["", "saved in FP8"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("name", FP8_RECIPES)
def test_a_transformer_block_saves(name, norm, saved, most):
    x = torch.randn(8, 128, 128, dtype=torch.bfloat16, requires_grad=True)
    in_bf16 = block_saves_in_bf16(norm)
    assert in_bf16 >= 25 * x.nbytes
    ours = block(dataclasses.replace(FP8_RECIPES[name](), saved=saved), norm, 128)
    assert saved_bytes(ours, x) <= most * in_bf16


@pytest.mark.parametrize("name", FEW)
def test_the_most_that_a_transformer_blocks_step_needs(name, monkeypatch):
    monkeypatch.setattr(codes, "CHUNK", 1 << 13)  # scratch, small beside activations, as it is with more tokens
    monkeypatch.setattr(cast, "KEPT", 1 << 15)

    def needs(recipe: octavo.Recipe, dtype: torch.dtype) -> int:
        net = block(recipe, "layer_norm", 64).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        x = torch.randn(24, 128, 64, dtype=dtype)

        def step() -> None:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        octavo.nn.invalidate(net)  # the profile would see the cached weights neither come nor go
        return peak_bytes(step)

    in_bf16 = needs(recipes.high_precision(), torch.float32) / 2  # or a little less: a norm's statistics stay float32
    assert in_bf16 > 30 * 3072 * 64 * 2
    assert needs(FP8_RECIPES[name](), torch.bfloat16) <= in_bf16


def test_peak_bytes_sees_temporaries():
    x = torch.ones(1 << 20)
    assert peak_bytes(lambda: (x + 1).sum()) >= 4 << 20
