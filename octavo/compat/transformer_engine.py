"""Renames the keys of a checkpoint of Transformer Engine's modules to those of octavo's.

docs/migrate.md lists, name by name, octavo's equivalents of the other parts of Transformer Engine and of MS-AMP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["octavo_state_dict"]

_MODULES = {"self_attention.layernorm_qkv": "attention.qkv", "self_attention.proj": "attention.out"}
_MODULES |= {"layernorm_mlp": "mlp"}  # from names in a TransformerLayer to those in octavo.nn.TransformerBlock
_CHILDREN = {"layer_norm": "norm", "fc1": "fc1", "fc2": "fc2"}


def octavo_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Transformer Engine model's state_dict (2.20) with octavo's names, for load_state_dict of octavo's model.

    It renames the keys of LayerNormLinear, LayerNormMLP and TransformerLayer, and those of separate query, key and
    value. It leaves out ``_extra_state``: scales begin with each tensor's own amax. Other keys stay as they are.

    Raises:
        ValueError: for a TransformerLayer's joint matrix of query, key and value, whose rows are in another order.

    Example:
        >>> import torch, octavo
        >>> names = "layer_norm_weight", "fc1_weight", "fc2_weight"
        >>> state = {name: torch.ones(shape) for name, shape in zip(names, [32, (192, 32), (32, 96)])}
        >>> model = octavo.nn.RMSNormMLP(32, 96, "swiglu", bias=False)
        >>> model.load_state_dict(octavo_state_dict(state))
        <All keys matched successfully>
    """
    renamed_state = {}
    for key, value in state_dict.items():
        path, _, name = key.rpartition(".")
        if name == "_extra_state":
            continue
        child, _, kind = name.rpartition("_")
        follows_norm = f"{path}.layer_norm_weight".lstrip(".") in state_dict
        if kind in ("weight", "bias") and (follows_norm or child in ("query", "key", "value")):
            # fc1_weight -> fc1.weight; weight -> linear.weight; query_weight -> linear.query.weight, or query.weight
            linear = f"linear.{child}" if child else "linear"
            name = f"{_CHILDREN.get(child, linear) if follows_norm else child}.{kind}"
        for their_path, octavo_path in _MODULES.items():
            if f".{path}".endswith(f".{their_path}"):
                if their_path.endswith("layernorm_qkv") and not child:
                    raise ValueError(f"{key}: save it from a TransformerLayer with fuse_qkv_params=False")
                path = path.removesuffix(their_path) + octavo_path
        renamed_state[f"{path}.{name}".lstrip(".")] = value
    return renamed_state
