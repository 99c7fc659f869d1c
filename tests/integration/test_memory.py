"""The bytes that are saved for backward, and the most that a step needs at once."""

import pytest
import torch

import octavo
from octavo import recipes
from octavo.formats import FORMATS
from octavo.kernels.cpu import cast, codes
from tests.support.helpers import FP8_RECIPES, stepped
from tests.support.memory import peak_bytes, saved_tensors

T = 4096


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


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "mx" else pytest.mark.full) for n in FP8_RECIPES])
def test_the_most_that_a_transformer_blocks_step_needs(name, monkeypatch):
    """The default set takes mx, which needs most."""
    monkeypatch.setattr(codes, "CHUNK", 1 << 13)  # scratch, small beside activations, as it is with more tokens
    monkeypatch.setattr(cast, "KEPT", 1 << 15)

    def needs(recipe: octavo.Recipe, dtype: torch.dtype) -> int:
        net = octavo.nn.TransformerBlock(64, 224, 2, recipe=recipe, norm="layer_norm").to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        x = torch.randn(24, 128, 64, dtype=dtype)

        def step() -> None:
            stepped(optimizer, net(x).square().mean())

        step()
        octavo.nn.invalidate(net)  # the profile would see the cached weights neither come nor go
        return peak_bytes(step)

    in_bf16 = needs(recipes.high_precision(), torch.float32) / 2  # or a little less: a norm's statistics stay float32
    assert in_bf16 > 30 * 3072 * 64 * 2
    assert needs(FP8_RECIPES[name](), torch.bfloat16) <= in_bf16
