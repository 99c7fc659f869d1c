"""Frees and gathers parameters as DeepSpeed ZeRO-3 and FSDP do, in one process, as far as octavo can tell.

Read in DeepSpeed 0.19.8, runtime/zero/partition_parameters.py and parameter_offload.py: a parameter has ``ds_id``; its
part of each rank is ``ds_tensor``. Around a module's forward the parameter gets the whole values as its ``.data``, and
afterwards ``.data`` of no elements; the same before the backward of the module's outputs. Here one rank has the whole,
a module is taken with all that it holds (as ``set_z3_leaf_modules`` does), and what backward has gathered stays until
the next forward. FSDP1 and FSDP2 resize storages, and mark modules (torch's _flat_param.py, _dynamo_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.private import preserve_version_counter


class _BeforeBackward(torch.autograd.Function):
    """The identity, which calls a function before the gradient goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grads[0], None


class Zero3:
    """Frees the parameters of these modules, which return one tensor each, but in their forward and backward.

    ``writes_back``: whether values are written to ``ds_tensor`` as they are freed; an engine's optimizer does that.
    """

    writes_back = True

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.parameters: list[Any] = []
        for module in modules:
            held = list(module.parameters())
            for parameter in held:
                parameter.ds_tensor, parameter.ds_shape = parameter.detach().flatten().clone(), parameter.shape  # type: ignore[attr-defined]
            self.parameters += held
            self.mark(module)
            self.free(held)
            module.register_forward_pre_hook(lambda *_, held=held: self.gather(held))
            module.register_forward_hook(lambda _, __, y, held=held: self._behind(y, held))

    def mark(self, module: nn.Module) -> None:
        """Set the attributes by which other libraries recognise the method."""
        for parameter in module.parameters():
            parameter.ds_id = id(parameter)  # type: ignore[attr-defined]

    def _behind(self, y: Tensor, held: list[Any]) -> Tensor:
        self.free(held)
        return _BeforeBackward.apply(y, lambda: self.gather(held))

    def gather(self, parameters: list[Any] | None = None) -> None:
        """Give these parameters, or all, their values."""
        for parameter in self.parameters if parameters is None else parameters:
            if parameter.numel() == 0:
                parameter.data = parameter.ds_tensor.clone().view(parameter.ds_shape)

    def update(self, parameter: Any) -> None:
        """Write the values to ``ds_tensor`` as an engine's optimizer does, through a buffer with other versions."""
        parameter.ds_tensor.data.copy_(parameter.data.flatten())

    @torch.no_grad()
    def free(self, parameters: list[Any]) -> None:
        """Keep the values in ``ds_tensor`` alone."""
        for parameter in parameters:
            if parameter.numel():
                if self.writes_back:
                    self.update(parameter)
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


class Fsdp(Zero3):
    """Frees as ZeRO-3 does, but a parameter stays, and its storage is resized."""

    def mark(self, module: nn.Module) -> None:
        for each in module.modules():
            each._is_fsdp_managed_module = True  # type: ignore[assignment]

    def gather(self, parameters: list[Any] | None = None) -> None:
        for parameter in self.parameters if parameters is None else parameters:
            storage = parameter.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(parameter.numel() * parameter.itemsize)
                with torch.no_grad(), preserve_version_counter(parameter):
                    parameter.copy_(parameter.ds_tensor.view(parameter.ds_shape))

    @torch.no_grad()
    def free(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            if parameter.untyped_storage().nbytes():
                self.update(parameter)
                parameter.untyped_storage().resize_(0)
