"""The pair as a tensor: ScaledTensor, and the parameters and gradients that are pairs."""
