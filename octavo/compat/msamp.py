"""MS-AMP's ``initialize`` over octavo.convert and octavo.optim: import it in the place of ``msamp``.

What differs is in docs/migrate.md. What octavo can't do raises octavo.UnsupportedOptionError.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from octavo import optim
from octavo.errors import UnsupportedOptionError
from octavo.formats import E4M3, E5M2
from octavo.granularity import PerTensor
from octavo.nn.convert import convert
from octavo.optim.moment import NAMED
from octavo.scaling.recipe import Cast, Delayed, Recipe

__all__ = ["RECIPE", "clip_grad_norm_", "initialize"]

_INPUT = Cast(E4M3, PerTensor(), Delayed(16), power_of_two=True)
_WEIGHT = Cast(E4M3, PerTensor(), power_of_two=True)
_GRADIENT = Cast(E5M2, PerTensor(), Delayed(16), power_of_two=True)
# of FP8Linear (Peng et al., arXiv 2310.18313): histories of 16 amax, but for weights, and scales of powers of two
RECIPE = Recipe((_INPUT, _WEIGHT), (_GRADIENT, _WEIGHT), (_GRADIENT, _INPUT), name="msamp")
"""MS-AMP's casts: E4M3 with delayed scales of powers of two, gradients E5M2, weights by their own amax."""
_MOMENTS = {"O1": NAMED["fp32"], "O2": (NAMED["fp8"][0], NAMED["bf16"][1])}
_OF_TORCH = {"amsgrad", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O1",
    use_te: bool = False,
) -> tuple[nn.Module, optim.Adam]:
    """The model with FP8 linear layers, and an optimizer over its parameters; to be called once, before training.

    Linear layers of any size, but those with an attribute ``use_fp32_linear``, compute by ``RECIPE``. Their weights are
    FP8 codes beside a scaled float16 master, gradients are E4M3 until the step. Moments are float32 at "O1"; at "O2"
    the first is E4M3 and the second takes two bytes.

    Args:
        model: changed in place.
        optimizer: a torch.optim.Adam or AdamW that has not stepped, whose groups the new one takes; AdamW by default.
        opt_level: "O1" or "O2".
        use_te: must be False.

    Returns:
        ``(model, optimizer)``.

    Raises:
        UnsupportedOptionError: for another level or optimizer, with what to write instead; nothing is changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), opt_level="O2")
        >>> model[0].weight.qdata.dtype, optimizer.master, optimizer.gradient_storage
        (torch.float8_e4m3fn, 'fp16_scaled', 'fp8')
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if use_te:
        raise UnsupportedOptionError("use_te=True: write the layers with octavo.compat.transformer_engine alone")
    if opt_level not in _MOMENTS:
        raise UnsupportedOptionError(
            f"opt_level={opt_level!r}: use 'O1' or 'O2'; in the place of 'O3' call torch's fully_shard(model) between "
            "octavo.convert(model, RECIPE, weight_storage='fp8') and the making of an octavo.optim.AdamW"
        )
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    kind = _kind(optimizer)
    groups = [{name: group[name] for name in group if name not in _OF_TORCH} for group in optimizer.param_groups]
    fp32 = "use_fp32_linear"
    convert(model, RECIPE, select=lambda module, name: not getattr(module, fp32, False), weight_storage="fp8")
    return model, kind(groups, moments=_MOMENTS[opt_level], master="fp16_scaled", gradient_storage="fp8")


def _kind(optimizer: torch.optim.Optimizer) -> type[optim.Adam]:
    """Octavo's optimizer of the same rule."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise UnsupportedOptionError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__}: MS-AMP takes torch.optim.Adam and AdamW; "
            "octavo.optim.SGD is for octavo.convert(model, RECIPE, weight_storage='fp8')"
        )
    if optimizer.state:
        raise UnsupportedOptionError("the optimizer has stepped: its moments would be lost; initialize before training")
    on = [name for group in optimizer.param_groups for name in ("amsgrad", "differentiable") if group.get(name)]
    if on:
        raise UnsupportedOptionError(f"{on[0]}=True: octavo.optim has none; leave it out")
    decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("decoupled_weight_decay")
    return optim.AdamW if decoupled else optim.Adam
