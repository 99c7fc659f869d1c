"""Samples of what a model computes of one batch, forward and backward, and how far they move from step to step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.inspect.record import np
from octavo.inspect.weight_updates import padded, strided
from octavo.weights.fsdp2 import on_this_rank


class OutputChanges(NamedTuple):
    """The distances by which some tensors moved since the run before: modules' inputs and outputs, and gradients.

    Attributes:
        sums: float64 [tensors, 2]: squared norms of a tensor's change and of the tensor, of the input and the output of
            each module, then of each parameter's gradient; 0 where it is not of both runs, or has another size.
        values: float32 [tensors, samples]: of these tensors now, padded with zeros.
        lengths: how many of them are samples.
        modules, parameters: their names.
    """

    sums: Tensor
    values: Tensor
    lengths: list[int]
    modules: list[str]
    parameters: list[str]

    def arrays(self, sums: Any) -> dict[str, Any]:
        """Return a record's arrays of ``sums``, as NumPy's: "outputs" [modules, 4], "gradients" [parameters, 2]."""
        outputs, gradients = np.split(sums, [2 * len(self.modules)])
        return {"outputs": outputs.reshape(-1, 4), "gradients": gradients, **self.names()}

    def names(self) -> dict[str, Any]:
        """Return a record's arrays of names."""
        return {"modules": np.array(self.modules, dtype=str), "parameters": np.array(self.parameters, dtype=str)}


class ModuleOutputs:
    """Samples modules' inputs and outputs and parameters' gradients, and compares them with those of the run before.

    Attributes:
        modules, parameters: their names, in the order of ``named_modules`` and ``named_parameters``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, dict(model.named_modules())
        self.modules, self.parameters = [*self._modules], [name for name, _ in model.named_parameters()]
        self._samples: dict[tuple[str, str], Tensor] = {}  # by (module or parameter, "input", "output" or "gradient")
        self._last: tuple[list[int], Tensor] | None = None  # lengths and values of the samples of the run before

    def is_of(self, model: nn.Module) -> bool:
        """Return whether a model's modules are those that are sampled."""
        return self._modules == dict(model.named_modules())

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample what each module gets and returns in a block, of its first call, and the gradients at its end."""
        self._samples, register = {}, nn.Module.register_forward_hook
        with contextlib.ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.enter_context(register(module, partial(self._sample, name), with_kwargs=True))
            yield
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._samples[name, "gradient"] = _sampled(parameter.grad.detach())

    def _sample(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Sample the first tensor that a module gets, and the first that it returns, of its first call."""
        for role, values in (("input", (*args, *kwargs.values())), ("output", output)):
            if (name, role) not in self._samples and (first := _first_of(values)) is not None:
                self._samples[name, role] = _sampled(first)

    def changes(self, device: torch.device) -> OutputChanges:
        """Return by how much tensors changed since the block before, for the next one."""
        none = torch.zeros(0, dtype=torch.float32, device=device)
        tensors = [*itertools.product(self.modules, ("input", "output")), *((p, "gradient") for p in self.parameters)]
        samples = [self._samples.get(which, none) for which in tensors]
        lengths, values = [*map(len, samples)], padded(samples)
        last, self._last, self._samples = self._last, (lengths, values), {}
        last_lengths, last_values = last or ([-1] * len(lengths), values)
        sums = torch.stack([(values - last_values).square().sum(1), values.square().sum(1)], 1).double()
        if last_lengths != lengths:
            is_alike = [one == other for one, other in zip(last_lengths, lengths, strict=True)]
            sums = sums.where(torch.tensor(is_alike, device=device)[:, None], 0.0)
        return OutputChanges(sums, values, lengths, self.modules, self.parameters)

    def go_on(self, path: Path, device: torch.device) -> None:
        """Compare the next block with the samples that a file has, if these are of the same modules."""
        with contextlib.suppress(Exception), np.load(path) as arrays:  # whatever a damaged file makes NumPy raise
            if [arrays["modules"].tolist(), arrays["parameters"].tolist()] == [self.modules, self.parameters]:
                self._last = arrays["lengths"].tolist(), torch.from_numpy(arrays["values"]).to(device)


def _sampled(tensor: Tensor) -> Tensor:
    """Return a float32 copy of a tensor's sampled elements."""
    return strided(on_this_rank(tensor)).to(torch.float32, copy=True)


def _first_of(values: Any) -> Tensor | None:
    """Return the first tensor of floating point numbers among arguments or outputs, without its graph."""
    if isinstance(values, Mapping):
        values = tuple(values.values())
    tensors = values if isinstance(values, tuple) else (values,)
    return next((x.detach() for x in tensors if isinstance(x, Tensor) and x.is_floating_point()), None)
