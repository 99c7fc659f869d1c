"""Liger-Kernel before and after octavo.convert, in transformers' Trainer too; its kernels replaced by plain torch."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from tests.support.helpers import every_layer

transformers = pytest.importorskip("transformers")
liger = pytest.importorskip("liger_kernel.transformers", exc_type=ImportError)

from tests.integrations.test_transformers import fp8, trainer_of  # noqa: E402
from tests.support import tiny_models  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:`{name}:FutureWarning")  # Liger 0.8.5 calls transformers 5.2x by older names
    for name in ("past_key_values", "use_return_dict")
]
LIBRARY = transformers.models.llama.modeling_llama
RECIPE = recipes.mx()  # no scale is of two layers, so that layers that are computed as one have equal codes


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    high = x.float()
    return weight * (high * torch.rsqrt(high.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Norm(torch.autograd.Function):
    """As Liger's: backward writes the gradient of x over that of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, *unused: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.unused = eps, len(unused)
        return normed(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        leaves = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            grads = torch.autograd.grad(normed(*leaves, ctx.eps), leaves, grad)
        return grad.copy_(grads[0]), grads[1], *[None] * (1 + ctx.unused)


class GatedSilu(torch.autograd.Function):
    """As Liger's: backward writes the gradients over what was saved."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, *_: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        leaves = [saved.clone().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            grads = torch.autograd.grad(nn.functional.silu(leaves[0]) * leaves[1], leaves, grad)
        gate, up = (saved.copy_(value) for saved, value in zip(ctx.saved_tensors, grads, strict=True))
        return gate, up, None, None


def loss(x: Tensor, weight: Tensor, target: Tensor, *options: Any) -> tuple[Any, ...]:
    reduction = options[5]
    return nn.functional.cross_entropy((x @ weight.T).float(), target, reduction=reduction), None, None, None


def half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def turned(name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    assert name == "rope"
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch in the place of Liger's kernels; what Liger replaces in transformers is put back afterwards."""
    monkeypatch.setattr(liger.rms_norm, "LigerRMSNormFunction", Norm)
    monkeypatch.setattr(liger.swiglu, "LigerSiLUMulFunction", GatedSilu)
    monkeypatch.setattr(liger.rope, "dispatch", turned)
    monkeypatch.setattr(liger.functional, "LigerFusedLinearCrossEntropyFunction", SimpleNamespace(apply=loss))
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(LIBRARY, name, getattr(LIBRARY, name))
    monkeypatch.setattr(LIBRARY.LlamaForCausalLM, "forward", LIBRARY.LlamaForCausalLM.forward)


def converted(model: nn.Module, fuse: bool, select: Any = every_layer) -> nn.Module:
    return octavo.convert(model, RECIPE, select, fuse=fuse)


def of_a_step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    value = model.train()(**batch).loss
    value.backward()
    return value.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:octavo.convert fused nothing")
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("order", ["instance, convert", "convert, instance", "classes, convert"])
def test_values_are_those_with_the_head_in_high_precision_and_summary_says_what_runs(order: str, fuse: bool) -> None:
    original = tiny_models.build("llama")
    batch = torch.utils.data.default_collate(tiny_models.data("llama", 4))
    wanted, wanted_gradients = of_a_step(
        converted(copy.deepcopy(original), False, lambda _, name: name != "lm_head"), batch
    )
    if order == "classes, convert":  # before a model is made
        liger.apply_liger_kernel_to_llama()
        model = tiny_models.build("llama")
        model.load_state_dict(original.state_dict())
    else:
        model = copy.deepcopy(original)
    for word in order.split(", "):
        if word == "instance":
            liger.apply_liger_kernel_to_llama(model=model)
        elif word == "convert":
            converted(model, fuse)
    value, gradients = of_a_step(model, batch)
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - wanted_gradients[name]).norm() <= 1e-3 * wanted_gradients[name].norm()
    summary = octavo.summary(model, **batch)
    reasons = {row.name: row.reason for row in summary.modules if row.recipe is not None and row.reason}
    assert reasons == {"lm_head": "a forward of liger_kernel reads its weight without calling it"}
    attention = fuse and order == "convert, instance"
    assert {*summary.fused.values()} == ({"LlamaAttention"} if attention else set())
    assert ("loss_function" in summary.not_fused) is fuse


def test_nothing_of_ligers_is_fused_and_convert_says_why() -> None:
    liger.apply_liger_kernel_to_llama()
    with pytest.warns(UserWarning, match="fused nothing but the loss.*LigerSwiGLUMLP.*LigerRMSNorm"):
        model = converted(tiny_models.build("llama"), True)
    assert {name.rpartition(".")[2] for name in octavo.summary(model).not_fused} == {
        *("loss_function", "norm", "input_layernorm", "post_attention_layernorm", "mlp", "self_attn", "0", "1")
    }


def test_without_ligers_loss_the_head_stays_in_fp8() -> None:
    batch = torch.utils.data.default_collate(tiny_models.data("llama", 4))
    model = converted(tiny_models.build("llama"), False)
    liger.apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    assert not [row for row in octavo.summary(model, **batch).converted if row.reason]


def test_the_trainer_applies_liger_to_the_converted_model(tmp_path: Path) -> None:
    losses = []
    for use_liger_kernel, select in ((True, every_layer), (False, lambda _, name: name != "lm_head")):
        callback = fp8(RECIPE)
        callback.select = select
        trainer = trainer_of(tmp_path, "llama", [callback], use_liger_kernel=use_liger_kernel, save_strategy="no")
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3) and len(losses[0]) == 4
