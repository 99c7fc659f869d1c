"""Bytes that parts move: the operations of a block of transformers' Llama and of a ViT's, before and after fusing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import octavo
from octavo.autograd import casts
from octavo.cost.parts import PARTS, Moved, fused_parts
from octavo.cost.work import LinearWork
from octavo.private import FakeTensorMode

TOKENS, WIDTH, WIDE, HEADS = 4096, 2048, 5632, 32
NEITHER = ("::mm", "addmm", "matmul", "attention", "empty", "_unsafe_view", "clone")  # a CPU's layouts need the clones


class Ledger(TorchDispatchMode):
    """Bytes and operations that are no product, no attention and no view."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if written and not is_view and not any(word in name for word in NEITHER):
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.bytes += sum(x.nbytes for x in (*read, *written))
            self.casts += "octavo::cast" in name
            self.operations += 1
        return result


def ledgers(make: Callable[[], nn.Module], how: str) -> tuple[tuple[Ledger, Ledger], list[tuple[str, str, float]]]:
    """Count a module's forward and backward as it is ("plain"), converted or fused, and name the fused parts."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with mode:
            module = nn.ModuleDict({"part": make()})
            if how != "plain":
                with warnings.catch_warnings(action="ignore"):
                    octavo.convert(module, octavo.recipes.delayed(), lambda *_: True, fuse=how == "fused")
            x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
            keywords: dict[str, Any] = {}
            if hasattr(module["part"], "self_attn"):
                keywords["attention_mask"] = None
                positions = torch.arange(TOKENS)[None]
                keywords["position_embeddings"] = modeling_llama.LlamaRotaryEmbedding(config())(x, positions)
            for _ in range(2):  # in the first step layers that are computed as one come to share their delayed state
                module.zero_grad()
                x.grad = None
                forward, backward = Ledger(), Ledger()
                with forward:
                    y = module["part"](x, **keywords)
                with backward:
                    y.backward(torch.empty_like(y))
    finally:
        torch.set_default_dtype(torch.float32)
    sizes = {name: TOKENS * WIDTH for name, _ in module.named_modules()}
    layers = ((name, each) for name, each in module.named_modules() if isinstance(each, nn.Linear))
    linears = [LinearWork(name, TOKENS, each.in_features, each.out_features, True, True) for name, each in layers]
    return (forward, backward), [*fused_parts(module, SimpleNamespace(linears=linears, inputs=sizes, logits=0))]


def config() -> transformers.LlamaConfig:
    llama_config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=WIDE, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2
    )
    llama_config._attn_implementation = "sdpa"
    return llama_config


def of_block() -> dict[str, tuple[int, int]]:
    """Elements of each part of the Llama block, and how many of them it has."""
    x, keys = TOKENS * WIDTH, TOKENS * WIDTH // 2
    once = {"gated feed-forward": TOKENS * WIDE, "rotary embedding": x + keys}
    once |= dict.fromkeys(("gate and up", "query, key and value", "residual"), x)
    return {"norm": (x, 2), **{part: (size, 1) for part, size in once.items()}}


def test_parts_are_a_block_of_llama() -> None:
    (forward, backward), _ = ledgers(lambda: modeling_llama.LlamaDecoderLayer(config(), 0), "plain")
    parts = [(PARTS[name].plain, size, times) for name, (size, times) in of_block().items()]
    assert forward.bytes == pytest.approx(sum(times * size * moved.forward for moved, size, times in parts), rel=0.01)
    assert backward.bytes == pytest.approx(sum(times * size * moved.backward for moved, size, times in parts), rel=0.01)
    assert forward.operations == sum(times * moved.forward_launches for moved, _, times in parts)
    assert backward.operations == sum(times * moved.backward_launches for moved, _, times in parts)


@pytest.mark.parametrize("which", ["block", "CLIP"])
def test_what_fusing_changes(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where casts write codes in two layouts: a fused feed-forward's second are written in backward."""
    monkeypatch.setattr(casts, "needs_transposed_codes", lambda device: True)
    clip = transformers.CLIPTextConfig(hidden_size=WIDTH, intermediate_size=WIDE, hidden_act="gelu")
    builders: dict[str, Callable[[], nn.Module]] = {
        "block": lambda: modeling_llama.LlamaDecoderLayer(config(), 0),
        "CLIP": lambda: CLIPMLP(clip),
    }
    converted, nothing = ledgers(builders[which], "converted")
    fused, parts = ledgers(builders[which], "fused")
    sizes = {part: size for part, (size, _) in of_block().items()} | {"feed-forward": TOKENS * WIDE}
    sizes["values"] = TOKENS * WIDTH // 2
    assert not nothing
    assert all(size == sizes[part] for _, part, size in parts if part != "weights side by side")
    names = [*of_block(), "norm", "values", *["weights side by side"] * 2] if which == "block" else ["feed-forward"]
    assert sorted(part for _, part, _ in parts) == sorted(names)

    def change(field: str, size: float = 1.0) -> float:
        rows = [(PARTS[part].fused, PARTS[part].plain, each) for _, part, each in parts]
        value = Moved._fields.index(field)
        return sum((each if size else 1) * (less[value] - plain[value]) for less, plain, each in rows)

    for index, (name, codes) in enumerate({"forward": -TOKENS * WIDE, "backward": TOKENS * WIDE}.items()):
        assert fused[index].bytes - converted[index].bytes == pytest.approx(change(name) + codes, rel=0.01)
        assert fused[index].operations - converted[index].operations == change(f"{name}_launches", 0)


def test_norms_of_heads_copy_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused block of Qwen3 beside Llama's, which is the same without norms of queries and keys."""
    monkeypatch.setitem(globals(), "NEITHER", tuple(name for name in NEITHER if name != "clone"))
    sizes = {name: getattr(config(), name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    sizes |= {"num_key_value_heads": HEADS // 2, "head_dim": WIDTH // HEADS, "attn_implementation": "sdpa"}
    qwen3 = transformers.Qwen3Config(**sizes)
    without, _ = ledgers(lambda: modeling_llama.LlamaDecoderLayer(config(), 0), "fused")
    with_norms, parts = ledgers(lambda: modeling_qwen3.Qwen3DecoderLayer(qwen3, 0), "fused")
    queries_keys, values = TOKENS * WIDTH * 3 // 2, TOKENS * WIDTH // 2
    of_heads = {"norms of heads": queries_keys, "heads side by side": queries_keys + values}
    assert of_heads.items() <= {part: size for _, part, size in parts}.items()
    rows = [(PARTS[part].fused, size) for part, size in of_heads.items()]
    norm = PARTS["norm"].fused
    for index, field in enumerate(("forward", "backward")):
        moved = sum(size * getattr(row, field) for row, size in [*rows, (norm, queries_keys)])
        launches = sum(getattr(row, f"{field}_launches") for row in (*dict(rows), norm, norm))
        assert with_norms[index].bytes - without[index].bytes == pytest.approx(moved, rel=0.01)
        assert with_norms[index].operations - without[index].operations == launches


def test_the_loss_moves_what_its_operations_move() -> None:
    rows, vocabulary = 64, 512
    ledgers_ = Ledger(), Ledger()
    with FakeTensorMode():
        logits = torch.randn(rows, vocabulary, dtype=torch.bfloat16, requires_grad=True)
        with ledgers_[0]:
            loss = nn.functional.cross_entropy(logits.float(), torch.zeros(rows, dtype=torch.int64))
        with ledgers_[1]:
            loss.backward()
    moved = PARTS["loss"].plain
    assert ledgers_[0].bytes == pytest.approx(moved.forward * rows * vocabulary, rel=0.02)
    assert ledgers_[1].bytes == pytest.approx(moved.backward * rows * vocabulary, rel=0.02)
