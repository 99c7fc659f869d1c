"""Samples of what modules compute of one batch, and how far these move from a recorded step to the next."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.inspect.record import np
from octavo.inspect.weights import padded, strided
from octavo.weights.fsdp2 import on_this_rank


class OutputChanges(NamedTuple):
    """The distances by which inputs and outputs of modules moved since the run before.

    Attributes:
        sums: float64 [modules, 4], squared norms: of an input's change and of the input, and of the output's; 0 where a
            module did not run in both, or has tensors of another size.
        values: float32 [2 * modules, samples]: of inputs and outputs now, padded with zeros.
        lengths: how many of them are samples.
        modules: their names.
    """

    sums: Tensor
    values: Tensor
    lengths: list[int]
    modules: list[str]


class ModuleOutputs:
    """Samples the inputs and outputs of a model's modules while it runs forward, and compares them with the run before.

    Attributes:
        names: of the modules, in the order of ``named_modules``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.names = [*self._modules]
        self._samples: dict[tuple[str, int], Tensor] = {}  # of inputs (0) and outputs (1)
        self._last: tuple[list[int], Tensor] | None = None  # lengths and values of the samples of the run before

    def is_of(self, model: nn.Module) -> bool:
        """Return whether a model's modules are those that are sampled."""
        return self._modules == dict(model.named_modules())

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample what each module gets and returns in a block, of the first call of each."""

        def hook_of(name: str) -> Any:
            def sample(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                for place, values in enumerate(((*args, *kwargs.values()), output)):
                    if (name, place) not in self._samples and (first := _first_of(values)) is not None:
                        sampled = strided(on_this_rank(first)).to(torch.float32, copy=True)
                        self._samples[name, place] = sampled

            return sample

        self._samples = {}
        hooks = [m.register_forward_hook(hook_of(name), with_kwargs=True) for name, m in self._modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def moved(self, device: torch.device) -> OutputChanges:
        """Return by how much inputs and outputs changed since the block before, for the next one."""
        none = torch.zeros(0, dtype=torch.float32, device=device)
        samples = [self._samples.get(which, none) for which in itertools.product(self.names, range(2))]
        lengths, values = [*map(len, samples)], padded(samples)
        last, self._last, self._samples = self._last, (lengths, values), {}
        last_lengths, last_values = last or ([-1] * len(lengths), values)
        sums = torch.stack([(values - last_values).square().sum(1), values.square().sum(1)], 1).double()
        if last_lengths != lengths:
            is_alike = [one == other for one, other in zip(last_lengths, lengths, strict=True)]
            sums = sums.where(torch.tensor(is_alike, device=device)[:, None], 0.0)
        return OutputChanges(sums.view(-1, 4), values, lengths, self.names)

    def go_on(self, path: Path, device: torch.device) -> None:
        """Compare the next block with the samples that a file has, if these are of the same modules."""
        with contextlib.suppress(Exception), np.load(path) as arrays:  # whatever a damaged file makes NumPy raise
            if arrays["modules"].tolist() == self.names:
                self._last = arrays["lengths"].tolist(), torch.from_numpy(arrays["values"]).to(device)


def _first_of(values: Any) -> Tensor | None:
    """Return the first tensor of floating point numbers among arguments or outputs, without its graph."""
    if isinstance(values, Mapping):
        values = tuple(values.values())
    tensors = values if isinstance(values, tuple) else (values,)
    return next((x.detach() for x in tensors if isinstance(x, Tensor) and x.is_floating_point()), None)
