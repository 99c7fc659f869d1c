"""FP8 modules, and the conversion of models to them."""

from octavo.nn.fused import LayerNormLinear, LayerNormMLP, RMSNormLinear, RMSNormMLP
from octavo.nn.linear import Linear
from octavo.nn.norm import LayerNorm, RMSNorm
from octavo.nn.transformer import SelfAttention, TransformerBlock, rotary_table

__all__ = [
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "RMSNormLinear",
    "RMSNormMLP",
    "SelfAttention",
    "TransformerBlock",
    "rotary_table",
]
