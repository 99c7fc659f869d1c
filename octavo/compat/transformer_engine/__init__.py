"""Transformer Engine's modules and contexts over octavo's: import it in the place of ``transformer_engine.pytorch``.

The names of ``transformer_engine.common.recipe`` are here and in ``recipe``. Arguments, defaults and a state_dict's
keys are those of 2.20. docs/migrate.md says what differs. What octavo can't do raises octavo.UnsupportedOptionError.
"""

from typing import Any

from octavo.compat.transformer_engine.context import (
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from octavo.compat.transformer_engine.layer import LayerNorm, RMSNorm, RotaryPositionEmbedding, TransformerLayer
from octavo.compat.transformer_engine.modules import LayerNormLinear, LayerNormMLP, Linear
from octavo.compat.transformer_engine.options import refuse_name
from octavo.compat.transformer_engine.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "quantized_model_init",
]


def __getattr__(name: str) -> Any:
    refuse_name(__name__, name)
