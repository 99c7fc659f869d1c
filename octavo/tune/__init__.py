"""Which tiles each Triton kernel is fastest with on this GPU: measured by ``octavo tune``, never inside a training."""
