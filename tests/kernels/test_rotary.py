"""Rotary positions against float64, by the reference and Triton, which has the reference's bits; casts of gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from tests.kernels.conftest import Ops
from tests.support.casts import ALL, DTYPES, E4M3, E5M2, poisoned_memory, second, update_args
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits


def heads_of(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str) -> Tensor:
    batch, positions, heads, width = shape
    if layout == "attention's":  # [B, H, S, D] in memory
        return torch.randn(batch, heads, positions, width).to(dtype).transpose(1, 2)
    if layout == "columns":  # no head's elements lie beside each other
        return torch.randn(width, batch, positions, heads).to(dtype).permute(1, 2, 3, 0)
    return torch.randn(batch, positions, heads + 3, width).to(dtype)[:, :, 1 : 1 + heads]  # a part of a larger product


def turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return x turned in float64, by a matrix [D, D] for each position that multiplies its heads."""
    half = x.shape[-1] // 2
    matrix = torch.diag_embed(cos.double())
    one, other = torch.arange(half), torch.arange(half, 2 * half)
    matrix[..., one, other] = -sin.double()[..., :half]
    matrix[..., other, one] = sin.double()[..., half:]
    matrix = matrix.mT if inverse else matrix
    return (matrix.unsqueeze(2) @ x.double().unsqueeze(-1)).squeeze(-1)


def drawn_heads(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values, and the cosines and sines of angles whose halves differ."""
    batch, positions, width, dtype = (case[name] for name in ("batch", "positions", "width", "dtype"))
    queries, keys = case["heads"]
    q, k, v = (heads_of((batch, positions, count, width), dtype, case["layout"]) for count in (queries, keys, keys))
    angles = torch.randn(1 if case["shared"] else batch, positions, width // 2 if case["half"] else width) * 3
    return q, k, v, angles.cos().to(case["of_angles"]), angles.sin().to(case["of_angles"])


def check(ops: Ops, case: dict[str, Any]) -> None:
    """Check against float64, and against the reference bit for bit."""
    q, k, v, cos, sin = drawn_heads(case)
    counts, dtype = [x.shape[2] for x in (q, k, v)], q.dtype
    with poisoned_memory():
        result = ops.of("rotary")(q, k, v, cos, sin, case["inverse"])
    assert result.shape == (*q.shape[:2], sum(counts) * q.shape[3]) and result.dtype == dtype
    parts = result.unflatten(2, (-1, q.shape[3])).split(counts, 2)
    for x, part in zip((q, k), parts, strict=False):
        angles = (one.repeat(1, 1, 2) if case["half"] else one for one in (cos, sin))
        truth, sizes = turned(x, *angles, case["inverse"]), x.double().abs().amax(-1, keepdim=True)
        assert ((part.double() - truth).abs() <= torch.finfo(dtype).eps * truth.abs() + 2.0**-21 * sizes).all()
    assert same_bits(parts[2], v)
    assert same_bits(result, reference.KERNELS["rotary"](q, k, v, cos, sin, case["inverse"]))


OPTIONS: dict[str, Any] = {
    "positions": [0, 1, 37],
    "heads": [(1, 1), (4, 1), (9, 3)],
    "width": [2, 16, 34, 64],
    "dtype": DTYPES,
    "of_angles": DTYPES,
    "layout": ["slice", "attention's", "columns"],
    "shared": [False, True],
    "half": [False, True],
}


@each_pair(batch=[1, 3], **OPTIONS, inverse=[False, True])
def test_against_float64(case: dict[str, Any], ops: Ops) -> None:
    check(ops, case)


HOW = {
    "tensor": ((ALL, False, 0, True, 16, True), {}),
    "rows": (((1, -1), False, 1, False, 1, False), {}),
    "columns": (((-1, 1), True, 0, True, 16, True), {}),
    "rows and columns": (((1, -1), False, 0, True, 16, False), second(E4M3, (-1, 1), False, 0)),
    "blocks": (((1, 32), True, 0, True, 16, True), second(E4M3, (32, 1), True, 0)),
    "squares": (((64, 64), True, 0, True, 1, False), {}),
    "no kernel's": (((1, 24), False, 0, False, 1, False), {}),
}


def check_casts(ops: Ops, case: dict[str, Any], how: str) -> None:
    """Casts of heads' gradients have the bits of casts of the matrix that the op rotary makes of them."""
    q, *others_of_heads = drawn_heads(case)
    heads = dict(zip(("k", "v", "cos", "sin"), others_of_heads, strict=True))
    whole, dtype = reference.KERNELS["rotary"](q, *heads.values(), True).flatten(0, 1), q.dtype
    (tile, *others), named = HOW[how]
    calls = [("cast", (None, 2, E5M2, tile, *others))]
    if how == "tensor":
        calls.append(("cast", (torch.tensor([3.0, 5.0, 7.0]), 2, E5M2, tile, *others)))
        state = torch.tensor([3.0, 5.0, 7.0]), torch.rand(3, 4), torch.zeros(3, 3, dtype=torch.int32)
        amaxes = torch.full((1, 1), 2.0), torch.full((1, 1), 3.0)
        calls.append(("cast_and_commit", (*state, *amaxes, E5M2, False, 1, *update_args("max"), True, 16, True)))
    for op, arguments in calls:
        copies = [[one.clone() if isinstance(one, Tensor) else one for one in arguments] for _ in range(2)]
        with poisoned_memory():
            results = ops.of(op)(q, *copies[0], **named, **heads)
        expected = reference.KERNELS[op](whole, *copies[1], **named)
        # of delayed_before the scales: the other rows are numbers of passes
        tensors = [
            [one if one.dtype != torch.int32 else one[1] for one in copy if isinstance(one, Tensor)] for copy in copies
        ]
        for result, truth in zip((*results, *tensors[0]), (*expected, *tensors[1]), strict=True):
            if result.dtype == dtype and result.shape == whole.shape[1:]:  # a sum, in any order
                torch.testing.assert_close(result, truth, atol=1e-4 * q.shape[1], rtol=2 * torch.finfo(dtype).eps)
            else:
                assert result.stride() == truth.stride() and same_bits(result, truth), op


@each_pair(batch=[1, 2], how=[*HOW], **OPTIONS)
def test_casts_of_gradients(case: dict[str, Any], ops: Ops) -> None:
    check_casts(ops, case, case["how"])


def test_what_does_not_fit_is_refused(ops: Ops) -> None:
    q, angles = torch.ones(2, 5, 4, 8), torch.ones(1, 5, 8)
    odd = dict.fromkeys("qkv", torch.ones(2, 5, 4, 7)) | dict.fromkeys(("cos", "sin"), torch.ones(1, 5, 7))
    for change, said in (
        ({"k": torch.ones(2, 5, 4, 6)}, r"k \[2, 5, 4, 6\] of torch.float32 needs q's sizes"),
        ({"v": torch.ones(2, 5, 4, 8).half()}, "v .* of torch.float16"),
        ({"cos": torch.ones(3, 5, 8)}, r"cos \[3, 5, 8\] needs \[1 or 2, 5, 8 or 4\]"),
        ({"sin": torch.ones(1, 5, 4)}, r"sin of shape \[1, 5, 4\] needs \[1, 5, 8\]"),
        (odd, "heads of 7"),
    ):
        arguments = {"q": q, "k": q, "v": q, "cos": angles, "sin": angles, "inverse": False} | change
        with pytest.raises(ValueError, match=said):
            ops.of("rotary")(*arguments.values())
    heads = {"k": q, "v": q, "cos": angles, "sin": angles}
    commit = torch.ones(3), *torch.ones(2, 3, 3), None, None, E5M2, False, 0, *update_args("max"), 0
    for change, said in (
        ({"sin": None}, "k is cast with x, v, cos and sin: give all"),
        ({"v": q.half()}, "v .* of torch.float16 needs q's sizes"),
        ({"activation": "gelu"}, "activation is not taken where gradients of heads are cast"),
    ):
        for op, how in (("cast", (None, 2, E5M2, ALL, False, 0)), ("cast_and_commit", commit)):
            with pytest.raises(ValueError, match=said):
                ops.of(op)(q, *how, **heads | change)
    with pytest.raises(ValueError, match="gamma is not taken where gradients of heads are cast"):
        ops.of("cast")(q, None, 2, E5M2, ALL, False, 0, **heads, gamma=angles, kind="rms_norm")
