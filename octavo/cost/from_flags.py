"""The model, its input and its optimizer, made from the flags of ``octavo plan``; none of them takes memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo.cost.estimate import NamedParameters
from octavo.cost.rates import PlanError
from octavo.cost.work import blocks_of
from octavo.nn.saved import fakes_of
from octavo.optim import AdamW, Muon, update_in_backward

DEFAULT_TOKENS = 16384  # of a step


def from_hugging_face(path: Path) -> nn.Module:
    """Return a causal language model from a config.json, or a folder that has one, in bfloat16, without memory."""
    if not path.exists():  # transformers would look for a model of this name on its hub
        raise PlanError(f"{path} does not exist: give a config.json, or a folder that has one")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise PlanError(
            f"{path} is a Hugging Face configuration, which transformers reads: pip install transformers; or plan the "
            "GPT of octavo train, by --width, --layers, --heads"
        ) from error
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
        empty = [name for name, param in model.named_parameters() if param.numel() == 0]
        if empty or blocks_of(model) is None:
            raise ValueError(f"the model has no {f'elements in {empty[0]}' if empty else 'blocks'}")
        model.config.use_cache = False
        mode, twin, tokens = fakes_of(model, tokens_of(8, 8))
        with mode, torch.no_grad():
            twin(*tokens)
    except Exception as error:  # transformers and its models raise all kinds, as they check few of a file's values
        what = " ".join([f"{type(error).__name__}:", *str(error).strip().split("\n")[:2]])  # the second may say why
        what += " is unknown or missing" * isinstance(error, KeyError)
        raise PlanError(f"{path} is no configuration of a causal language model: {what}") from error
    return model


def context_of(model: nn.Module) -> int:
    """Return the longest sequence of a Hugging Face model, by its configuration."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr,operator]
    if not positions or positions < 0:
        raise PlanError("the configuration does not say how long a sequence is: give --context")
    return int(positions)


def optimizer_of(
    model: nn.Module, algorithm: str, moments: str, master: str | None, outstanding: int | None = None
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return a function from NamedParameters to the optimizer that these options name.

    Muon has the blocks' matrices, experts' too, as in ``octavo train``; AdamW has embeddings, convolutions, layers
    called ``router`` and biases.
    ``outstanding``: the bytes of gradients that wait for an update in backward; None: updates come after backward.
    """
    state_options: Any = {"moments": moments, "master": master}
    of_muon = muons_names(model) if algorithm == "muon" else None

    def optimizer(params: Iterable[nn.Parameter]) -> Optimizer:
        result = AdamW(params, **state_options) if of_muon is None else _muon(of_muon, params, **state_options)
        if outstanding is not None:
            update_in_backward(result, outstanding)
        return result

    return optimizer


def muons_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon updates, in the model and in copies of fewer blocks."""
    if (blocks := blocks_of(model)) is None:
        raise PlanError("--algorithm muon: the model has no list of blocks, whose matrices Muon would have")
    modules, others = model.named_modules(), (nn.Embedding, nn.Conv1d)
    of_adamw = {name for name, module in modules if isinstance(module, others) or name.endswith(".router")}
    matrices = [name for name, param in model.named_parameters() if param.ndim in (2, 3) and not name.endswith("bias")]
    return {n for n in matrices if n.startswith(f"{blocks}.") and n.rpartition(".")[0] not in of_adamw}


def _muon(names: set[str], params: Iterable[nn.Parameter], **state_options: Any) -> Muon:
    """Return Muon of the parameters of these names, which leaves others to AdamW."""
    assert isinstance(params, NamedParameters)
    groups: dict[str, list[nn.Parameter]] = {"muon": [], "adamw": []}
    for name, param in params.by_name.items():
        groups["muon" if name in names else "adamw"].append(param)
    return Muon([{"params": group, "algorithm": name} for name, group in groups.items()], **state_options)


def tokens_of(tokens: int | None, context: int) -> tuple[Tensor]:
    """Return a step's input, [sequences, context], without memory; by default 16,384 tokens, at least one sequence."""
    whole = max((DEFAULT_TOKENS if tokens is None else tokens) // context, 1) * context
    if tokens not in (None, whole):
        raise PlanError(f"--tokens {tokens} must be a multiple of the context, {context}, such as {whole}")
    return (torch.empty(whole // context, context, dtype=torch.int64, device="meta"),)
