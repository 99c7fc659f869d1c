"""An exported model in onnxruntime on the CPU, held against octavo's own evaluation."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ExportError, MissingExtraError, first_line
from octavo.formats import HIGH_PRECISION
from octavo.private import pytree


def in_float32(leaf: Any) -> Any:
    """A tensor on the CPU, floats in float32; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    return leaf.float() if leaf.dtype in HIGH_PRECISION else leaf


def run_onnx(path: str | os.PathLike[str], *inputs: Tensor) -> list[Tensor]:
    """What onnxruntime's CPU provider makes of an ONNX file.

    Args:
        path: of the file.
        inputs: its inputs in order; bf16 and fp16 ones as float32.

    Raises:
        ExportError: where onnxruntime can't load or run it.
        MissingExtraError: where it is not installed.

    Example:
        >>> import torch, octavo
        >>> octavo.export.run_onnx("mlp.onnx", torch.randn(4, 64))[0].shape  # doctest: +SKIP
        torch.Size([4, 64])
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime is not installed: pip install octavo[onnx]") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it has to say comes with the exception
    arrays = [in_float32(x).numpy() for x in inputs]
    try:
        session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        found = session.run(None, dict(zip((i.name for i in session.get_inputs()), arrays, strict=True)))
    except Exception as error:  # its exceptions have no common base but this
        raise ExportError(f"onnxruntime can't run {os.fspath(path)}: {first_line(error)}") from error
    return [torch.from_numpy(array) for array in found]


def sqnr_in_onnxruntime(model: nn.Module, inputs: Tensor | tuple[Any, ...], path: str | os.PathLike[str]) -> float:
    """Signal to noise of an exported model's output in onnxruntime, against the model's evaluation in float32.

    Args:
        model: what was exported; left as it is.
        inputs: its positional arguments, any sizes that the file takes.
        path: of the file.

    Returns:
        dB, of all outputs together; inf where they are equal.

    Example:
        >>> import torch, octavo
        >>> octavo.export.sqnr_in_onnxruntime(model, torch.randn(4, 64), "mlp.onnx") > 40  # doctest: +SKIP
        True
    """
    arguments = pytree.tree_map(in_float32, inputs if isinstance(inputs, tuple) else (inputs,))
    with torch.no_grad():
        expected = pytree.tree_leaves(copy.deepcopy(model).cpu().float().eval()(*arguments))
    tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    found = run_onnx(path, *tensors)
    signal = sum(float(y.double().square().sum()) for y in expected)
    noise = sum(float((y.double() - z).square().sum()) for y, z in zip(expected, found, strict=True))
    if noise == 0.0:
        return float("inf")
    return float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))
