"""Gradients in E4M3 codes, of updates as the kernels take them."""

import torch
from torch import Tensor

from octavo import E4M3, PerBlock, quantize
from octavo.kernels.reference.optimizer_step import WeightUpdate


def put(update: WeightUpdate, g: Tensor) -> None:
    """Give a weight another gradient; a vector that is seen as [n, 1] has its blocks along it."""
    if update.gradient_scale_inv is not None:
        vector = update.gradient_scale_inv.shape[0] != g.shape[0]
        pair = quantize(g.view(1, -1) if vector else g, E4M3, PerBlock(1, 128))
        update.gradient_scale_inv.copy_(pair.scale_inv)
        g = pair.qdata.view(torch.uint8).view(g.shape)
    update.gradient.copy_(g)


def coded(update: WeightUpdate, vector: bool = False) -> WeightUpdate:
    """With a gradient in codes instead."""
    rows, cols = update.gradient.shape
    blocks = (1, -(-rows // 128)) if vector else (rows, -(-cols // 128))
    codes, scale_inv = torch.zeros(rows, cols, dtype=torch.uint8), torch.ones(blocks)
    found = update._replace(gradient=codes, gradient_scale_inv=scale_inv)
    put(found, torch.randn(rows, cols))
    return found
