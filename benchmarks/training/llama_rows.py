"""The steps of llama_step by their names: what a name's words change of transformers' Llama in bf16.

A name is words joined by "+": first a recipe of octavo.recipes, or bf16, or torchao's, and then any of WORDS, such as
``delayed+fuse+head``. What is new becomes a row by a word here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import octavo
from benchmarks.common.models import OCTAVO, with_torchao
from octavo.tune.timing import DEVICE, ON_GPU, synchronize

WORDS = {
    "fuse": "octavo.convert(..., fuse=True)",
    "head": "the head's products in FP8 too",
    "moments": "octavo.optim.AdamW with moments in FP8",
    "state": "weights and moments in FP8, without a wider master",
    "block": "octavo.nn.TransformerBlock in place of transformers' blocks",
    "liger": "Liger-Kernel's norms, activation, rotary embedding and loss",
    "cudnn": "cuDNN's attention",
    "8b4": "four blocks of Llama 3 8B, one sequence of 8,192 tokens",
    "captured": "in a CUDA graph",
    "compiled": "by torch.compile",
}
TORCHAO = ("torchao_tensorwise", "torchao_rowwise")
FIRST = ("bf16", *OCTAVO, *TORCHAO)


class Sizes(NamedTuple):
    """A model and its step."""

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    context: int


LARGE = Sizes(2048, 8192, 16, 32, 16, 128256, 8, 2048)  # 1.53 billion parameters: its head is not tied
LLAMA_8B = Sizes(4096, 14336, 4, 32, 8, 128256, 1, 8192)
TOY = Sizes(32, 64, 1, 2, 1, 96, 2, 16)
WARM_UP = 3  # steps, in which delayed scales come to the host


class Variant(NamedTuple):
    """A step: its name, recipe and words."""

    name: str
    recipe: str
    words: frozenset[str]

    @classmethod
    def of(cls, name: str) -> Variant:
        """Return the variant of a name. ValueError names the word that is not known."""
        recipe, *words = name.split("+")
        unknown = [word for word in (recipe, *words) if word not in (FIRST if word is recipe else WORDS)]
        if unknown:
            known = f"a recipe ({', '.join(FIRST)}), then any of {', '.join(WORDS)}"
            raise ValueError(f"row {name!r}: {unknown[0]!r} is none of its words: {known}")
        return cls(name, recipe, frozenset(words))

    @property
    def mode(self) -> str:
        """The mode in which it runs: eager, captured or compiled."""
        return next((word for word in ("captured", "compiled") if word in self.words), "eager")

    @property
    def base(self) -> str:
        """The row that it is compared with: bf16 of its size, eager."""
        return "bf16+8b4" if "8b4" in self.words else "bf16"

    def sizes(self, toy: bool) -> Sizes:
        """Return the sizes of the model and the step."""
        return TOY if toy else LLAMA_8B if "8b4" in self.words else LARGE


def llama(sizes: Sizes) -> nn.Module:
    """Return the model in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.context,
        use_cache=False,
    )
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[no-any-return]


class _Block(nn.Module):
    """An octavo.nn.TransformerBlock called as transformers calls its own."""

    def __init__(self, sizes: Sizes, recipe: Any) -> None:
        super().__init__()
        self.block = octavo.nn.TransformerBlock(
            sizes.hidden, sizes.intermediate, sizes.heads, sizes.kv_heads, recipe=recipe, device=DEVICE,
            dtype=torch.bfloat16,
        )  # fmt: skip

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        cos, sin = (table[0, :, : table.shape[-1] // 2] for table in position_embeddings)
        return self.block(x, (cos, sin))  # type: ignore[no-any-return]


def without_head(module: nn.Module, name: str) -> bool:
    """Whether a layer is converted: all but the head."""
    return name != "lm_head"


def converted(model: Any, variant: Variant, sizes: Sizes) -> nn.Module:
    """Return the model with the variant's recipe, blocks and storage of weights."""
    if variant.recipe in TORCHAO:
        return with_torchao(model, variant.recipe.removeprefix("torchao_"))
    recipe = None if variant.recipe == "bf16" else getattr(octavo.recipes, variant.recipe)()
    if "block" in variant.words:
        block_recipe = octavo.recipes.high_precision() if recipe is None else recipe
        model.model.layers = nn.ModuleList(_Block(sizes, block_recipe) for _ in range(sizes.blocks))
    if recipe is None:
        return model  # type: ignore[no-any-return]
    select = (lambda module, name: True) if "head" in variant.words else without_head
    if "block" in variant.words and "head" not in variant.words:
        return model  # type: ignore[no-any-return]  # nothing is left to convert
    storage: Any = {"weight_storage": "fp8"} if "state" in variant.words else {}
    return octavo.convert(model, recipe, select, fuse="fuse" in variant.words, **storage)


def with_liger(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Give the model Liger's kernels; return what must be around its step, for other models here stay transformers'."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    plain = dict(vars(modeling_llama))
    apply_liger_kernel_to_llama(model=model)
    patched = {name: value for name, value in vars(modeling_llama).items() if plain.get(name) is not value}
    for name in patched:
        setattr(modeling_llama, name, plain[name])
    return functools.partial(mock.patch.multiple, modeling_llama, **patched)


def surroundings(variant: Variant, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the context of the variant's steps; raise ImportError without its library."""
    ways = [with_liger(model)] if "liger" in variant.words else []
    if "cudnn" in variant.words:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        ways.append(functools.partial(sdpa_kernel, backends, set_priority=True))

    @contextlib.contextmanager
    def around() -> Any:
        with contextlib.ExitStack() as stack:
            for way in ways:
                stack.enter_context(way())
            yield

    return around if ways else nullcontext


def optimizer_of(variant: Variant, model: nn.Module) -> torch.optim.Optimizer:
    """Return the variant's AdamW: torch's fused one, or octavo's with its state in FP8."""
    if variant.words & {"moments", "state"}:
        return octavo.optim.AdamW(model.parameters(), lr=1e-4, moments="fp8", master=None)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU, capturable=ON_GPU)


def make_step(variant: Variant, toy: bool) -> Callable[[], Tensor]:
    """Return a training step, warmed up; it returns its loss, which stays on the device."""
    torch.manual_seed(0)
    sizes = variant.sizes(toy)
    model = llama(sizes)
    around = surroundings(variant, model)
    model = converted(model, variant, sizes)
    optimizer = optimizer_of(variant, model)
    tokens = torch.randint(0, min(96, sizes.vocabulary), (sizes.batch, sizes.context), device=DEVICE)

    def loss_of(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    if variant.mode == "compiled":
        loss_of = torch.compile(loss_of, dynamic=False, backend="inductor" if ON_GPU else "aot_eager")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=variant.mode != "captured")
        with around():
            loss = loss_of(tokens)
            loss.backward()
        optimizer.step()
        return loss.detach()

    if variant.mode != "captured" or not ON_GPU:
        for _ in range(WARM_UP):
            step()
        return step
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    replay.keeps = model, optimizer, graph  # type: ignore[attr-defined]
    return replay


ORDER: Mapping[str, float] = {  # seconds that each may take, in the order of what they decide
    "bf16": 45,
    "delayed+fuse": 30,
    "profile": 20,
    "delayed+block": 25,
    "bf16+liger": 25,
    "delayed+fuse+cudnn": 25,
    "bf16+cudnn": 25,
    "delayed+fuse+head": 25,
    "delayed+fuse+moments": 25,
    "blockwise+fuse": 25,
    "rowwise+fuse": 25,
    "delayed+fuse+8b4": 40,
    "bf16+captured": 25,
    "delayed+fuse+captured": 25,
    "bf16+compiled": 60,
    "delayed+fuse+compiled": 60,
}
OTHERS = 30.0  # seconds of a row that is not in ORDER
