"""The private objects of torch that octavo uses: the name of each stands here, and nowhere else.

``from octavo.private import current_graph_task_id`` gives the object that NAMES says. Private attributes of torch's
instances are read and written by the functions below; those that all rooms may use are listed, with the use of all of
them, in tests/support/private_attributes.py. Sources were read of the releases in READ_IN. tests/test_private.py looks
each name up, so a release of torch that lacks one fails there; a user of such a release gets an OctavoError that says
which name is missing and what it is for.

Undocumented parts of Triton's launches are used in kernels/triton/launch.py and replay.py alone.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import OctavoError

READ_IN = "torch 2.11, 2.13 and 2.14"


class Name(NamedTuple):
    """A private name of torch.

    Attributes:
        path: the module and the object's name in it, or the class and its instances' attributes.
        use: what octavo does with it, and can't do without it.
        cuda: whether builds of torch for CPUs lack it; it is None there.
    """

    path: str
    use: str
    cuda: bool = False


NAMES = {
    # autograd
    "current_graph_task_id": Name("torch._C._current_graph_task_id", "moves delayed scales once a backward pass"),
    "will_engine_execute_node": Name("torch._C._will_engine_execute_node", "leaves out gradients nobody asked for"),
    "keeps_graph": Name("torch._C._autograd._get_current_graph_task_keep_graph", "casts a second pass as the first"),
    "execution_engine": Name("torch.autograd.Variable._execution_engine", "ends a backward pass that updates weights"),
    "preserve_version_counter": Name("torch.autograd._unsafe_preserve_version_counter", "refills gathered weights"),
    "top_hooks": Name("torch._C._autograd._top_saved_tensors_default_hooks", "keeps inputs of regions as pairs"),
    "untraced": Name("torch._compile._disable_dynamo", "leaves steps, regions and sums out of graphs"),
    "functorch_is_active": Name("torch._C._are_functorch_transforms_active", "refuses torch.func's transforms"),
    # tensors
    "modes_active": Name("torch._C._len_torch_dispatch_stack", "sends casts through the dispatcher for modes"),
    "tracing_state": Name("torch._C._get_tracing_state", "shows torch.jit.trace casts and products"),
    "has_storage": Name("torch._C._has_storage", "refuses gradients in batches (vmap)"),
    "no_modes": Name("torch.utils._python_dispatch._disable_current_modes", "compares delayed states unseen by modes"),
    "no_torch_function": Name("torch._C._disabled_torch_function_impl", "lets aten's rules decide for FP8 tensors"),
    "DisableTorchFunctionSubclass": Name("torch._C.DisableTorchFunctionSubclass", "makes views of sharded weights"),
    "swap_tensor_impl": Name("torch._C._swap_tensor_impl", "puts FP8 codes into a parameter that stays the same"),
    "assert_async": Name("torch._assert_async", "refuses an expert's number that is too large, without a wait"),
    "c10d_ops": Name("torch.ops._c10d_functional", "exchanges tensors in graphs and outside of them"),
    # optimizers
    "orthogonalize": Name("torch.optim._muon._zeropower_via_newtonschulz", "orthogonalises Muon's directions"),
    "adjust_muon_lr": Name("torch.optim._muon._adjust_lr", "adjusts Muon's learning rate to a matrix's shape"),
    # fake tensors, and modes that count operations
    "FakeTensor": Name("torch._subclasses.fake_tensor.FakeTensor", "predicts memory without data"),
    "FakeTensorMode": Name("torch._subclasses.fake_tensor.FakeTensorMode", "predicts memory and time without data"),
    "TorchDispatchMode": Name("torch.utils._python_dispatch.TorchDispatchMode", "counts and records operations"),
    "pytree": Name("torch.utils._pytree", "looks into nested arguments"),
    "cpu_attention": Name("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "counts attention's FLOPs"),
    "cpu_attention_backward": Name(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "counts attention's FLOPs"
    ),
    "fused_sdp_choice": Name("torch._fused_sdp_choice", "says which attention torch takes"),
    "sdp_priority_order": Name("torch._C._get_sdp_priority_order", "says in which order torch looks for attention"),
    "to_copy": Name("torch.ops.aten._to_copy", "tells copies of weights from what else is saved for backward"),
    "grouped_mm": Name("torch.ops.aten._grouped_mm", "counts the FLOPs of transformers' experts"),
    # modules
    "parameter_registration_hooks": Name(
        "torch.nn.modules.module._global_parameter_registration_hooks", "lets FSDP2 exchange parameters quickly"
    ),
    # ranks
    "resolve_process_group": Name("torch.distributed.distributed_c10d._resolve_process_group", "sums in FP8 by name"),
    "local_shape_and_offset": Name(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "numbers the experts of a rank"
    ),
    # devices
    "current_raw_stream": Name("torch._C._cuda_getCurrentRawStream", "keeps scratch memory by stream", cuda=True),
    "current_device": Name("torch._C._cuda_getDevice", "launches on the tensors' device", cuda=True),
    "empty_cuda": Name("torch._C._dynamo.guards._empty_strided_cuda", "allocates where an op is replayed"),
    "is_avx512_bf16_supported": Name("torch.cpu._is_avx512_bf16_supported", "finds fast bfloat16, in torch 2.11"),
    "keep_gpu_busy": Name("torch.cuda._sleep", "times kernels that take less than their launch"),
    "is_in_bad_fork": Name("torch.cuda._is_in_bad_fork", "asks no GPU in a forked process"),
}


def __getattr__(name: str) -> Any:
    """Return the object of one of NAMES, looked up once."""
    if (private_name := NAMES.get(name)) is None:
        raise AttributeError(f"octavo.private has no {name!r}")
    globals()[name] = value = None if private_name.cuda and torch.version.cuda is None else _look_up(private_name)
    return value


def _look_up(name: Name) -> Any:
    try:
        return pkgutil.resolve_name(name.path)
    except (ImportError, AttributeError) as error:
        raise _missing(name, error) from error


def _missing(name: Name, error: object) -> OctavoError:
    return OctavoError(
        f"torch {torch.__version__} has no {name.path} ({error}), without which octavo can't do this: {name.use}. "
        f"Read in {READ_IN}; use one of these releases, or an octavo made for yours"
    )


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor: sharded, or whole on each rank of a mesh."""
    # dynamo says that no tensor hasattr this, and with torch 2.11 can't ask hasattr of the type
    return getattr(type(tensor), "redistribute", None) is not None


def local_tensor(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, as DTensor holds it; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def set_local_tensor(tensor: Any, local: Tensor) -> None:
    """Give a DTensor another part on this rank."""
    tensor._local_tensor = local


def hooks_of(parameter: Any) -> tuple[Any, Any]:
    """Return a parameter's hooks: of its gradient, and after its gradient was accumulated."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def set_hooks(parameter: Any, hooks: tuple[Any, Any]) -> None:
    """Give a parameter the hooks that ``hooks_of`` returned."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def hooks_after_gradients(tensors: Iterable[Any]) -> list[dict[int, Any]] | None:
    """Return the hooks after tensors' gradients, a dict of each that has some; None within a torch.func transform."""
    this = sys.modules[__name__]  # a module's __getattr__ is asked for its attributes, not for names in its functions
    return None if this.functorch_is_active() else [held for held in (hooks_of(x)[1] for x in tensors) if held]


def running_backward() -> tuple[int, bool]:
    """Return the number of the backward pass that runs, and whether it keeps its graph for another one."""
    this = sys.modules[__name__]  # see hooks_after_gradients
    return this.current_graph_task_id(), this.keeps_graph()


def is_under_fsdp(module: object) -> bool:
    """Whether FSDP1 or FSDP2 manages the module's parameters: it frees them after forward."""
    return "_is_fsdp_managed_module" in module.__dict__


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are being computed."""
    return torch.autograd.forward_ad._current_level >= 0


def is_exporting() -> bool:
    """Whether torch.export traces. torch.compiler.is_exporting is True under torch.compile too, in torch 2.11."""
    return torch.compiler._is_exporting_flag


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder of one module at its first import, which calls a function with the module once it is executed."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        if spec is not None:
            # Not a loader around this one: the module's ``__loader__`` and ``__spec__`` stay as without us, by which
            # inspect and importlib.resources read it. The loader was made for this spec alone.
            execute = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                self.then(module)

            spec.loader.exec_module = execute_and_call
        return spec


def _after_import(name: str, then: Callable[[Any], None]) -> None:
    """Call ``then`` with a module, now or when somebody imports it."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        # not first: code that puts its own finder there for a while removes the first one afterwards
        finders, last = sys.meta_path, importlib.machinery.PathFinder
        finders.insert(finders.index(last) if last in finders else 0, _AfterImport(name, then))


def tell_torch_of_products(formulas: Mapping[Any, Callable[..., int]]) -> None:
    """Have torch count the FLOPs of ops, and not assume that computing them again in backward is free.

    ``formulas``: by op (an OpOverloadPacket), as ``torch.utils.flop_counter.register_flop_formula`` takes them. That
    module imports Triton, so it gets the formulas when somebody imports it; so does the partitioner get the ops for its
    list of dear ones, by which it splits a compiled step into forward and backward under an activation memory budget.
    """

    def register(counter: Any) -> None:
        for op, formula in formulas.items():
            counter.register_flop_formula(op)(formula)

    def list_as_dear(partitioners: Any) -> None:
        default = getattr(partitioners, "get_default_op_list", None)
        if default is None:  # an error here would be one of importing torch's compiler
            return

        @functools.wraps(default)
        def get_default_op_list() -> Any:
            ops = default()
            ops.compute_intensive_ops.update(formulas)
            return ops

        partitioners.get_default_op_list = get_default_op_list

    _after_import("torch.utils.flop_counter", register)
    _after_import("torch._functorch.partitioners", list_as_dear)


def let_inductor_call(calls: Mapping[str, str]) -> None:
    """Have the Python that Inductor writes call a function where it would call an op, by the names of both there.

    Nothing happens unless Inductor is imported and has a table of such functions, as from torch 2.13 on.
    """
    inductor = sys.modules.get("torch._inductor.codegen.custom_extern_kernel_codegen")
    if inductor is None or calls.keys() <= inductor.CUSTOM_EXTERN_KERNEL_CODEGEN.keys():
        return
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    class Line(ExternKernelAllocLine):
        def codegen(self, code: Any) -> None:
            node: Any = self.node
            arguments = node.codegen_args()
            defaults = {argument.name: argument.default_value for argument in node.op_overload._schema.arguments}
            for name, default in defaults.items():  # each argument left out saves a microsecond
                if isinstance(value := node.kwargs.get(name), type(default)) and value == default:
                    node.kwargs.pop(name, None)
            self.wrapper._generate_extern_kernel_alloc_helper(node, [*arguments, *node.codegen_kwargs()])

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        node.python_kernel_name = calls[node.python_kernel_name]
        writeline(Line(V.graph.wrapper_code, node))

    inductor.CUSTOM_EXTERN_KERNEL_CODEGEN.update(dict.fromkeys(calls, inductor.CustomCodegen(python=write)))


class FsdpParam:
    """One parameter of a module that ``fully_shard`` was applied to: torch's FSDPParam.

    Attributes:
        module: the module that ``fully_shard`` was applied to.
        owner: the module whose parameter it is.
        sharded: the DTensor.
        shard: this rank's part, as FSDP2 will gather it.
        mesh_dim: the dimension of the mesh that it is sharded over.
        mp_policy: the mixed-precision policy of its group.
    """

    def __init__(self, module: Any, param: Any) -> None:
        self.module, self._param = module, param
        self.owner: nn.Module = param._module_info.module
        self.sharded, self.shard = param.sharded_param, param._sharded_local_tensor
        self.mesh_dim, self.mp_policy = param.mesh_info.mesh.ndim - 1, param.mp_policy

    @property
    def was_gathered(self) -> bool:
        """Whether FSDP2 has gathered the parameter before, and holds the gathered tensors."""
        return hasattr(self._param, "_unsharded_param")

    def forget_gathered(self) -> None:
        """Make FSDP2 gather the parameter anew, into new tensors."""
        self.module.reshard()
        self._param.all_gather_outputs, self._param._unsharded_inner_tensors = [], []
        del self._param._unsharded_param

    def take_shard(self) -> None:
        """Make FSDP2 take the shard that the DTensor has now."""
        # before the first forward this is a plain tensor, and torch would ask for its storage, which a facade lacks
        self._param._sharded_param_data = local_tensor(self.sharded)
        self._param.reset_sharded_param()


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was applied to, outer ones first."""
    if "torch.distributed.fsdp" not in sys.modules:  # it takes long to import
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fsdp_params(model: nn.Module) -> Iterator[FsdpParam]:
    """Yield each FSDPParam of the modules that ``fully_shard`` was applied to, once, also if several modules share it.

    Raises:
        OctavoError: if this torch no longer has FSDP2's attributes.
    """
    params = (param for module in fsdp_modules(model) for param in _params_of(module))
    yield from {id(param.sharded): param for param in params}.values()


def _params_of(module: Any) -> list[FsdpParam]:
    try:
        state = module._get_fsdp_state()
        if (groups := getattr(state, "_fsdp_param_groups", None)) is None:  # torch 2.11 and before
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        return [FsdpParam(module, param) for group in groups for param in group.fsdp_params]
    except AttributeError as error:
        raise _missing(Name("torch.distributed.fsdp", "gather weights in FP8"), error) from error
