"""A checkpoint of Transformer Engine's modules, by the names that octavo's modules in their places have.

docs/migrate.md says, name by name, what to write instead of the rest of Transformer Engine and of MS-AMP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["octavo_state_dict"]

_MODULES = {"self_attention.layernorm_qkv": "attention.qkv", "self_attention.proj": "attention.out"}
_MODULES |= {"layernorm_mlp": "mlp"}  # of a TransformerLayer; octavo.nn.TransformerBlock's
_PARTS = {"layer_norm": "norm", "fc1": "fc1", "fc2": "fc2"}


def octavo_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A Transformer Engine model's state_dict (2.20) by octavo's names: what load_state_dict of octavo's model takes.

    Renamed are keys of LayerNormLinear, LayerNormMLP and TransformerLayer, and those of separate query, key and value.
    ``_extra_state`` is left out: scales begin with each tensor's own amax. Other keys stay as they are.

    Raises:
        ValueError: for a TransformerLayer's one matrix of query, key and value, whose rows lie in another order there.

    Example:
        >>> import torch, octavo
        >>> names = "layer_norm_weight", "fc1_weight", "fc2_weight"
        >>> state = {name: torch.ones(shape) for name, shape in zip(names, [32, (192, 32), (32, 96)])}
        >>> model = octavo.nn.RMSNormMLP(32, 96, "swiglu", bias=False)
        >>> model.load_state_dict(octavo_state_dict(state))
        <All keys matched successfully>
    """
    found = {}
    for key, value in state_dict.items():
        path, _, name = key.rpartition(".")
        if name == "_extra_state":
            continue
        part, _, kind = name.rpartition("_")
        follows_norm = f"{path}.layer_norm_weight".lstrip(".") in state_dict
        if kind in ("weight", "bias") and (follows_norm or part in ("query", "key", "value")):
            renamed = _PARTS.get(part) or f"linear.{part}".removesuffix(".") if follows_norm else part
            name = f"{renamed}.{kind}"
        for theirs, ours in _MODULES.items():
            if f".{path}".endswith(f".{theirs}"):
                if theirs.endswith("layernorm_qkv") and not part:
                    raise ValueError(f"{key}: save it from a TransformerLayer with fuse_qkv_params=False")
                path = path.removesuffix(theirs) + ours
        found[f"{path}.{name}".lstrip(".")] = value
    return found
