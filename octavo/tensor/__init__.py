"""The pair as a tensor: ScaledTensor, and the parameters and gradients that are pairs."""

from octavo.tensor import aten_table  # noqa: F401  # a ScaledTensor's rules
