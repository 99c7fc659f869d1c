"""A model's evaluation as a torch.export program whose weights are FP8 already."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from octavo.errors import ExportError, first_line
from octavo.export.layouts import GATHER
from octavo.private import OpOverload, pytree
from octavo.tensor.sharded_weight import on_this_rank

_DELAYED_SCALE = 1  # the index of that argument of a cast


def program_of(model: nn.Module, example_inputs: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """Put a model on the CPU into evaluation mode, trace it without gradients, and fold the casts of its weights.

    ``dynamic_shapes`` are as torch.export.export takes them; None: each size that the model leaves open.

    Raises:
        ExportError: where it is sharded over ranks, or torch.export can't trace it.
    """
    for name, parameter in model.named_parameters():
        if on_this_rank(parameter) is not parameter:
            raise ExportError(f"{name} is sharded: {GATHER}")
    if dynamic_shapes is None:
        dynamic_shapes = pytree.tree_map(
            lambda leaf: dict.fromkeys(range(leaf.ndim), Dim.AUTO) if isinstance(leaf, Tensor) else None, example_inputs
        )
    with torch.no_grad():
        graph = _traced(model.eval(), example_inputs, dynamic_shapes).module()
        assert isinstance(graph, fx.GraphModule)
        _fold(graph)
        return _traced(graph, example_inputs, dynamic_shapes)


def _traced(model: nn.Module, example_inputs: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    try:
        return torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # torch documents no type: whatever the model or the tracer raises
        raise ExportError(f"torch.export can't trace {type(model).__name__}: {first_line(error)}") from error


def _fold(module: fx.GraphModule) -> None:
    """Replace octavo's ops on weights by their results, and delayed casts without a history by dynamic ones."""
    module.graph.eliminate_dead_code()  # results that nothing reads
    value = _evaluator(module)
    for node in list(module.graph.nodes):
        if not _is_octavos(node):
            continue
        results = value(node)
        if results is None:
            # a delayed cast without a history takes its input's own amax, in evaluation too
            if (at := delayed_argument(node)) is not None and value(node.args[at])[node.args[at + 1]] == 0.0:
                node.update_arg(at, None)
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
    return isinstance(node.target, OpOverload) and node.target.namespace == "octavo"


def _evaluator(module: fx.GraphModule) -> Callable[[fx.Node], Any]:
    """A function that gives a node's value, or None where it depends on the inputs."""
    known: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in known:
            known[node] = None
            if node.op == "get_attr":
                known[node] = operator.attrgetter(str(node.target))(module)
            elif node.op == "call_function" and node.all_input_nodes:
                found = {argument: value(argument) for argument in node.all_input_nodes}
                if all(result is not None for result in found.values()):
                    arguments, options = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
                    known[node] = node.target(*arguments, **options)  # type: ignore[operator]
        return known[node]

    return value


def delayed_argument(node: fx.Node) -> int | None:
    """Which argument of a program's node is a delayed scale; None where it is no cast by one."""
    is_cast = _is_octavos(node) and node.target._opname == "cast"  # type: ignore[union-attr]
    return _DELAYED_SCALE if is_cast and isinstance(node.args[_DELAYED_SCALE], fx.Node) else None


def _replace(module: fx.GraphModule, node: fx.Node, result: Any) -> None:
    """A buffer in place of a node."""
    name = f"{node.name}_folded"
    module.register_buffer(name, result.detach().clone(), persistent=True)
    with module.graph.inserting_before(node):
        buffer = module.graph.get_attr(name)
    node.replace_all_uses_with(buffer)
    module.graph.erase_node(node)
