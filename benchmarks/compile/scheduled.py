"""Launches of Inductor on an H100, counted without one: its scheduler runs, and nothing is compiled or computed.

torch.compile traces on fake tensors of a CPU. The graphs are then moved to a fake GPU, lowered, and fused by the rules
of Inductor's scheduler for Triton, whose own count of each launch's bytes is read: buffers that a launch reads or
writes count once, those that stay inside of it don't.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor import scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernel
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
PROPERTIES = types.SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, warp_size=32, total_memory=80 * 2**30, gcnArchName="",
)  # fmt: skip


class Launch(NamedTuple):
    """A kernel, or an op that is opaque to the compiler.

    Attributes:
        ops: the names of the operations that it computes.
        modules: the names of the modules whose operations these are, forward and backward.
        bytes: what it reads and writes.
    """

    ops: frozenset[str]
    modules: frozenset[str]
    bytes: int


def _launch(nodes: Sequence[fx.Node], size: int) -> Launch:
    stacks = [node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {} for node in nodes]
    modules = frozenset([*stack.values()][-1][0] for stack in stacks if stack)
    return Launch(frozenset(map(_name_of, nodes)), modules, size)


def _name_of(node: fx.Node) -> str:
    op = node.args[0] if "auto_functionalized" in str(node.target) else node.target
    return str(op).removesuffix(".default")


def launches_as_traced(graph: fx.GraphModule, inputs: Any) -> list[Launch]:
    """Return one launch for each operation of a graph, as eager runs them; views are none."""
    launches = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or "getitem" in str(node.target) or _is_view(node):
            continue
        read = {one: one.meta["val"] for one in node.all_input_nodes}
        tensors = [one for one in tree_leaves([*read.values(), node.meta["val"]]) if isinstance(one, Tensor)]
        launches.append(_launch([node], sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
    return launches


def _is_view(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(one.alias_info is not None for one in schema.returns)
    return aliases or any(name in str(node.target) for name in ("_unsafe_view", "detach", "alias", "empty", "copy_"))


@contextlib.contextmanager
def _as_on_an_h100() -> Iterator[None]:
    """Let Inductor read an H100's properties where there is no GPU."""

    def properties(*device: Any) -> Any:
        return PROPERTIES

    interface = device_interface.CudaInterface
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_properties", properties),
            (torch.cuda, "current_device", lambda: 0),
            (interface, "get_device_properties", staticmethod(properties)),
            (interface, "get_compute_capability", staticmethod(lambda *device: 90)),
            (interface.Worker, "get_device_properties", staticmethod(properties)),
            (scheduler, "has_triton", lambda *device: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _move(graph: fx.GraphModule, mode: Any) -> None:
    """Put a graph's tensors on a GPU without memory."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return FakeTensor(mode, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"), GPU)

    def device(value: Any) -> Any:
        return GPU if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(values, device) for values in (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])


def _origins(kernel: Any) -> list[fx.Node]:
    """Return the operations that an Inductor node computes: of an opaque op itself, which names what it reads too."""
    origins = list(kernel.get_origins())
    if isinstance(kernel, ExternKernel):
        name = str(kernel.python_kernel_name or kernel.op_overload).removesuffix(".default").rpartition(".")[2]
        return [origin for origin in origins if name in _name_of(origin)] or origins
    return origins


def launches_of_inductor(graph: fx.GraphModule, inputs: Any) -> list[Launch]:
    """Return what Inductor launches for a graph of fake tensors, which this changes."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    mode = next(node.meta["val"].fake_mode for node in placeholders if isinstance(node.meta["val"], FakeTensor))
    with _as_on_an_h100(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        view_to_reshape(graph)
        post_grad_passes(graph, is_inference=False)
        with mode:
            _move(graph, mode)
        on_gpu = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        lowering = GraphLowering(graph, example_inputs=on_gpu, is_inference=False)
        with V.set_graph_handler(lowering):
            lowering.run(*on_gpu)
            lowering._update_scheduler()
            return [
                _launch([origin for part in node.get_nodes() for origin in _origins(part.node)], size)
                for node in lowering.scheduler.nodes
                if (size := node.get_read_write_buffers_sizes())
            ]


def launches(step: Callable[..., Tensor], *inputs: Tensor, by_inductor: bool) -> tuple[list[Launch], list[Launch]]:
    """Return what a step on fake tensors launches forward and backward, by Inductor or an operation after the other.

    Args:
        step: of the inputs, to one tensor.
        by_inductor: whether Inductor makes the launches; else each operation is one.
    """
    graphs: list[list[Launch]] = []

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        nodes: Any = graph.graph.output_node().args[0]
        outputs = [node if node is None else node.meta["val"] for node in nodes]
        graphs.append((launches_of_inductor if by_inductor else launches_as_traced)(graph, inputs))

        def run(arguments: list[Any]) -> Any:
            arguments.clear()
            return outputs

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def partition(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if not by_inductor:
            return default_partition(graph, inputs, **options)
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)

    torch.compiler.reset()
    table = {"decompositions": select_decomp_table()} if by_inductor else {}
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition, **table)
    result = torch.compile(step, backend=backend, fullgraph=True)(*inputs)
    result.backward(torch.empty_like(result))
    forward, backward = graphs
    return forward, backward
