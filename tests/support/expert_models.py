"""A mixture of experts with its router, of octavo's own experts or converted ones, and steps of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from tests.support.helpers import FP8_RECIPES

E, H, N, K, TOKENS = 4, 32, 48, 2, 24

RECIPES = FP8_RECIPES | {
    "short history": lambda: recipes.delayed(history_length=2),  # begins anew within a few steps
    "gw_hp": recipes.rowwise_with_gw_hp,
    "high_precision": recipes.high_precision,
}


class Stored(nn.Module):
    """Experts of transformers' structure: parameters [E, out, in], or [E, in, out] with biases."""

    def __init__(self, experts: int, intermediate: int, is_transposed: bool) -> None:
        super().__init__()
        self.has_gate = self.is_concatenated = True
        self.has_bias = self.is_transposed = is_transposed
        self.num_experts, self.act_fn = experts, nn.SiLU()
        for name, wide, narrow in (("gate_up_proj", 2 * intermediate, H), ("down_proj", H, intermediate)):
            shape = (experts, narrow, wide) if is_transposed else (experts, wide, narrow)
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.2))
            if is_transposed:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(experts, wide) * 0.2))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up


class GroupedExperts(nn.Module):
    """The structure of torchtitan's GroupedExperts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, N, H)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, H, N))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        rows = x[: int(num_tokens_per_expert.sum())].split(num_tokens_per_expert.int().tolist())
        experts = zip(rows, self.w1, self.w2, self.w3, strict=True)
        y = torch.cat([(nn.functional.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t() for x, w1, w2, w3 in experts])
        return torch.cat([y, y.new_zeros(len(x) - len(y), H)])


class Mixture(nn.Module):
    """A router, experts and a head; ``seen`` of expert numbers may leave some without tokens."""

    def __init__(self, kind: str, experts: int, intermediate: int, chosen: int | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(H, experts, bias=False)
        self.experts: Any = (
            octavo.nn.Experts(experts, H, intermediate, bias="bias" in kind)
            if kind.startswith("octavo")
            else Stored(experts, intermediate, kind == "stored transposed")
        )
        self.chosen = chosen  # of experts with tokens, the first so many

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x)[..., : self.chosen].flatten(0, -2).softmax(-1).topk(K)
        return x + self.experts(x, index, weights.to(x.dtype))


def built(kind: str, recipe: str, experts: int = E, storage: Any = None, **options: Any) -> Mixture:
    """Return the same model on every rank; ``storage``: of the experts' weights."""
    torch.manual_seed(0)
    net: Any = Mixture(kind, experts, N, **options)
    return octavo.convert(net, RECIPES[recipe](), lambda module, name: name != "router", storage)  # type: ignore[return-value]


def batch(step: int, rank: int, tokens: int = TOKENS) -> Tensor:
    """Return a rank's tokens of a step."""
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(1000 * step + rank))


def whole(tensor: Any) -> Tensor:
    """Return a sharded tensor's whole values."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


Loss = Callable[[nn.Module, int], Tensor]


def train(
    net: nn.Module,
    loss: Loss,
    average: Callable[[], None] = lambda: None,
    adamw: Any = torch.optim.AdamW,
    **options: Any,
) -> dict[str, Tensor]:
    """Return losses, gradients, weights and delayed state of some steps of AdamW."""
    optimizer, results = adamw(net.parameters(), lr=1e-2, **options), {}
    for step in range(3):
        value = loss(net, step)
        value.backward()
        average()
        results[f"loss {step}"] = value.detach()
        results |= {f"{name} grad {step}": whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    results |= {name: whole(value) for name, value in net.state_dict().items()}
    return results | octavo.nn.delayed_state_dict(net)


def off_by_maximum(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the tensors that differ, each with its largest difference by the largest value."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return {
        name: float((actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in expected.items()
        if not torch.equal(actual[name], value)
    }
