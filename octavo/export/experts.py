"""Experts as servers read them: each expert's matrices under names of their own, as save_pretrained writes them.

In a model all experts' matrices are one parameter, [E, N, K], of which N may be gate and up one behind the other. A
checkpoint of most models has ``experts.0.gate_proj.weight``, ``experts.0.up_proj.weight``, ... instead, and servers
read these. transformers knows the names of each of its models, and takes them back in from_pretrained. Those of models
that it has no rule for, and octavo's own modules, keep their one tensor.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from octavo.granularity import ALL
from octavo.nn.converted_experts import ExpertsPart
from octavo.nn.grouped_linear import Grouped
from octavo.scaling.recipe import Cast


def written_names(model: nn.Module, key: str, tensor: Tensor) -> dict[str, Tensor]:
    """What save_pretrained of a transformers model makes of one tensor of its state_dict; of others itself."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {key: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {key: tensor})


def places_in(model: nn.Module, key: str, shape: torch.Size) -> dict[str, tuple[int, slice]]:
    """Which expert's rows of a parameter [E, N, K] each tensor is that save_pretrained writes of it, by their names.

    Nothing where it writes the parameter itself, or tensors that are no rows of it.
    """
    experts, rows, _ = shape
    named = written_names(model, key, torch.arange(experts * rows).view(experts, rows, 1))
    found = {}
    for name, part in named.items():
        first = int(part.flatten()[0])
        if part.ndim != 2 or not torch.equal(part.flatten(), torch.arange(first, first + len(part))):
            return {}
        found[name] = first // rows, slice(first % rows, first % rows + len(part))
    return found


def written_pairs(
    model: nn.Module, key: str, codes: Tensor, scale_inv: Tensor, cast: Cast
) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs that a pair of all experts, codes [E, N, K] and scale_inv [E, ...], is written as, by names.

    Raises:
        ValueError: where blocks reach from one matrix into the next.
    """
    named = written_names(model, key, codes)
    if list(named) == [key]:
        return {key: (codes, scale_inv)}
    joined = len(named) // len(codes)
    height, rows = cast.tile[0], codes.shape[1] // joined
    if joined > 1 and height > 1 and rows % height:
        raise ValueError(
            f"blocks of {height} rows reach from one of its {joined} matrices of {rows} rows into the next"
        )
    scales = written_names(model, key, scale_inv.expand(-1, joined, -1) if height == ALL else scale_inv)
    whole = cast.tile == (ALL, ALL)
    return {name: (part, scales[name].reshape(1) if whole else scales[name]) for name, part in named.items()}


def why_not_written(module: Grouped) -> str | None:
    """What keeps an expert matrix in FP8 from being written; or None."""
    if not isinstance(module, ExpertsPart):
        return None
    holder: Any = module.holder
    if module.stores_transposed:
        return f"{type(holder).__name__} stores it as [E, K, N], which no reader takes in FP8"
    if any(part.recipe.output is None for part in holder.parts):
        return "other matrices of the same experts are not in FP8, and servers read all of them alike"
    return None
