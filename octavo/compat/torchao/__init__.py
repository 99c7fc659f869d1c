"""torchao.float8's interface for training, over octavo.convert: import it in the place of ``torchao.float8``.

Modules, names, fields and defaults are torchao 0.18's; ``recipe_of`` makes an octavo.Recipe from a configuration.
docs/migrate.md lists the differences and the modules that are not here. Options that octavo can't follow raise
octavo.UnsupportedOptionError.
"""

from octavo.compat.torchao.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
    recipe_of,
)
from octavo.compat.torchao.float8_linear_utils import _auto_filter_for_recipe as _auto_filter_for_recipe
from octavo.compat.torchao.float8_linear_utils import convert_to_float8_training
from octavo.compat.torchao.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp
from octavo.compat.torchao.types import FP8Granularity

__all__ = ["CastConfig", "FP8Granularity", "Float8GemmConfig", "Float8LinearConfig", "Float8LinearRecipeName"]
__all__ += ["ScalingGranularity", "ScalingType"]
__all__ += ["convert_to_float8_training", "precompute_float8_dynamic_scale_for_fsdp", "recipe_of"]
