"""The class of converted layers, for programs that ask ``isinstance(module, Float8Linear)``."""

from octavo.compat.torchao.config import Float8LinearConfig
from octavo.nn.linear import Linear as Float8Linear

__all__ = ["Float8Linear", "Float8LinearConfig"]
