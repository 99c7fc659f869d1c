"""Error of experts' three products in each recipe, beside torchao's MoE training, against float64.

The SQNR in dB of a GroupedLinear's output and gradients, in bf16: that of the expert where it is lowest. torchao 0.18's
own code computes what it can on a CPU: MXFP8 as a whole, by its emulated path. Its rowwise grouped product casts in
Triton and multiplies by torch._scaled_grouped_mm, and its blockwise one casts in Triton, which wants a GPU's driver
even where Triton interprets: of these two the casts are torchao's references in torch, to which its tests hold the
kernels, and the products exact.

Data: N(0, 1); "outliers": a hundredth of the features a hundred times as large; "experts": each expert's tokens twice
as large as those of the one before, and its gradients half as large.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import markdown, read
from octavo import recipes
from octavo.kernels.triton.agreement import sqnr
from octavo.nn import GroupedLinear

TAKES = "1 minute"
MEASURES = ("octavo/kernels/reference", "octavo/recipes.py", "octavo/autograd")

IN, OUT = 512, 768
SIZES = (128, 256, 0, 128, 384, 128, 256, 128)  # of groups; torchao's want a multiple of the block
PRODUCTS = ("output", "grad_input", "grad_weight")
OURS = {
    "dynamic": recipes.dynamic(),
    "delayed": recipes.delayed(),
    "rowwise": recipes.rowwise(power_of_two=True),
    "blockwise": recipes.blockwise(),
    "blockwise, any scale": recipes.blockwise(power_of_two=False),
    "mx": recipes.mx(),
}
Results = tuple[Tensor, ...]  # of the three products
Read = Callable[[Tensor], Tensor]


def data(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input, weight, gradient of the output, in bf16, and the groups' ends."""
    torch.manual_seed(0)
    x, weight, g = torch.randn(sum(SIZES), IN), torch.randn(len(SIZES), OUT, IN), torch.randn(sum(SIZES), OUT)
    if kind == "outliers":
        x[:, ::100] *= 100
        g[:, ::100] *= 100
    if kind == "experts":
        size = torch.repeat_interleave(2.0 ** torch.arange(len(SIZES)), torch.tensor(SIZES))[:, None]
        x, g = x * size, g / size
    return x.bfloat16(), weight.bfloat16(), g.bfloat16(), torch.tensor(SIZES).cumsum(0).to(torch.int32)


def products(x: Tensor, weight: Tensor, g: Tensor, activation: Read, matrix: Read) -> Results:
    """Return the three products in float64, of operands laid with the contraction last and read through a cast."""
    y, dx, dw = torch.zeros(len(x), OUT).double(), torch.zeros(len(x), IN).double(), torch.zeros(weight.shape).double()
    ends = [0, *torch.tensor(SIZES).cumsum(0).tolist()]
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            rows, xe, ge, we = slice(start, end), x[start:end], g[start:end], weight[expert]
            y[rows] = activation(xe) @ matrix(we).t()
            dx[rows] = activation(ge) @ matrix(we.t()).t()
            dw[expert] = activation(ge.t()) @ activation(xe.t()).t()
    return y, dx, dw


def ours(recipe: str, x: Tensor, weight: Tensor, g: Tensor, offsets: Tensor) -> Results:
    """Return the products of a GroupedLinear; of a Delayed one those of its second step."""
    layer = GroupedLinear(len(SIZES), IN, OUT, False, dtype=torch.bfloat16, recipe=OURS[recipe])
    with torch.no_grad():
        layer.weight.copy_(weight)
    for _ in range(2):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf, offsets)
        y.backward(g)
    assert leaf.grad is not None and layer.weight.grad is not None
    return y.detach(), leaf.grad, layer.weight.grad


def torchaos(recipe: str, x: Tensor, weight: Tensor, g: Tensor, offsets: Tensor) -> Results | None:
    """Return torchao's products; None where it has none of this kind."""
    from torchao.prototype.blockwise_fp8_training import kernels
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.moe_training.utils import torch_to_float8_per_group_rowwise
    from torchao.quantization.quantize_.common import KernelPreference

    def row(t: Tensor) -> Tensor:
        whole = torch.tensor([t.shape[1]], dtype=torch.int32)
        codes, scale = torch_to_float8_per_group_rowwise(t, whole, torch.float8_e4m3fn, round_scales_to_power_of_2=True)
        return codes.double() / scale[:, None].double()

    def block(t: Tensor) -> Tensor:
        codes, scale_inv = kernels.torch_blockwise_scale_act_quant_lhs(t.contiguous())
        return codes.double() * scale_inv.double().repeat_interleave(128, 1)

    def square(t: Tensor) -> Tensor:
        codes, scale_inv = kernels.torch_blockwise_scale_weight_quant(t.contiguous())
        return codes.double() * scale_inv.double().repeat_interleave(128, 0).repeat_interleave(128, 1)

    if recipe == "rowwise":
        return tuple(result.bfloat16() for result in products(x, weight, g, row, row))
    if recipe == "blockwise, any scale":
        return tuple(result.bfloat16() for result in products(x, weight, g, block, square))
    if recipe != "mx":
        return None
    leaf, parameter = x.clone().requires_grad_(), weight.clone().requires_grad_()
    emulated = KernelPreference.EMULATED
    y = _to_mxfp8_then_scaled_grouped_mm(leaf, parameter.mT, offsets, None, torch.bfloat16, emulated)
    y.backward(g)
    assert leaf.grad is not None and parameter.grad is not None
    return y.detach(), leaf.grad, parameter.grad


def lowest(result: Tensor, exact: Tensor) -> float:
    """Return the lowest SQNR of an expert that has rows."""
    ways = zip(*((t.split(SIZES) if t.ndim == 2 else t) for t in (result, exact)), SIZES, strict=True)
    return min(sqnr(mine, truth) for mine, truth, size in ways if size)


def accuracy_table() -> str:
    """Return the table of docs/study/mixture-of-experts.md: ours and torchao's, by data and recipe."""
    rows = []
    for row in read("grouped_accuracy"):
        cells = [f"{row[f'octavo_{p}']} ({row[f'torchao_{p}'] or '-'})" for p in PRODUCTS]
        rows.append([row["data"], row["recipe"], *cells])
    return markdown(("data", "recipe", *PRODUCTS), rows)


TABLES = {"accuracy": accuracy_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks grouped_accuracy", description=__doc__)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for kind in ("normal", "outliers", "experts"):
        inputs = data(kind)
        exact = products(*inputs[:3], Tensor.double, Tensor.double)
        for recipe in OURS:
            row: dict[str, object] = {"data": kind, "recipe": recipe}
            for who, results in (("octavo", ours(recipe, *inputs)), ("torchao", torchaos(recipe, *inputs))):
                for index, product in enumerate(PRODUCTS):
                    row[f"{who}_{product}"] = "" if results is None else f"{lowest(results[index], exact[index]):.2f}"
            rows.append(row)
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('grouped_accuracy', rows)}")
    return 0
