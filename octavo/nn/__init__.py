"""FP8 modules, and the conversion of models to them."""

from octavo.nn.linear import Linear

__all__ = ["Linear"]
