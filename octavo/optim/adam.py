"""AdamW and Adam whose moments take one or two bytes, on weights of any master."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from octavo.kernels.reference.optimizer_step import AdamGroup
from octavo.optim.base import CompactOptimizer, check_not_negative, refuse
from octavo.optim.layout import fp8_shards
from octavo.optim.moment import Moment
from octavo.optim.state import Settings
from octavo.weights.stored import local_stored


def check_adam_options(lr: float | Tensor, betas: Any, eps: float, weight_decay: float) -> None:
    """Raise ValueError for options out of range."""
    check_not_negative(lr=float(lr), eps=eps, weight_decay=weight_decay)
    check_betas(betas)


def check_betas(betas: Any, weight: Tensor | None = None) -> None:
    """Raise ValueError for betas out of range, or that give no largest update for the scale of a weight in FP8."""
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas={betas!r} must be at least 0 and below 1, two numbers")
    if weight is not None and local_stored(weight) is not None and betas[0] * betas[0] > betas[1]:
        raise ValueError(
            f"betas={betas!r}: the largest update grows without end where beta1^2 > beta2, so it can give "
            "no scale; use a larger beta2, or float32 weights"
        )


def adam_group(group: dict[str, Any], maximize: bool, decoupled: bool, bounds_update: bool) -> AdamGroup:
    """Return a group's options in the form that the kernels take. Raise ValueError by ``check_betas``."""
    beta1, beta2, eps, decay = map(float, (*group["betas"], group["eps"], group["weight_decay"]))  # may be tensors
    if beta1 * beta1 > beta2:  # set since the weights were checked
        for weight in group["params"]:
            check_betas(group["betas"], weight)
    return AdamGroup(group["lr"], beta1, beta2, eps, decay, maximize, decoupled, bounds_update)


class Adam(CompactOptimizer):
    """torch.optim.Adam: weight decay is added to the gradient, so that it enters the moments. All else is AdamW's.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, moments, master, maximize, clip_update, seed: as AdamW's.
        skip_nonfinite, gradient_storage, foreach, capturable, differentiable, fused: the same.
        decoupled_weight_decay: torch's; must be off: with it torch's Adam is AdamW, which octavo has as a class.

    Raises:
        TypeError, ValueError: as AdamW.

    Example:
        >>> import torch, octavo
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> weight.grad = torch.ones(4)
        >>> octavo.optim.Adam([weight], lr=0.5, moments="fp32").step()
        >>> weight.detach()
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    names = ("exp_avg", "exp_avg_sq")
    also_pickled = ("_clip",)
    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        moments: str | tuple[Moment, Moment] = "fp8",
        master: str | None = "auto",
        maximize: bool = False,
        clip_update: bool | None = None,
        seed: int = 0,
        skip_nonfinite: bool = False,
        gradient_storage: str | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        refuse(amsgrad=amsgrad, foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused)
        refuse(decoupled_weight_decay=decoupled_weight_decay)
        check_adam_options(lr, betas, eps, weight_decay)
        self._clip = clip_update
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, moments, master, seed, skip_nonfinite, gradient_storage)

    def check_weight(self, weight: Tensor, group: dict[str, Any], settings: Settings) -> None:
        """Raise ValueError as other optimizers do, and by ``check_betas``."""
        check_betas(group["betas"], weight)
        super().check_weight(weight, group, settings)

    def bounds_update(self, settings: Settings, weights: Iterable[Tensor]) -> bool:
        """Whether updates will be clipped: ``clip_update``; None: if a weight is in FP8 or a moment not float32."""
        if self._clip is not None:
            return self._clip
        return any(moment.format != "fp32" for moment in settings.moments) or bool(fp8_shards(weights))

    def _options(self, group: dict[str, Any]) -> AdamGroup:
        return adam_group(group, maximize=group["maximize"], decoupled=self.decoupled, bounds_update=self.clip_update)


class AdamW(Adam):
    """torch.optim.AdamW, its moments in few bytes, and weights in bf16 with a master of the chosen size.

    With ``moments="fp32"`` and float32 weights its results are torch's, bit for bit (foreach=False on a CPU). An update
    is clipped to R_t, the largest that exact Adam can make (adam_max_update), which never changes exact Adam.

    Args:
        params: parameters, or groups; plain or sharded by rows, columns or both (FSDP2, tensor parallel).
        lr: a number or a tensor of one.
        betas, eps, weight_decay, maximize: as torch's.
        amsgrad, foreach, capturable, differentiable, fused: torch's; off, or ValueError says why.
        moments: "fp8" (2.06 bytes an element), "bf16" (4), "fp32" (8), or two Moments. A vector that is sharded has
            "fp32" moments in place of codes.
        master: "auto": float32 weights are their own master, bf16 ones have "split32". "split32": bf16 + 16 bits;
            "split24": bf16 + 8 bits; None: bf16 alone, rounded stochastically; "fp32": float32 weights only. Float32
            weights stay as they are under each of them. Weights that are stored in FP8 take "split16" (code + 8 bits;
            what "auto" means), "split24" (code + 16 bits), "fp16_scaled" (code + float16), "fp32" and None.
        clip_update: clip updates to R_t, the largest that exact Adam can make; by default where moments or master are
            not exact.
        seed: of stochastic rounding: its bits depend on the seed, the step, the weight's number in the optimizer and
            the element's index alone. Several optimizers (one a parameter, say) need another seed each.
        skip_nonfinite: change nothing in a step in which a gradient is inf or NaN; the host does not wait to find out.
            A GradScaler's finding is heeded without it.
        gradient_storage: "fp8": from its completion until the step a gradient is kept in E4M3 with a scale for each 128
            elements, 1.03 bytes an element; several backward passes a step take ``accumulate()``. None: as torch's.

    Raises:
        TypeError, ValueError: for arguments out of range, or weights of a dtype that the master is not for.

    Example:
        >>> import torch, octavo
        >>> layer = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
        >>> optimizer = octavo.optim.AdamW(layer.parameters(), lr=1e-2, moments="fp8", master="split24")
        >>> layer(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[layer.weight])[:3]
        ['exp_avg_codes', 'exp_avg_scale_inv', 'exp_avg_sq_codes']
    """

    decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        moments: str | tuple[Moment, Moment] = "fp8",
        master: str | None = "auto",
        maximize: bool = False,
        clip_update: bool | None = None,
        seed: int = 0,
        skip_nonfinite: bool = False,
        gradient_storage: str | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        refuse(amsgrad=amsgrad, foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused)
        options: dict[str, Any] = {"moments": moments, "master": master, "maximize": maximize, "seed": seed}
        options |= {"clip_update": clip_update, "skip_nonfinite": skip_nonfinite, "gradient_storage": gradient_storage}
        super().__init__(params, lr, betas, eps, weight_decay, **options)
