"""FP8 modules, and the conversion of models to them."""

from octavo.nn.checkpointing import checkpoint_model_in_fp8
from octavo.nn.experts import Experts
from octavo.nn.fused import LayerNorm, LayerNormLinear, LayerNormMLP, RMSNorm, RMSNormLinear, RMSNormMLP
from octavo.nn.linear import GroupedLinear, Linear, separate_splits
from octavo.nn.loss import CrossEntropyLoss, cross_entropy, linear_cross_entropy
from octavo.nn.recipe_module import invalidate
from octavo.nn.transformer import SelfAttention, TransformerBlock, rotary_table
from octavo.scaling.delayed import delayed_state_dict, load_delayed_state_dict
from octavo.weights.kept import KeptWeights

__all__ = ["CrossEntropyLoss", "Experts", "GroupedLinear", "KeptWeights", "LayerNorm", "LayerNormLinear"]
__all__ += ["LayerNormMLP", "Linear", "RMSNorm", "RMSNormLinear", "RMSNormMLP", "SelfAttention", "TransformerBlock"]
__all__ += ["checkpoint_model_in_fp8", "cross_entropy", "delayed_state_dict", "invalidate", "linear_cross_entropy"]
__all__ += ["load_delayed_state_dict", "rotary_table", "separate_splits"]
