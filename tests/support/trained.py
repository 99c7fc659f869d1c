"""Models that the tests of octavo's optimizers train, and functions that read their optimizers' state."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import E4M3, PerBlock, PerTensor, quantize
from octavo.optim import E4M4, AdamW, Moment
from octavo.optim.masters import PLAIN_MASTERS, MasterForm
from octavo.optim.state import as_fp32, matrix_of
from octavo.weights.stored import StoredWeight
from tests.support.helpers import every_layer

MASTERS = [name for name in PLAIN_MASTERS if name != "fp32"]  # of bf16 weights
ONE_SCALE = (
    Moment(E4M3, granularity=PerTensor(), rounding="stochastic"),
    Moment(E4M4, root=True, granularity=PerTensor(), rounding="stochastic", scale="previous"),
)
MOMENTS = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "one scale": ONE_SCALE}


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype))


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Take steps with random gradients, some far from zero."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = (torch.randn(p.shape, generator=generator) + 0.3).to(p.dtype)
        optimizer.step()


def moments_of(optimizer: AdamW, p: nn.Parameter) -> list[Tensor]:
    """Return a parameter's moments, both in float32."""
    names, state = ("exp_avg", "exp_avg_sq"), optimizer.state[p]
    return [as_fp32(name, moment, state).clone() for name, moment in zip(names, optimizer.moments, strict=True)]


def master_values(optimizer: AdamW, p: nn.Parameter) -> Tensor:
    """Return the values that the optimizer's master of a weight has."""
    form, scale_inv = MasterForm.of(p, optimizer.master), getattr(p, "scale_inv", None)
    master = form.for_kernel(matrix_of(p.detach()), optimizer.state[p], scale_inv)
    return master.read_all(master.weight).view(p.shape)


class Shaped(nn.Module):
    """A weight of four dimensions and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(5, 4, 3, 3) / 10)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x.view(-1, 4, 6, 6), self.kernel, padding=1).reshape(len(x), -1) * self.gain


def model_of(kind: str = "bf16", shaped: bool = False) -> nn.Sequential:
    """Return four layers; ``shaped``: of widths that are no multiple of 128, and one of other shapes."""
    torch.manual_seed(0)
    layers = [nn.Linear(144, 144) for _ in range(3)] if shaped else [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(*layers, *([Shaped()] if shaped else []))
    model.to(torch.float32 if kind == "fp32" else torch.bfloat16)
    if kind.startswith("fp8"):
        recipe = octavo.recipes.blockwise() if "blocks" in kind else octavo.recipes.dynamic()
        octavo.convert(model, recipe, select=every_layer, weight_storage="fp8")
    if kind == "tied":
        model[2].weight = model[0].weight
    return model


def loss_of(model: nn.Module, reentrant: bool | None = None) -> Tensor:
    """Return the loss on random input; ``reentrant``: the kind of the checkpoint that each layer is in, if any."""
    width, dtype = (getattr(next(model.parameters()), name) for name in ("shape", "dtype"))
    y = torch.randn(8, width[1]).to(dtype).requires_grad_(reentrant is True)
    for layer in [model] if reentrant is None else model:
        y = layer(y) if reentrant is None else checkpoint(layer, y, use_reentrant=reentrant)
    return y.float().square().mean()


def by_hand(param: nn.Parameter) -> None:
    """Round a gradient to the values that its pair reads, in float32."""
    grad = param.grad
    assert grad is not None
    matrix = grad.view(grad.shape[0], -1) if grad.ndim > 1 else grad.view(1, -1)
    pair = quantize(matrix.float(), E4M3, PerBlock(1, 128))
    param.grad = None
    param.grad_dtype = torch.float32
    param.grad = pair.dequantize().view(grad.shape)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def tensors_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    tensors = {}
    for name, param in model.named_parameters():
        if isinstance(param, StoredWeight):
            tensors |= {name: param.qdata.view(torch.uint8), f"{name} scales": param.scale_inv}
        else:
            tensors[name] = param.detach()
        tensors |= {f"{name} {key}": value for key, value in optimizer.state[param].items()}
    return tensors


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    a, b = tensors_of(*one), tensors_of(*other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
