"""A training step of a transformer on a mesh of GPUs, by formulas; no constant was fitted to a measured step.

| question | file |
|---|---|
| which matrices has a block, and what does a rank get of them? | ``shapes.py`` |
| how many ranks of each kind divide the step, and what is in FP8? | ``settings.py`` |
| how much does a rank hold, in which memory? | ``rank.py`` |
| what travels between ranks, and when? | ``messages.py`` |
| how fast are links, and who says so? | ``servers.py`` |
| how long does a rank compute, what hides behind that, and how long is the step? | ``step.py`` |
| which meshes are tried, which change makes one better, and what does the plan say? | ``plan.py`` |
"""
