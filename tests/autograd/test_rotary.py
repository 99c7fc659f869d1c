"""Rotary positions through autograd, beside transformers' formula in float64."""

import pytest
import torch

from octavo.autograd.rotary import gradient_of_heads, heads_apart, rotary

B, S, D, COUNTS = 2, 7, 8, (4, 2)


def by_formula(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values turned as transformers writes it."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    query, key, value = (part.transpose(1, 2) for part in qkv.unflatten(2, (-1, D)).split([*COUNTS, COUNTS[1]], 2))
    return [turned(query), turned(key), value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halves", [1, 2])
def test_results_and_gradients(dtype: torch.dtype, halves: int) -> None:
    qkv = torch.randn(B, S, 8 * D, dtype=dtype, requires_grad=True)
    angles = torch.randn(1, S, D // 2).repeat(1, 1, halves)
    results = rotary((qkv,), angles.cos(), angles.sin(), COUNTS)
    assert [part.shape for part in results] == [(B, 4, S, D), (B, 2, S, D), (B, 2, S, D)]
    grads = [torch.randn(part.shape, dtype=dtype) for part in results]
    (dqkv,) = torch.autograd.grad(results, qkv, grads)
    apart = rotary(heads_apart(qkv, COUNTS, D), angles.cos(), angles.sin(), COUNTS)
    assert all(map(torch.equal, apart, results)) and torch.equal(torch.autograd.grad(apart, qkv, grads)[0], dqkv)
    wide = qkv.detach().double().requires_grad_()
    whole = angles.double().repeat(1, 1, 3 - halves)
    exact = by_formula(wide, whole.cos(), whole.sin())
    (truth,) = torch.autograd.grad(exact, wide, [grad.double() for grad in grads])
    for one, other in zip((*results, dqkv), (*exact, truth), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_without_a_gradient_nothing_is_cast() -> None:
    assert gradient_of_heads([None, None, None], COUNTS, torch.ones(1, S, D), torch.zeros(1, S, D)) is None


def test_one_of_the_results_alone_has_a_gradient() -> None:
    qkv, angles = torch.randn(B, S, 8 * D, requires_grad=True), torch.randn(1, S, D)
    (dqkv,) = torch.autograd.grad(rotary((qkv,), angles.cos(), angles.sin(), COUNTS)[1].sum(), qkv)
    assert dqkv[..., 4 * D : 6 * D].abs().sum() > 0 and not dqkv[..., : 4 * D].any() and not dqkv[..., 6 * D :].any()
    with torch.no_grad():
        assert not rotary((qkv,), angles.cos(), angles.sin(), COUNTS)[0].requires_grad
