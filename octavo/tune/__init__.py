"""Measure with which tiles each Triton kernel is fastest on this GPU: by ``octavo tune``, never inside a training."""
