"""What ranks do for test_gradients.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from octavo.errors import UnsupportedOpError
from octavo.optim import AdamW
from octavo.optim.state import local
from octavo.tensor.stored_gradient import StoredGradient


def sharded_like(part: Tensor, param: nn.Parameter) -> DTensor:
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def round_by_hand(params: list[nn.Parameter], sums: list[Tensor], most: float) -> Tensor:
    """Round sums and clip them as the scales of pairs are: their norm."""
    pairs = [StoredGradient.cast(part) for part in sums]
    exact = [sharded_like(pair.dequantize(), param) for pair, param in zip(pairs, params, strict=True)]
    norm = nn.utils.get_total_norm(exact).full_tensor()
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for param, pair in zip(params, pairs, strict=True):
        pair.mul_(factor)
        param.grad = None
        param.grad_dtype = torch.float32
        param.grad = sharded_like(pair.dequantize(), param)
    return norm


def one_run(mesh: Any, dtype: torch.dtype, storage: str | None, micro: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 48), nn.Tanh(), nn.Linear(48, 370), nn.Linear(370, 5)).to(dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    optimizer = AdamW(params, lr=1e-2, skip_nonfinite=True, gradient_storage=storage)
    torch.manual_seed(1 + mesh.get_local_rank())
    found = {}

    def backward() -> None:
        model(torch.randn(8, 200, dtype=dtype)).float().square().mean().backward()

    for step in range(2):
        sums: list[Tensor] = []
        for number in range(micro):
            if storage is None:
                backward()
                parts = [local(param.grad).float() for param in params]
                sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
                optimizer.zero_grad()
            elif number < micro - 1:
                with optimizer.accumulate():
                    backward()
            else:
                backward()
        if storage is None:
            found[f"norm {step}"] = round_by_hand(params, sums, 0.05)
        else:
            assert all(isinstance(param.grad, DTensor) for param in params)
            assert all(isinstance(local(param.grad), StoredGradient) for param in params)
            found[f"norm {step}"] = nn.utils.clip_grad_norm_(params, 0.05).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.grad_dtype = param.dtype
    for name, param in model.named_parameters():
        found[name] = local(param).detach().clone()
        found |= {f"{name} {key}": local(value).clone() for key, value in optimizer.state[param].items()}
    return found


def sharded_equals(mesh: Any, dtype: torch.dtype) -> list[str]:
    """What differs between gradients in FP8, clipped by their global norm, and such by hand."""
    wrong = []
    for micro in (1, 2):
        ours, theirs = (one_run(mesh, dtype, storage, micro) for storage in ("fp8", None))
        wrong += [f"{micro} {name}" for name, x in ours.items() if not torch.equal(x, theirs[name])]
    return wrong + refused(mesh)


def refused(mesh: Any) -> list[str]:
    """Nothing, if a second backward outside accumulate() raises."""
    model = nn.Linear(30, 30)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), gradient_storage="fp8")
    model(torch.ones(2, 30)).sum().backward()
    try:
        model(torch.ones(2, 30)).sum().backward()
    except UnsupportedOpError as error:
        del optimizer
        return [] if "optimizer.accumulate()" in str(error) else [str(error)]
    return ["a second backward was taken"]
