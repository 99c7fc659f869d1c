"""Small models that test_in_backward.py trains, with updates in backward and without."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.optim import AdamW, update_in_backward
from octavo.tensor.stored_weight import StoredWeight
from tests.support.helpers import every_layer

D = 64
WEIGHT = D * D * 2  # bytes of a bf16 gradient
HUGE = 1 << 30


def model_of(kind: str = "bf16") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(D, D) for _ in range(4)])
    model.to(torch.float32 if kind == "fp32" else torch.bfloat16)
    if kind.startswith("fp8"):
        recipe = octavo.recipes.blockwise() if "blocks" in kind else octavo.recipes.dynamic()
        octavo.convert(model, recipe, select=every_layer, weight_storage="fp8")
    if kind == "tied":
        model[3].weight = model[0].weight
    return model


def loss_of(model: nn.Sequential, reentrant: bool | None = None) -> Tensor:
    y = torch.randn(8, D).to(model[0].bias.dtype).requires_grad_(reentrant is True)
    for layer in model:
        y = layer(y) if reentrant is None else checkpoint(layer, y, use_reentrant=reentrant)
    return y.float().square().mean()


def train(model: nn.Sequential, optimizer: Any, steps: int = 3, micro: int = 1, reentrant: bool | None = None) -> None:
    handle = optimizer.in_backward
    for _ in range(steps):
        for number in range(micro):
            if handle is not None and number < micro - 1:
                with handle.accumulate():
                    loss_of(model, reentrant).backward()
            else:
                loss_of(model, reentrant).backward()
        optimizer.step()
        optimizer.zero_grad()


def run(kind: str, threshold: int | None, clip: Any = None, **options: Any) -> tuple[nn.Sequential, Any]:
    model = model_of(kind)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if threshold is not None:
        update_in_backward(optimizer, threshold, clip)
    train(model, optimizer, **options)
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        if isinstance(param, StoredWeight):
            found |= {name: param.qdata.view(torch.uint8), f"{name} scales": param.scale_inv}
        else:
            found[name] = param.detach()
        found |= {f"{name} {key}": value for key, value in optimizer.state[param].items()}
    return found


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    a, b = tensors_of(*one), tensors_of(*other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_close(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)  # norms are summed in another order
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                other[1].state[b][moment], one[1].state[a][moment], rtol=1e-4, atol=1e-9, msg=moment
            )
