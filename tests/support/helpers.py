"""Functions that several tests share."""

import io
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo import Recipe, recipes
from octavo.granularity import NV, PADDING
from octavo.scaling.delayed import State

FP8_RECIPES = {name: getattr(recipes, name) for name in ("dynamic", "delayed", "rowwise", "blockwise", "mx")}


def every_layer(module: nn.Module, name: str) -> bool:
    """Return True: a ``select`` for models too small for the default one."""
    return True


def to_fp8(model: nn.Module, recipe: Recipe) -> nn.Module:
    return octavo.convert(model, recipe, select=every_layer)


def delayed_state(recipe: Recipe) -> State | None:
    """Return an empty delayed state, if the recipe has any."""
    return None if recipe.delayed is None else State.empty(recipe.delayed.history_length)


def observers(model: nn.Module) -> list[Any]:
    """Return the observers of octavo.inspect that a model's layers have."""
    return [module.fp8.observer for module in model.modules() if hasattr(module, "fp8") and module.fp8.observer]


def padded_as_on_gpu(device: torch.device, pads: bool = True, packs: bool = False) -> int:
    """Stand in for contraction_multiple where a test on a CPU lays codes as a GPU's products read them."""
    return NV[1] if packs else PADDING if pads else 1


def sqnr(result: Tensor, truth: Tensor) -> float:
    """Return the signal to quantisation noise of ``result``, in dB."""
    truth = truth.double()
    return 20 * torch.log10(truth.norm() / (result.double() - truth).norm()).item()


def saved_and_loaded(value: Any, weights_only: bool = True) -> Any:
    """Return what torch reads of a file that it wrote of this value."""
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Check that two dicts have the same names and, bit for bit, the same tensors."""
    assert a.keys() == b.keys()
    assert a
    for name in a:
        assert torch.equal(a[name], b[name]), name


def thread_pool(workers: int) -> ThreadPoolExecutor:
    """Return a pool of threads whose products have the bits of this thread's.

    ``torch.set_num_threads`` does not reach another thread's BLAS: until that thread asks for torch's own pool, its
    products run on ``OMP_NUM_THREADS`` threads, and MKL adds in an order that depends on their number.
    """
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))


class Written(TorchDispatchMode):
    """Counts the elements that torch's operations write, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(result, Tensor) and not func.is_view and "empty" not in name:
            self.elements[name] += result.numel()
        return result


class CountOps(TorchDispatchMode):
    """Counts the octavo ops called, by name; casts also by their source."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "octavo":
            named = kwargs or {}
            prefix = "grouped_" * ("offsets" in named) + "norm_" * ("gamma" in named)
            self.calls[f"{prefix}{func.overloadpacket.__name__}{'_two_scalings' * ('second_dtype' in named)}"] += 1
        return func(*args, **(kwargs or {}))

    @property
    def casts(self) -> int:
        return sum(count for name, count in self.calls.items() if name.startswith("cast"))


def stepped(optimizer: Any, loss: Tensor) -> float:
    """Take an optimizer's step by the gradients of a loss, and clear them; return the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def losses_on_rank(
    model: Any, optimizer: Any, loss_of: Callable[[int], Tensor], steps: int, average: bool = False
) -> list[float]:
    """Train for some steps; return this rank's losses. ``average``: gradients over ranks, as no library does it."""
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        for parameter in model.parameters() if average else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
