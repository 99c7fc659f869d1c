"""A model's FP8 weights as training computes with them, tensor by tensor: for a server that takes named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn

from octavo.export.layouts import LAYOUTS, Entry, entries
from octavo.tensor.sharded_weight import mp_policies


def iterate_fp8(
    model: nn.Module,
    layout: Literal["fine-grained", "compressed-tensors", "per-tensor"] = "fine-grained",
    fp8_only: bool = False,
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """The model's tensors one after the other, its FP8 layers' weights as the codes that their forward reads.

    A layer whose ``output`` product is in FP8 gives the operand of that product, bit for bit, without a second cast:
    the codes that are stored, kept or gathered, or those that a forward would cast now. In training mode
    (``model.train()``) these are training's, with a Delayed rule by the delayed scale; in evaluation they are
    evaluation's, by the weight's own amax, as ``to_safetensors`` writes them.

    Sharded weights (FSDP2) are gathered one at a time, in FP8 where training gathers them so: all ranks iterate, to
    the end, and all get each whole tensor. Nothing else is held. What a layer keeps (a weight that lives in FP8, one
    in high precision) is given as it is, not copied: the next optimizer step writes it.

    Args:
        model: a converted model, not under way in a forward or backward.
        layout: what the server reads; see the page on rollouts.
        fp8_only: leave out the tensors that are in no FP8 product (norms, embeddings, the head).

    Yields:
        (name, codes, scale_inv), by the names of ``model.state_dict()``, on the model's device, tied ones once unless
        FP8 layers share a weight, which each gives. Codes are float8_e4m3fn [N, K], scale_inv float32
        [ceil(N / 128), ceil(K / 128)] ("fine-grained"), [1] or [N, 1]
        ("compressed-tensors") or [1] ("per-tensor"). The value is codes * scale_inv. Of a tensor in high precision:
        (name, tensor, None). Of a transformers model whose experts are in FP8 names are those that its save_pretrained
        writes, and each expert's matrices come apart.

    Raises:
        ExportError: for a layer that the layout can't hold, with the recipe that fits; no layer in FP8; tensors that
            can't be sent. Before the first tensor.
        ValueError: for another ``layout``.

    Source:
        named tensors are what ``update_weights_from_tensor`` (SGLang) and ``load_weights`` (vLLM) take.

    Example:
        >>> import torch, octavo
        >>> model = octavo.nn.Linear(256, 512, recipe=octavo.recipes.blockwise())
        >>> [(name, tensor.dtype, None if scale is None else tuple(scale.shape))
        ...  for name, tensor, scale in octavo.export.iterate_fp8(model)]
        [('weight', torch.float8_e4m3fn, (4, 2)), ('bias', torch.float32, None)]
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: use {', '.join(map(repr, LAYOUTS))}")
    found, _, _ = entries(model, layout)
    return _tensors([entry for entry in found if entry.layer is not None or not fp8_only], mp_policies(model))


def _tensors(found: list[Entry], policies: dict[int, object]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    for entry in found:
        yield from entry.read(entry.layer is not None and entry.layer.training, policies)
