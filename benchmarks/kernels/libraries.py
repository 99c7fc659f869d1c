"""The libraries whose kernels are timed beside octavo's: torchao, Liger-Kernel, Transformer Engine. None need be there.

torchao's functions for one scale a tensor or a row are plain torch that it expects to be compiled, and are; its kernels
for 1x128 and 128x128 blocks are called as they are. Liger-Kernel has no casts: it writes in bf16 what would be cast.
Transformer Engine casts on the way, or in a second kernel, as it chooses itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.plain_torch import Work, compiled, transposed
from octavo.kernels.triton import cases
from octavo.kernels.triton.cases import E4M3, normal
from octavo.tune.timing import DEVICE, ON_GPU


def _as_they_are(*inputs: Tensor) -> tuple[Any, ...]:
    return inputs


class Rival(NamedTuple):
    """Another library's work on a case's inputs, which ``prepare`` converts untimed; ``note``: how the work differs."""

    run: Work
    prepare: Callable[..., tuple[Any, ...]] = _as_they_are
    note: str = ""

    def bound(self, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        """Return the work on these inputs, which are prepared by the first call."""
        ready = functools.cache(lambda: self.prepare(*inputs))
        return lambda: self.run(*ready())


def torchao(toy: bool) -> dict[str, Rival]:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.float8_utils import tensor_to_amax

    def scaled(x: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
        granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
        pair = hp_tensor_to_float8_dynamic(x, E4M3, LinearMMConfig(), scaling_granularity=granularity, axiswise_dim=dim)
        return pair._data, pair._scale

    def dynamic_transpose(x: Tensor) -> Any:
        data, scale = scaled(x)
        return data, transposed(data), scale

    def columns(x: Tensor) -> Any:
        data, scale = scaled(x, 0)
        return transposed(data), scale

    works: dict[str, Work] = {
        "amax": tensor_to_amax,
        "cast dynamic": lambda x: scaled(x),
        "cast+transpose dynamic": dynamic_transpose,
        "cast rows": lambda x: scaled(x, -1),
        "cast columns": columns,
        "cast rows + columns": lambda x: (*scaled(x, -1), *columns(x)),
    }
    rivals = {name: Rival(compiled(work, toy)) for name, work in works.items()}
    try:
        return rivals | _torchao_blocks()
    except Exception:  # a prototype: absent, or not for this Triton
        return rivals


def _torchao_blocks() -> dict[str, Rival]:
    from torchao.prototype.blockwise_fp8_training import kernels

    works: dict[str, Work] = {
        "cast 1x128": kernels.triton_fp8_blockwise_act_quant_lhs,
        "cast 1x128 + 128x1": lambda x: (
            *kernels.triton_fp8_blockwise_act_quant_lhs(x),
            *kernels.triton_fp8_blockwise_act_quant_transposed_lhs(x),
        ),
        "cast+transpose 128x128": lambda x: (
            *kernels.triton_fp8_blockwise_weight_quant_rhs(x),
            *kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(x),
        ),
    }
    return {name: Rival(work) for name, work in works.items()}


def _starting(prefix: str) -> Iterable[str]:
    """Return the cases of an activation or of a norm."""
    return (name for name in cases.FUSED if name.startswith(prefix))


def liger() -> dict[str, Rival]:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return LigerSiLUMulFunction.apply(gate, up)

    def rmsnorm(x: Tensor, gamma: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, gamma, cases.EPS)

    def layernorm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return LigerLayerNormFunction.apply(x, gamma, beta, cases.EPS)

    def halves(h: Tensor) -> tuple[Tensor, ...]:
        return tuple(half.contiguous() for half in h.chunk(2, 1))

    def swiglu_graph(dy: Tensor, h: Tensor) -> tuple[Any, ...]:
        return _graph(swiglu, dy, *halves(h))

    def rmsnorm_graph(dy: Tensor, x: Tensor, gamma: Tensor, *others: Tensor) -> tuple[Any, ...]:
        return _graph(rmsnorm, dy, x, gamma)

    def layernorm_graph(dy: Tensor, x: Tensor, gamma: Tensor, *others: Tensor) -> tuple[Any, ...]:
        return _graph(layernorm, dy, x, gamma, torch.zeros_like(gamma))

    bf16 = "liger writes bf16, no codes"
    rivals = {name: Rival(swiglu, halves, bf16) for name in _starting("swiglu +")}
    rivals |= {name: Rival(_backward, swiglu_graph, f"{bf16}, no sums") for name in _starting("swiglu gradient")}
    rivals |= {name: Rival(rmsnorm, note=bf16) for name in (*_starting("rmsnorm +"), *_starting("rmsnorm, y kept"))}
    rivals |= {name: Rival(layernorm, note=bf16) for name in _starting("layernorm +")}
    rivals["rmsnorm gradient + residual"] = Rival(_backward, rmsnorm_graph, "liger without the residual")
    rivals["layernorm gradient + residual"] = Rival(_backward, layernorm_graph, "liger without the residual")
    return rivals


def _graph(function: Work, dy: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
    """Return a function's output, ready for ``_backward``, and new tensors, since Liger writes gradients over them."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    return function(*leaves), leaves, dy.clone()


def _backward(y: Tensor, leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, dy, retain_graph=True)


def transformer_engine() -> dict[str, Rival]:
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    norms = _transformer_engine_norms(tex)
    delayed, dynamic, blocks = _quantizers(tex.DType.kFloat8E4M3)
    delayed_gradient, dynamic_gradient, _ = _quantizers(tex.DType.kFloat8E5M2)

    def transposed_after(function: Work) -> Work:
        """Return the function, then a transposition: gated activations with delayed scales are cast as they lie."""

        def run(*inputs: Any) -> Any:
            out = function(*inputs)
            out.update_usage(columnwise_usage=True)
            return out

        return run

    def cast_by(work: Work, quantizer: Callable[..., Any], note: str = "", **options: bool) -> Rival:
        return Rival(work, lambda *inputs: (*inputs, quantizer(**options)), note)

    as_it_lies, no_sums = {"columnwise": False}, "te without sums"
    return {
        "swiglu + cast+transpose delayed": cast_by(transposed_after(tex.swiglu), delayed, **as_it_lies),
        "swiglu + cast+transpose dynamic": cast_by(tex.swiglu, dynamic),
        "swiglu + 1x128 + 128x1": cast_by(tex.swiglu, blocks),
        "gelu_tanh + cast+transpose delayed": cast_by(tex.gelu, delayed),
        "swiglu gradient + cast+transpose+sum+commit": cast_by(
            transposed_after(tex.dswiglu), delayed_gradient, no_sums, **as_it_lies
        ),
        "swiglu gradient + cast+transpose+sum dynamic": cast_by(tex.dswiglu, dynamic_gradient, no_sums),
        "swiglu gradient + 1x128 + 128x1 + sum": cast_by(tex.dswiglu, blocks, no_sums),
        "gelu gradient + cast+transpose+sum+commit": cast_by(
            tex.dbias_dgelu, delayed_gradient, "te's gelu is gelu_tanh"
        ),
        "rmsnorm + cast+transpose delayed": cast_by(norms["rmsnorm"], delayed),
        "rmsnorm + cast+transpose dynamic": cast_by(norms["rmsnorm"], dynamic),
        "layernorm + cast+transpose delayed": cast_by(norms["layernorm"], delayed),
        "rmsnorm, y kept + cast+transpose delayed": cast_by(norms["rmsnorm, y kept"], delayed),
        "rmsnorm + 1x128 + 128x1": cast_by(norms["rmsnorm"], blocks),
        "rmsnorm gradient + residual": Rival(norms["rmsnorm gradient"]),
        "layernorm gradient + residual": Rival(norms["layernorm gradient"]),
    }


def _transformer_engine_norms(tex: Any) -> dict[str, Work]:
    """Return norms with their casts, and their gradients."""
    eps, wide = cases.EPS, tex.DType.kBFloat16

    def rmsnorm(x: Tensor, gamma: Tensor, quantizer: Any) -> Any:
        return tex.rmsnorm_fwd(x, gamma, eps, None, quantizer, wide, 0, False)

    def layernorm(x: Tensor, gamma: Tensor, beta: Tensor, quantizer: Any) -> Any:
        return tex.layernorm_fwd(x, gamma, beta, eps, None, quantizer, wide, 0, False)

    def kept(x: Tensor, gamma: Tensor, quantizer: Any) -> Any:
        y, *statistics = rmsnorm(x, gamma, None)
        return y, tex.quantize(y, quantizer), statistics

    def rmsnorm_gradient(dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor) -> Any:
        return tex.rmsnorm_bwd_add(dy, x, residual, rstd, gamma, 0, False)

    def layernorm_gradient(dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor) -> Any:
        dx, *parameters = tex.layernorm_bwd(dy, x, mean, rstd, gamma, 0, False)
        return dx.add_(residual), parameters

    return {
        "rmsnorm": rmsnorm,
        "layernorm": layernorm,
        "rmsnorm, y kept": kept,
        "rmsnorm gradient": rmsnorm_gradient,
        "layernorm gradient": layernorm_gradient,
    }


def _quantizers(dtype: Any) -> tuple[Callable[..., Any], ...]:
    """Return functions that make Transformer Engine's quantizers: delayed and dynamic scale, 1x128 blocks both ways."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    def delayed(columnwise: bool = True) -> Any:
        scale, amax = torch.full((1,), cases.FUSED_SCALE, device=DEVICE), torch.zeros(1, device=DEVICE)
        return Float8Quantizer(scale, amax, dtype, rowwise=True, columnwise=columnwise)

    def dynamic() -> Any:
        return Float8CurrentScalingQuantizer(dtype, DEVICE, rowwise=True, columnwise=True)

    def blocks() -> Any:
        return Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, block_scaling_dim=1)

    return delayed, dynamic, blocks


def torchao_product(name: str, shape: tuple[int, ...]) -> Callable[[], Tensor] | None:
    """Return torchao's own kernel for the product's tiles, if it has one: for blocks."""
    tiles = name.partition(",")[0]
    if not ON_GPU or tiles not in ("1x128 . 128x128", "1x128 . 1x128"):
        return None
    try:
        from torchao.prototype.blockwise_fp8_training import kernels
    except Exception:  # absent, or not for this Triton
        return None
    a, b = normal((shape[0], shape[2])), normal((shape[1], shape[2]))
    a_codes, a_scale = kernels.triton_fp8_blockwise_act_quant_lhs(a)
    if tiles == "1x128 . 128x128":
        b_codes, b_scale = kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(b)
        return lambda: kernels.triton_fp8_gemm_1x128_128x128(a_codes, b_codes, a_scale, b_scale, 128, torch.bfloat16)
    b_codes, b_scale = kernels.triton_fp8_blockwise_act_quant_rhs(b.t().contiguous())
    return lambda: kernels.triton_fp8_gemm_1x128_128x1(a_codes, b_codes, a_scale, b_scale, 128, torch.bfloat16)
