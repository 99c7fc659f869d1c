"""Predictions of a training step's time and memory on a device or a mesh of them, and whether FP8 pays there.

What ``octavo plan`` and ``octavo info --measure`` answer, one file a question; flags are ``octavo/cli``'s:

| question | file |
|---|---|
| which model, input and optimizer do the flags name? | ``from_flags.py`` |
| which products has a step, and which bytes move between them? | ``work.py`` |
| which of those bytes do fused kernels not move? | ``parts.py`` |
| how fast is this device, or a published one? | ``rates.py`` |
| how long does a step take on it, in how much memory? | ``estimate.py`` |
| which steps does a plan compare? | ``steps.py`` |
| does FP8 pay, which layers are left out, which change would fit? | ``verdict.py``; its tables' columns: ``text.py`` |
| how long does a step take on a mesh (``--gpus``), which mesh is the best? | ``mesh/``, whose first table leads on |
"""

from octavo.cost.estimate import Estimate, estimate
from octavo.cost.rates import PUBLISHED, Rates, measure, rates_of

__all__ = ["PUBLISHED", "Estimate", "Rates", "estimate", "measure", "rates_of"]
