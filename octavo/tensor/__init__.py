"""The pair as a tensor: ScaledTensor, how aten ops move it, and its two conversions."""
