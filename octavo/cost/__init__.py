"""Predictions of a training step's time and memory on a device, and whether FP8 pays there.

| question | file |
|---|---|
| which products and bytes has a step? | ``work.py``; of a transformer's parts, plain and fused: ``parts.py`` |
| how fast is this device, or a published one? | ``rates.py`` |
| how long does a step take, in how much memory? | ``estimate.py`` |
| which model, input and optimizer do flags name? | ``from_flags.py``; the flags themselves: ``octavo/cli`` |
| which steps does ``octavo plan`` compare? | ``steps.py`` |
| what does it say of them, and why? | ``verdict.py``; of a device alone: ``pays.py`` |
| how long does a step take on a mesh? | ``mesh.py``, whose first table leads on |
| what does ``octavo plan --gpus`` say, and which meshes does it try? | ``mesh_plan.py``, ``mesh_search.py`` |
"""

from octavo.cost.estimate import Estimate, estimate
from octavo.cost.rates import PUBLISHED, Rates, measure, rates_of

__all__ = ["PUBLISHED", "Estimate", "Rates", "estimate", "measure", "rates_of"]
