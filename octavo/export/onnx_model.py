"""A model as an ONNX file that stock runtimes run: standard operators, FP8 weights with their scale_inv.

The file computes octavo's evaluation in float32: an operand of an FP8 product is a QuantizeLinear and a
DequantizeLinear, whose y_scale is scale_inv, and the product is a Gemm of float32. The model needs no changes: its
evaluation is traced by torch.export, the casts of its weights are computed, octavo's ops become standard ones
(kernels/onnx.py), and torch.onnx translates the others. The file's results in onnxruntime are compared with octavo's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from octavo.errors import ExportError, first_line, require
from octavo.export.layouts import GATHER
from octavo.kernels.onnx import VERSION, decompositions
from octavo.private import pytree
from octavo.weights.fsdp2 import on_this_rank

_SCALE_ARGUMENT, _ROLE_ARGUMENT = 1, 2  # the indices of these arguments of a cast
OPSETS = range(VERSION, 25)
LARGEST_FILE = 2**31 - 2**20  # protobuf takes less than 2 GiB in a file; beyond, weights are in a second one
_SMALL = 1024  # elements: the dtype of a smaller weight does not matter
_STORED = (torch.float32, torch.bfloat16, torch.float16)


def in_float32(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, bf16 and fp16 ones in float32."""
    on_cpu = tensor.detach().cpu()
    return on_cpu.float() if on_cpu.dtype in (torch.bfloat16, torch.float16) else on_cpu


def run_onnx(path: str | os.PathLike[str], *inputs: Tensor) -> list[Tensor]:
    """Run an ONNX file with onnxruntime's CPU provider, and return its outputs.

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
    require("onnx", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its messages come with the exception
    arrays = [in_float32(x).numpy() for x in inputs]
    try:
        session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, dict(zip((i.name for i in session.get_inputs()), arrays, strict=True)))
    except Exception as error:  # the only common base of its exceptions
        raise ExportError(f"onnxruntime can't run {os.fspath(path)}: {first_line(error)}") from error
    return [torch.from_numpy(array) for array in outputs]


def sqnr_in_onnxruntime(model: nn.Module, inputs: Tensor | tuple[Any, ...], path: str | os.PathLike[str]) -> float:
    """Return an exported model's signal-to-noise ratio in onnxruntime, against the model's evaluation in float32.

    Args:
        model: the one that was exported; left as it is.
        inputs: its positional arguments, any sizes that the file takes.
        path: of the file.

    Returns:
        dB, of all outputs together; inf where they are equal.

    Example:
        >>> import torch, octavo
        >>> octavo.export.sqnr_in_onnxruntime(model, torch.randn(4, 64), "mlp.onnx") > 40  # doctest: +SKIP
        True
    """
    arguments = pytree.tree_map_only(Tensor, in_float32, inputs if isinstance(inputs, tuple) else (inputs,))
    with torch.no_grad():
        expected = pytree.tree_leaves(copy.deepcopy(model).cpu().float().eval()(*arguments))
    outputs = run_onnx(path, *(x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)))
    signal = sum(float(y.double().square().sum()) for y in expected)
    noise = sum(float((y.double() - z).square().sum()) for y, z in zip(expected, outputs, strict=True))
    if noise == 0.0:
        return float("inf")
    return float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64, device="cpu")))


def program_of(model: nn.Module, example_inputs: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """Trace a model that is on the CPU, and fold the casts of its weights; this sets it to evaluation mode.

    ``dynamic_shapes``: as torch.export.export takes them; None: every size may vary that the model allows to.
    ExportError if the model is sharded over ranks, or torch.export can't trace it.
    """
    for name, parameter in model.named_parameters():
        if on_this_rank(parameter) is not parameter:
            raise ExportError(f"{name} is sharded: {GATHER}")
    if dynamic_shapes is None:
        dynamic_shapes = pytree.tree_map(
            lambda leaf: dict.fromkeys(range(leaf.ndim), Dim.AUTO) if isinstance(leaf, Tensor) else None, example_inputs
        )
    with torch.no_grad():
        graph = _trace(model.eval(), example_inputs, dynamic_shapes).module()
        assert isinstance(graph, fx.GraphModule)
        _fold(graph)
        return _trace(graph, example_inputs, dynamic_shapes)


def _trace(model: nn.Module, example_inputs: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """Return torch.export's program of a model; raise ExportError if there is none."""
    try:
        return torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # torch documents no type: the model or the tracer may raise any
        raise ExportError(f"torch.export can't trace {type(model).__name__}: {first_line(error)}") from error


def _fold(module: fx.GraphModule) -> None:
    """Replace octavo's ops on weights by their results, and delayed casts without a history by dynamic ones."""
    module.graph.eliminate_dead_code()  # removes results that nothing reads
    value = _evaluator(module)
    for node in list(module.graph.nodes):
        if not _is_octavos(node):
            continue
        if (results := value(node)) is None:
            # a delayed cast without a history takes its input's own amax, in evaluation too
            if is_delayed_cast(node) and value(node.args[_SCALE_ARGUMENT])[node.args[_ROLE_ARGUMENT]] == 0.0:
                node.update_arg(_SCALE_ARGUMENT, None)
            continue
        for user in list(node.users):
            if user.target is operator.getitem:
                _replace(module, user, results[user.args[1]])
        if node.users:
            _replace(module, node, results)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()


def _is_octavos(node: fx.Node) -> bool:
    """Whether a node calls one of octavo's ops."""
    return getattr(node.target, "namespace", "") == "octavo"


def _evaluator(module: fx.GraphModule) -> Callable[[fx.Node], Any]:
    """Return a function from a node to its value, or to None if it depends on the inputs."""

    @functools.cache
    def value(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(module)
        values = {argument: value(argument) for argument in node.all_input_nodes}
        if node.op != "call_function" or not values or any(result is None for result in values.values()):
            return None
        arguments, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*arguments, **options)  # type: ignore[operator]

    return value


def is_delayed_cast(node: fx.Node) -> bool:
    """Whether a node is a cast by a delayed scale."""
    is_cast = _is_octavos(node) and node.target._opname == "cast"  # type: ignore[union-attr]
    return is_cast and isinstance(node.args[_SCALE_ARGUMENT], fx.Node)


def _replace(module: fx.GraphModule, node: fx.Node, result: Any) -> None:
    """Replace a node by a buffer with its result."""
    name = f"{node.name}_folded"
    if result.dtype == torch.float8_e8m0fnu:  # torch.onnx has no type for it (2.13)
        result = result.to(torch.float32)
    module.register_buffer(name, result.detach().clone(), persistent=True)
    with module.graph.inserting_before(node):
        buffer = module.graph.get_attr(name)
    node.replace_all_uses_with(buffer)
    module.graph.erase_node(node)


def to_onnx(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    opset: int = VERSION,
    weights: torch.dtype | None = None,
) -> Path:
    """Write a model's evaluation as ONNX.

    Args:
        model: converted or built of octavo's modules; on any device and of any dtype, left as it is.
        example_inputs: positional arguments to trace it with. A size of 1 stays 1: give at least 2 where it may vary.
        path: of the file. Above 2 GiB its weights are in a second file beside it, whose name ends with ".data".
        dynamic_shapes: which sizes may vary, as torch.export.export takes it; by default all that the model allows.
        opset: 21 to 24.
        weights: dtype that weights outside of FP8 products are stored in, bfloat16, float16 or float32; by default the
            model's. All arithmetic is in float32.

    Returns:
        the path.

    Raises:
        ExportError: for a model that can't be traced, or a path that can't be written; nothing is written then.
        MissingExtraError: where onnx or onnxscript is not installed.

    Source:
        ONNX QuantizeLinear-21, https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html

    Example:
        >>> import torch, octavo
        >>> model = octavo.nn.LayerNormMLP(64, 128, "gelu", recipe=octavo.recipes.blockwise())
        >>> octavo.export.to_onnx(model, torch.randn(4, 64), "mlp.onnx")  # doctest: +SKIP
        PosixPath('mlp.onnx')
    """
    require("onnx", "onnx", "onnxscript")
    target = _checked_path(path)
    if opset not in OPSETS:
        raise ExportError(f"opset={opset}: use {OPSETS.start} to {OPSETS.stop - 1}")
    if weights is not None and weights not in _STORED:
        raise ExportError(f"weights={weights}: use torch.float32, torch.bfloat16 or torch.float16")
    example_inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    float32_model = _copy_in_float32(model)
    inputs = pytree.tree_map_only(Tensor, in_float32, example_inputs)
    exported = _translate(float32_model, inputs, dynamic_shapes, opset)
    _store(exported, dict(float32_model.named_parameters()), weights or _dtype_of(model))
    for node in exported.graph:  # Python's stack traces, which take as many bytes as a small model
        node.metadata_props.clear()
    _write(exported, target)
    return target


def _checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path, if a file can be written there; else raise ExportError."""
    target = Path(path)
    if target.is_dir():
        raise ExportError(f"{target} is a folder: name the file, such as {target / 'model.onnx'}")
    if not target.parent.is_dir():
        raise ExportError(f"the folder {target.parent} does not exist")
    if not os.access(target.parent, os.W_OK):
        raise ExportError(f"the folder {target.parent} can't be written")
    return target


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of most parameters."""
    count: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        count[parameter.dtype] += parameter.numel()
    dtype = max(count, key=count.__getitem__, default=torch.float32)
    return dtype if dtype in _STORED else torch.float32


def _copy_in_float32(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU in float32."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ExportError("the model has weights on the meta device: load them first")
    try:
        wide = copy.deepcopy(model)
    except Exception as error:  # the model's own attributes may raise any
        raise ExportError(f"{type(model).__name__} can't be copied: {first_line(error)}") from error
    return wide.cpu().float()


def _translate(model: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any, opset: int) -> Any:
    """Return the model as an onnx_ir.Model."""
    with _quiet():
        program = program_of(model, inputs, dynamic_shapes)
        table = decompositions()
        unknown = {str(node.target) for node in program.graph.nodes if _is_octavos(node) and node.target not in table}
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ExportError(f"no ONNX for {names}: experts have none, and a model can't call octavo's ops itself")
        try:
            program = program.run_decompositions(table)
            onnx_program = torch.onnx.export(program, (), dynamo=True, opset_version=opset, verbose=False)
        except ExportError as error:  # torch has added the place in the graph to the message
            raise ExportError(first_line(error)) from None
        except Exception as error:  # torch documents no type
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise ExportError(f"torch.onnx can't translate the model: {first_line(cause)}") from error
    assert onnx_program is not None
    return onnx_program.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.onnx's messages about optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _store(exported: Any, parameters: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Store parameters in another dtype, and convert them to float32 where they are used.

    Any other tensor that bfloat16 holds exactly, such as scales that are powers of two, is stored in bfloat16.
    """
    import onnx_ir as ir
    from onnx_ir.tensor_adapters import TorchTensor

    graph = exported.graph
    for name, value in list(graph.initializers.items()):
        if value.dtype != ir.DataType.FLOAT or value.const_value.size < _SMALL or value.is_graph_output():
            continue
        wide = torch.from_numpy(value.const_value.numpy().copy())
        is_parameter = name in parameters or any(  # or the transpose of one, which torch.onnx has computed
            p.shape == wide.t().shape and torch.equal(p, wide.t())
            for p in parameters.values()
            if p.ndim == wide.ndim == 2
        )
        smaller = wide.to(dtype if is_parameter else torch.bfloat16)
        if smaller.dtype == wide.dtype or not (is_parameter or torch.equal(smaller.to(wide.dtype), wide)):
            continue
        stored = TorchTensor(smaller, name=name)
        stored_value = ir.Value(name=name, shape=value.shape, type=ir.TensorType(stored.dtype), const_value=stored)
        cast = ir.node("Cast", [stored_value], {"to": ir.DataType.FLOAT})
        cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, ir.DataType.FLOAT
        graph.initializers.pop(name)
        graph.insert_before(graph[0], cast)
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        graph.register_initializer(stored_value)


def _write(exported: Any, target: Path) -> None:
    """Write a file and check it before it gets its name."""
    import onnx
    import onnx_ir as ir

    constants = (value.const_value for value in exported.graph.initializers.values())
    size = sum(constant.nbytes for constant in constants if constant is not None)
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
