"""What transformers calls a checkpoint's tensors in a model of its own, where a hub's names are others.

Experts that a model has in one parameter [E, N, K] are tensors of their own there (experts.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.export.experts import places_in
from octavo.nn.stored_weight_files import SCALE_INV
from octavo.tensor.stored_weight import local_stored


def places_of_experts(model: nn.Module) -> dict[str, dict[str, tuple[int, slice]]]:
    """Of the experts of a model that are stored in FP8: what ``places_in`` says of each parameter."""
    stored = {key: p.shape for key, p in model.named_parameters() if p.ndim == 3 and local_stored(p) is not None}
    return {key: places_in(model, key, shape) for key, shape in stored.items()}


def renaming(model: nn.Module, own: dict[str, Tensor]) -> Callable[[str], str]:
    """What transformers calls a checkpoint's tensors in a model of its own; else their names."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return lambda key: key
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]

    def renamed(key: str) -> str:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if pattern is not None:
            raise ValueError(
                f"{key} is joined with others by transformers ({name}), which is not stored in FP8 in the model: "
                "octavo.convert(model, recipe, select, weight_storage='fp8') with a select that takes the experts"
            )
        return name

    return renamed


def split_stored(model: nn.Module, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Codes and scales of weights that live in FP8, by the names that transformers has for them; and all else as it is.

    Args:
        model: transformers' own, whose state_dict this is, perhaps by a hub's names.
        state_dict: left as it is.
    """
    renamed = renaming(model, model.state_dict())
    stored, others = dict[str, Any](), dict(state_dict)
    for key, places in places_of_experts(model).items():
        if not places or any(name not in others or others[name].dtype != torch.uint8 for name in places):
            continue  # values, which from_pretrained joins
        parts = [(place, others.pop(name)) for name, place in places.items()]
        experts, rows, columns = model.get_parameter(key).shape
        codes = stored[key] = parts[0][1].new_empty(experts, rows, 1, columns)
        for (expert, own), part in parts:
            codes[expert, own] = part
    for scale in [name for name in state_dict if name.endswith(SCALE_INV)]:
        weight = scale.removesuffix(SCALE_INV)
        stored |= {scale.replace(weight, renamed(weight)): others.pop(scale)}
        if weight in others:
            stored[renamed(weight)] = others.pop(weight)
    return stored, others
