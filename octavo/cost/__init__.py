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

Its words, of which a part is another thing than a fused module's ``norm`` or ``fc1``:

| word | meaning |
|---|---|
| step | forward, backward and the optimizer's update; an ``Estimate`` is one that is predicted, under a recipe |
| work | what a step computes, in high precision and on any device: sizes of products, and traffic (``Work``) |
| traffic | bytes that operations besides products read and write, and how many such operations there are |
| rate | what a device does in a second: bytes copied, FLOP of a kind of product (``Rates``) |
| part | operations of a transformer that a fused kernel replaces: a norm, a gated feed-forward, a loss (``PARTS``) |
| span | a stretch of a step for which the host's launches are held against the device: blocks' forward, and the rest |
| twin | a copy of the model without memory, which is converted, put into a phase and run in the model's place |
| verdict | the sentences below a plan's tables: whether FP8 pays, and what to change |
"""

from octavo.cost.estimate import Estimate, estimate
from octavo.cost.rates import PUBLISHED, Rates, measure, rates_of

__all__ = ["PUBLISHED", "Estimate", "Rates", "estimate", "measure", "rates_of"]
