"""StoredWeight: a parameter that lives in FP8, with no wider copy.

It is a pair behind the facade of a high-precision matrix, to which gradients flow. Products read its codes as they are;
octavo's optimizers write codes and scale_inv together. Nothing else changes it, and nothing dequantises it silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedOpError
from octavo.formats import E4M3
from octavo.granularity import Granularity, PerBlock, PerTensor, granularity_of
from octavo.tensor.conversions import quantize
from octavo.tensor.scaled_tensor import ScaledTensor

aten = torch.ops.aten

GRANULARITIES = (PerTensor(), PerBlock(128, 128))


class StoredWeight(Tensor):
    """A weight [N, K] in E4M3 codes; its scale is a power of two, of the weight or of each block of 128 x 128.

    Args:
        q: float8_e4m3fn [N, K], contiguous.
        scale_inv: float32 [1, 1] or [ceil(N / 128), ceil(K / 128)].
        dtype: what it stands for, and its gradient's.

    Example:
        >>> import torch
        >>> weight = StoredWeight.cast(torch.eye(256, dtype=torch.bfloat16))
        >>> weight
        StoredWeight((256, 256), torch.bfloat16, PerTensor())
        >>> weight.dequantize().dtype
        torch.bfloat16
    """

    q: Tensor
    scale_inv: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> StoredWeight:
        """Make the facade."""
        self = torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)
        self.q, self.scale_inv = q, scale_inv
        return self

    @classmethod
    def cast(cls, weight: Tensor, granularity: Granularity = GRANULARITIES[0]) -> StoredWeight:
        """A high-precision matrix [N, K] in FP8.

        Raises:
            ValueError: for a granularity other than PerTensor() and PerBlock(128, 128), with the reason.
        """
        if granularity not in GRANULARITIES:
            raise ValueError(
                f"weights are stored per tensor or in blocks of 128 x 128, not {granularity}: only then does one set "
                "of codes serve the forward product and its gradient"
            )
        pair = quantize(weight.detach().contiguous(), E4M3, granularity, power_of_two=True)
        return cls(pair.qdata, pair.scale_inv.clone(), weight.dtype)

    @property
    def granularity(self) -> Granularity:
        """Which elements share a scale; PerTensor() where one block is all."""
        return GRANULARITIES[self.scale_inv.shape != (1, 1)]

    def pair(self) -> ScaledTensor:
        """The pair, over the same codes."""
        return ScaledTensor(self.q, self.scale_inv, self.granularity, self.dtype)

    def dequantize(self) -> Tensor:
        """Its values as a plain tensor; gradients flow through."""
        result: Tensor = _Dequantize.apply(self)
        return result

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["q", "scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any) -> Any:
        return StoredWeight(inner["q"], inner["scale_inv"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs, own = kwargs or {}, args[0]
        if func in _MOVES:
            return own._with(func)
        if func is aten.view.default and tuple(args[1]) == (-1,):  # DistributedDataParallel's broadcast
            return own.pair().dequantize().view(-1)
        if func is aten.view.default and tuple(args[1]) == tuple(own.shape):  # so torch asks for a gradient's node
            return own._with(aten.alias.default)
        if func is aten._to_copy.default:
            dtype = kwargs.pop("dtype", None) or own.dtype
            kwargs.pop("memory_format", None)
            return own._with(lambda part: func(part, **kwargs), dtype)
        if func is aten.clone.default:
            return own._with(torch.clone)
        if func is aten.copy_.default and isinstance(own, StoredWeight):
            return own._take(args[1])
        if func is aten.empty_like.default:  # of Module.to_empty
            device = kwargs.get("device", own.device)
            return own._with(lambda part: torch.empty_like(part, device=device), kwargs.get("dtype"))
        if func in _LIKE and isinstance(own, StoredWeight):  # a gradient of zeros, an optimizer's state
            options = {"dtype": own.dtype, "device": own.device} | kwargs
            options.pop("memory_format", None)
            return _LIKE[func](own.shape, **options)
        if func is aten.split.Tensor:
            raise UnsupportedOpError(
                "weights that are stored in FP8 can't be sharded by FSDP2 yet; use DDP, or shard "
                "high-precision weights, which octavo gathers in FP8"
            )
        raise UnsupportedOpError(
            f"{func} of a weight that is stored in FP8. Optimize it with octavo.optim.AdamW, which writes codes and "
            "scales together (torch.optim can't); read it with .dequantize(); or keep it in high precision with "
            "octavo.convert(..., weight_storage=None)"
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _with(self, move: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> StoredWeight:
        return StoredWeight(move(self.q), move(self.scale_inv), dtype or self.dtype)

    def _take(self, other: Tensor) -> StoredWeight:
        """Take another's values: stored ones as they are, plain ones cast."""
        if not isinstance(other, StoredWeight):
            if torch.equal(self.pair().dequantize(), other.to(self.device, self.dtype)):
                return self  # the scale stays, on which a master's remainder depends
            other = StoredWeight.cast(other.to(self.device), self.granularity)
        elif other.scale_inv.shape != self.scale_inv.shape or not has_powers_of_two(other.scale_inv):
            other = StoredWeight.cast(other.pair().dequantize(), self.granularity)
        self.q.view(torch.uint8).copy_(other.q.view(torch.uint8))
        self.scale_inv.copy_(other.scale_inv)
        torch.autograd.graph.increment_version([self.q])  # which does not happen by itself below autograd
        return self

    def share_memory_(self) -> StoredWeight:
        """Move both parts to shared memory."""
        self.q.share_memory_()
        self.scale_inv.share_memory_()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = self.q.detach().view(torch.uint8), self.scale_inv.detach()
        return rebuild_stored_weight, (*parts, self.dtype, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredWeight({tuple(self.shape)}, {self.dtype}, {self.granularity})"


def has_powers_of_two(scale_inv: Tensor) -> bool:
    """Whether all scales are powers of two, as a stored weight's must be."""
    return bool((torch.frexp(scale_inv)[0] == 0.5).all())


_MOVES = {aten.detach.default, aten.alias.default}
_LIKE = {
    aten.zeros_like.default: torch.zeros,
    aten.ones_like.default: torch.ones,
}


class _Dequantize(torch.autograd.Function):
    """A stored weight's values; the gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: StoredWeight) -> Tensor:
        return weight.pair().dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def rebuild_stored_weight(
    codes: Tensor, scale_inv: Tensor, dtype: torch.dtype, requires_grad: bool, is_parameter: bool
) -> StoredWeight:
    """Unpickle one."""
    weight = StoredWeight(codes.view(torch.float8_e4m3fn), scale_inv, dtype)
    if is_parameter:
        return torch.nn.Parameter(weight, requires_grad)  # type: ignore[return-value]
    return weight.requires_grad_(requires_grad)  # type: ignore[return-value]


torch.serialization.add_safe_globals([StoredWeight, rebuild_stored_weight, granularity_of])
