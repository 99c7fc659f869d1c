import copy
import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import recipes
from octavo.nn.saved import SAVED_KINDS, predicted_by_kind, saved_by_kind
from tests.support.helpers import every_layer, to_fp8

T, K, N = 128, 64, 96


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(K, 3 * K, bias=False), nn.Linear(K, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.view(1, 1, -1, K) for one in self.qkv(x).chunk(3, dim=-1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).view(x.shape))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(32, K), nn.LayerNorm(K), Attention()
        self.mlp = nn.Sequential(nn.Linear(K, N, bias=False), nn.SiLU(), nn.Linear(N, K, bias=False))
        self.head = nn.Linear(K, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.attention(self.norm(self.embed(tokens)))
        return nn.functional.cross_entropy(self.head(x + self.mlp(x)), tokens)


def count(model: nn.Module) -> dict[str, int]:
    tokens = torch.zeros(T, dtype=torch.int64)
    bytes_by_kind = saved_by_kind(model, (tokens,))
    assert bytes_by_kind == predicted_by_kind(model, (tokens,))
    return bytes_by_kind


def test_each_kind_is_counted_where_it_is_saved_first():
    bytes_by_kind = count(Model())
    assert tuple(bytes_by_kind) == SAVED_KINDS
    assert bytes_by_kind["inputs of layers"] == 4 * T * (K + K + N + K)  # qkv's, fc1's, fc2's, the head's; not out's
    assert bytes_by_kind["attention"] == 4 * T * (3 * K + K + 1)  # with its output, and a number a row
    assert bytes_by_kind["norms"] == 4 * T * (K + 2)
    assert bytes_by_kind["activations"] == 4 * T * N
    assert bytes_by_kind["logits and loss"] == pytest.approx(4 * T * 32, rel=0.01)
    assert bytes_by_kind["other"] == bytes_by_kind["weights"] == 0


class InChunks(nn.Module):
    """A causal language model whose loss is computed with its head, in chunks of rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        return octavo.nn.linear_cross_entropy(hidden[:, :-1], self.model.lm_head, labels[:, 1:])


def test_a_fused_llama_saves_little_more_than_half_of_bf16s():
    pytest.importorskip("transformers")
    model, batch = importlib.import_module("benchmarks.training.saved_bytes").build("Llama")

    def saved(model):
        return sum(size for kind, size in predicted_by_kind(model, (), batch).items() if kind != "weights")

    bf16 = saved(model)
    for recipe in (recipes.dynamic(), recipes.delayed()):
        converted = octavo.convert(copy.deepcopy(model), recipe, every_layer, fuse=True)
        assert saved(converted) <= 0.56 * bf16 and saved(InChunks(converted)) <= 0.53 * bf16


def test_codes_are_told_from_weights_codes():
    model = Model()
    plain = count(model)
    bytes_by_kind = count(to_fp8(model, recipes.dynamic()))
    assert bytes_by_kind["weights"] == pytest.approx(K * 3 * K + K * K + 2 * K * N + 32 * K, rel=0.01)
    # a byte in place of four; and out's, which attention has in high precision
    assert bytes_by_kind["inputs of layers"] == pytest.approx(plain["inputs of layers"] / 4 + T * K, rel=0.01)
    assert {kind: bytes_by_kind[kind] for kind in ("attention", "norms", "activations")} == {
        kind: plain[kind] for kind in ("attention", "norms", "activations")
    }


def test_fused_modules_and_copies_in_another_dtype():
    mlp = octavo.nn.RMSNormMLP(K, N, bias=False, recipe=recipes.blockwise())
    bytes_by_kind = saved_by_kind(mlp, (torch.randn(T, K, requires_grad=True),))
    assert bytes_by_kind["inputs of layers"] == pytest.approx(T * (K + N), rel=0.05)
    assert bytes_by_kind["weights"] == pytest.approx(3 * K * N, rel=0.01)
    x = torch.randn(T, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        bytes_by_kind = saved_by_kind(nn.Sequential(nn.Linear(K, N)), (x,))
    assert (bytes_by_kind["weights"], bytes_by_kind["inputs of layers"]) == (2 * K * N, 2 * T * K)


@pytest.mark.parametrize("storage", [None, "fp8"])
def test_on_the_meta_device_it_saves_what_it_does_on_a_cpu(storage):
    def counted(device: str) -> dict[str, int]:
        with torch.device(device):
            model, tokens = Model().bfloat16(), torch.zeros(T, dtype=torch.int64)
        return predicted_by_kind(octavo.convert(model, recipes.blockwise(), every_layer, storage), (tokens,))

    assert counted("meta") == counted("cpu")


def test_modules_of_torchs_activations_are_told_apart():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.plus = nn.MultiheadAttention(K, 2, batch_first=True), nn.Softplus()

        def forward(self, x):
            return self.plus(self.heads(x, x, x, need_weights=False)[0])

    x = torch.randn(1, T, K, requires_grad=True)
    saved = saved_by_kind(Heads(), (x,))
    assert saved["activations"] == 4 * T * K and saved["attention"] > 3 * 4 * T * K


def test_a_model_that_fails_leaves_nothing_behind():
    with pytest.raises(RuntimeError):
        saved_by_kind(nn.Sequential(nn.Linear(K, N)), (torch.zeros(2, 2),))
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_sharded_model_has_no_plan(lone_mesh):
    model = fully_shard(nn.Sequential(nn.Linear(K, N)), mesh=lone_mesh)
    with pytest.raises(ValueError, match="example_inputs: make the plan before fully_shard"):
        predicted_by_kind(model, (torch.zeros(2, K),))
