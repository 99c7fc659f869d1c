"""A model as an ONNX file that stock runtimes run: standard operators, FP8 weights with their scale_inv.

The model computes as octavo evaluates it in float32: an operand of an FP8 product is a QuantizeLinear and a
DequantizeLinear, whose y_scale is scale_inv, and the product a Gemm of float32. Nothing is asked of the model: its
evaluation is traced by torch.export, weights' casts are computed (program.py), and octavo's ops become standard ones
(lowering.py) before torch.onnx translates the rest.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ExportError, MissingExtraError, first_line
from octavo.export.lowering import BLOCKS_FROM, decompositions
from octavo.export.program import delayed_argument, program_of
from octavo.export.runtime import in_float32
from octavo.private import pytree

OPSETS = range(19, 25)  # the first has float8's QuantizeLinear
LARGEST_FILE = 2**31 - 2**20  # protobuf takes less than 2 GiB in a file; beyond, weights lie beside it
_SMALL = 1024  # elements: below, a weight's dtype is no matter
_STORED = (torch.float32, torch.bfloat16, torch.float16)


def to_onnx(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    opset: int = BLOCKS_FROM,
    weights: torch.dtype | None = None,
) -> Path:
    """Write a model's evaluation as ONNX.

    Args:
        model: converted or built of octavo's modules; on any device and of any dtype, left as it is.
        example_inputs: positional arguments to trace it with. A size of 1 stays 1: give at least 2 where it may vary.
        path: of the file. Above 2 GiB its weights are in a second file beside it, of the same name and ".data".
        dynamic_shapes: which sizes may vary, as torch.export.export takes it; by default all that the model allows.
        opset: 19 to 24. Before 21 there are neither blocks nor Delayed.
        weights: dtype that weights outside of FP8 products are stored in, bfloat16, float16 or float32; by default the
            model's. All arithmetic is in float32.

    Returns:
        the path.

    Raises:
        ExportError: for a model that can't be traced, a recipe that the opset can't express, or a path that can't be
            written; nothing is written then.
        MissingExtraError: where onnx or onnxscript is not installed.

    Source:
        ONNX QuantizeLinear-21, https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html

    Example:
        >>> import torch, octavo
        >>> model = octavo.nn.LayerNormMLP(64, 128, "gelu", recipe=octavo.recipes.blockwise())
        >>> octavo.export.to_onnx(model, torch.randn(4, 64), "mlp.onnx")  # doctest: +SKIP
        PosixPath('mlp.onnx')
    """
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingExtraError(f"{package} is not installed: pip install octavo[onnx]") from error
    target = _checked_path(path)
    if opset not in OPSETS:
        raise ExportError(
            f"opset={opset}: use {OPSETS.start} to {OPSETS.stop - 1}; QuantizeLinear takes FP8 from 19 on"
        )
    if weights is not None and weights not in _STORED:
        raise ExportError(f"weights={weights}: use torch.float32, torch.bfloat16 or torch.float16")
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    stored = weights or _dtype_of(model)
    wide, inputs = _copy_in_float32(model), pytree.tree_map(in_float32, inputs)
    exported = _translated(wide, inputs, dynamic_shapes, opset)
    _store(exported, dict(wide.named_parameters()), stored)
    for node in exported.graph:  # Python's stack traces, which take as many bytes as a small model
        node.metadata_props.clear()
    _write(exported, target)
    return target


def _checked_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.is_dir():
        raise ExportError(f"{target} is a folder: name the file, such as {target / 'model.onnx'}")
    if not target.parent.is_dir():
        raise ExportError(f"the folder {target.parent} does not exist")
    if not os.access(target.parent, os.W_OK):
        raise ExportError(f"the folder {target.parent} can't be written")
    return target


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of most parameters."""
    count: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        count[parameter.dtype] += parameter.numel()
    dtype = max(count, key=count.__getitem__, default=torch.float32)
    return dtype if dtype in _STORED else torch.float32


def _copy_in_float32(model: nn.Module) -> nn.Module:
    """A copy on the CPU in float32."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ExportError("the model has weights on the meta device: load them first")
    try:
        wide = copy.deepcopy(model)
    except Exception as error:  # whatever the model's own attributes raise
        raise ExportError(f"{type(model).__name__} can't be copied: {first_line(error)}") from error
    return wide.cpu().float()


def _translated(model: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any, opset: int) -> Any:
    """The onnx_ir model."""
    with _quiet():
        program = program_of(model, inputs, dynamic_shapes)
        table = decompositions(opset)
        unknown = {
            str(node.target)
            for node in program.graph.nodes
            if getattr(node.target, "namespace", "") == "octavo" and node.target not in table
        }
        if opset < BLOCKS_FROM and any(delayed_argument(node) for node in program.graph.nodes):
            raise ExportError(
                f"a Delayed scale is a constant, which onnxruntime can't run in opset {opset}, as it moves the "
                "QuantizeLinear past operators that take no FP8 there: use opset=21, or octavo.recipes.dynamic()"
            )
        if unknown:
            why = (
                "experts have none"
                if any(".grouped_" in name for name in unknown)
                else "does the model call it itself?"
            )
            raise ExportError(f"no ONNX for {', '.join(sorted(unknown))}: {why}")
        try:
            program = program.run_decompositions(table)
            found = torch.onnx.export(program, (), dynamo=True, opset_version=opset, optimize=True, verbose=False)
        except ExportError as error:  # torch has added where in the graph it was
            raise ExportError(first_line(error)) from None
        except Exception as error:  # torch documents no type
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise ExportError(f"torch.onnx can't translate the model: {first_line(cause)}") from error
    assert found is not None
    return found.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences what torch.onnx says of optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _store(exported: Any, parameters: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Keep parameters in another dtype, and make float32 of them where they are used.

    What bfloat16 holds exactly, such as scales that are powers of two, is kept in it whatever it is.
    """
    import onnx_ir as ir
    from onnx_ir.tensor_adapters import TorchTensor

    graph = exported.graph
    for name, value in list(graph.initializers.items()):
        if value.dtype != ir.DataType.FLOAT or value.const_value.size < _SMALL or value.is_graph_output():
            continue
        wide = torch.from_numpy(value.const_value.numpy().copy())
        is_parameter = name in parameters or any(  # or is its transpose, computed by torch.onnx
            p.shape == wide.t().shape and torch.equal(p, wide.t())
            for p in parameters.values()
            if p.ndim == wide.ndim == 2
        )
        smaller = wide.to(dtype if is_parameter else torch.bfloat16)
        if smaller.dtype == wide.dtype or not (is_parameter or torch.equal(smaller.to(wide.dtype), wide)):
            continue
        stored = TorchTensor(smaller, name=name)
        kept = ir.Value(name=name, shape=value.shape, type=ir.TensorType(stored.dtype), const_value=stored)
        cast = ir.node("Cast", [kept], {"to": ir.DataType.FLOAT})
        cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, ir.DataType.FLOAT
        graph.initializers.pop(name)
        graph.insert_before(graph[0], cast)
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        graph.register_initializer(kept)


def _write(exported: Any, target: Path) -> None:
    """Write, check, and only then put in place."""
    import onnx
    import onnx_ir as ir

    size = sum(
        value.const_value.nbytes for value in exported.graph.initializers.values() if value.const_value is not None
    )
    external = f"{target.name}.data" if size > LARGEST_FILE else None
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            partial = Path(folder) / target.name
            ir.save(exported, partial, external_data=external)
            onnx.checker.check_model(str(partial), full_check=True)
            if external is not None:
                os.replace(partial.with_name(external), target.with_name(external))
            os.replace(partial, target)
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error.strerror or error}") from error
